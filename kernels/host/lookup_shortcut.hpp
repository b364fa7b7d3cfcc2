// LookupShortcut: the lookups of one session that need nobody's thought, because every page is in frames of others.
//
// Threads: `stop` may come from any at any time; the rest is for one.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "channel_messages.hpp"
#include "page_index.hpp"
#include "page_keys.hpp"

namespace cachesvc {

class LookupShortcut {
public:
    // `slot`: the session's own, which does not count.
    LookupShortcut(std::shared_ptr<PageIndex> index, int slot) : index_(std::move(index)), slot_(slot) {}

    // A client's op numbers only grow. False: this one does not, and is not taken.
    bool take_op(uint64_t op) {
        if (op <= last_op_) return false;
        last_op_ = op;
        return true;
    }
    uint64_t last_op() const { return last_op_; }

    // True: all of its pages are there, and its op is taken. False: nothing is said about it, and nothing was done.
    bool answers(const LookupAsked& asked, size_t max_keys) {
        const size_t num_keys = asked.keys.size() / key_bytes;
        if (is_stopped_ || asked.op <= last_op_ || num_keys > max_keys) return false;
        // The last page first: most chains that are not there in full end early.
        return has_all(asked.keys.last(key_bytes)) && has_all(asked.keys) && take_op(asked.op);
    }

    // The session has ended: nothing is answered from now on.
    void stop() { is_stopped_ = true; }

private:
    bool has_all(std::span<const uint8_t> keys) {
        const size_t num_keys = keys.size() / key_bytes;
        slots_.resize(num_keys), frames_.resize(num_keys), generations_.resize(num_keys);
        index_->lookup(keys.data(), num_keys, slot_, {slots_.data(), frames_.data(), generations_.data()});
        return std::all_of(slots_.begin(), slots_.end(), [](int16_t slot) { return slot >= 0; });
    }

    const std::shared_ptr<PageIndex> index_;
    const int slot_;
    uint64_t last_op_ = 0;
    std::atomic<bool> is_stopped_ = false;
    std::vector<int16_t> slots_;
    std::vector<int32_t> frames_;
    std::vector<uint64_t> generations_;
};

}  // namespace cachesvc
