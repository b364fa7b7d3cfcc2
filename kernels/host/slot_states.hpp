// Who owns each slot (a device page or a frame): one state a slot, exactly one at any time.
//
// Allocation takes the lowest free slots, so that what is allocated together mostly lies together. Not thread-safe.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace cachesvc {

enum class SlotState : uint8_t { free = 0, used = 1, lent = 2, quarantined = 3 };
constexpr int num_slot_states = 4;

class SlotStates {
  public:
    explicit SlotStates(size_t num_slots);

    // All or nothing; nullopt when fewer than n are free.
    std::optional<std::vector<int32_t>> alloc(size_t n, SlotState state);
    // All or nothing; throws DoubleFree or StateError when a slot is not in `source` or is named twice.
    void move(std::span<const int32_t> slots, SlotState source, SlotState target);
    size_t count(SlotState state) const { return counts_[static_cast<size_t>(state)]; }
    const std::vector<uint8_t>& states() const { return states_; }

  private:
    void set(int32_t slot, SlotState state);
    [[noreturn]] void refuse(int32_t slot, SlotState source, SlotState target, bool twice) const;

    std::vector<uint8_t> states_;
    std::vector<uint64_t> free_;  // a bit for each free slot
    size_t lowest_ = 0;           // no word of free_ before this one has a bit
    std::array<size_t, num_slot_states> counts_{};
};

}  // namespace cachesvc
