// StoreShortcut: the `contains` of one client of node-managed memory, where its slab can tell of every page.
//
// DESIGN. A page may be found when the index has it in a frame of the slab that the node's account calls cached. The
// account is the node's, which changes it at any time; it is read here byte by byte, without its lock. The answer is of
// some moment during the call, as it is where the lock is taken: it may be wrong a moment later either way. What the
// index does not have is not there, if nothing is below the slab; else somebody has to ask further. A page in a frame
// that is not cached is on its way in or out: whoever holds the lock says what it is.
//
// Threads: as in shortcut.hpp; a `SlabPages` may be used and stopped by any at any time.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "shortcut.hpp"

namespace cachesvc {

// Which pages the clients of a slab may find.
class SlabPages {
public:
    // states [num_frames]: the account; a frame whose page may be found has the value `cached`. `owner` keeps it in
    // memory. `are_all`: what is not in the slab is nowhere.
    SlabPages(std::shared_ptr<PageIndex> index, int slot, std::span<const uint8_t> states,
              std::shared_ptr<const void> owner, uint8_t cached, bool are_all)
        : index_(std::move(index)),
          slot_(slot),
          states_(states),
          owner_(std::move(owner)),
          cached_(cached),
          are_all_(are_all) {}

    bool are_all() const { return are_all_; }
    // Where keys [n, 32] are: frames [n], -1 for those that may not be found; generations [n]; is_shown [n]: whether any
    // frame at all shows the page.
    void find(std::span<const uint8_t> keys, int32_t* frames, uint64_t* generations, bool* is_shown) const;
    // Which of keys [n, 32] may be found: outcomes [n]. False: of some that cannot be told here.
    bool tell(std::span<const uint8_t> keys, FoundPlaces& found, uint8_t* outcomes) const;

    // The slab is going away: its clients hear that from its node.
    void stop() { is_stopped_ = true; }

private:
    bool is_cached(int16_t slot, int32_t frame) const {
        const auto place = static_cast<size_t>(frame);
        return slot == slot_ && place < states_.size() && load_relaxed(states_[place]) == cached_;
    }

    const std::shared_ptr<PageIndex> index_;
    const int slot_;
    const std::span<const uint8_t> states_;
    const std::shared_ptr<const void> owner_;
    const uint8_t cached_;
    const bool are_all_;
    std::atomic<bool> is_stopped_ = false;
};

// Numbers are those of the client's calls.
class StoreShortcut final : public Shortcut {
public:
    static constexpr size_t tag_bytes = 8;

    // `wrapper` makes the node's keys of the client's; `tag` [8] is what they end with.
    StoreShortcut(std::shared_ptr<const SlabPages> pages, const HashWrapper& wrapper, const uint8_t* tag, size_t max_keys);

private:
    Told answer_open(std::span<const uint8_t> message, size_t max_keys, std::vector<uint8_t>& stream) override;
    bool tell(std::span<const uint8_t> client_keys, uint8_t* outcomes);

    const std::shared_ptr<const SlabPages> pages_;
    const HashWrapper wrapper_;
    std::array<uint8_t, tag_bytes> tag_;
    const size_t max_keys_;
    std::vector<uint8_t> keys_, outcomes_;
    FoundPlaces found_;
};

}  // namespace cachesvc
