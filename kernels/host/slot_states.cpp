#include "slot_states.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "tree_errors.hpp"

namespace cachesvc {
namespace {

constexpr uint8_t named = 0x80;  // set on a slot's state while move() reads its list: a second naming is seen
constexpr const char* names[num_slot_states] = {"FREE", "USED", "LENT", "QUARANTINED"};

const char* name(uint8_t state) { return names[state & ~named]; }

}  // namespace

SlotStates::SlotStates(size_t num_slots) : states_(num_slots), free_((num_slots + 63) / 64) {
    for (size_t slot = 0; slot < num_slots; ++slot) free_[slot / 64] |= uint64_t{1} << (slot % 64);
    counts_[0] = num_slots;
}

std::optional<std::vector<int32_t>> SlotStates::alloc(size_t n, SlotState state) {
    if (state == SlotState::free) throw std::invalid_argument("alloc: FREE is not a state to allocate in");
    if (n > counts_[0]) return std::nullopt;
    std::vector<int32_t> slots;
    slots.reserve(n);
    for (; slots.size() < n; lowest_ += slots.size() < n) {
        uint64_t& word = free_[lowest_];
        for (; word && slots.size() < n; word &= word - 1)
            slots.push_back(static_cast<int32_t>(lowest_ * 64 + static_cast<size_t>(std::countr_zero(word))));
    }
    for (const int32_t slot : slots) states_[static_cast<size_t>(slot)] = static_cast<uint8_t>(state);
    counts_[0] -= n;
    counts_[static_cast<size_t>(state)] += n;
    return slots;
}

void SlotStates::move(std::span<const int32_t> slots, SlotState source, SlotState target) {
    const auto from = static_cast<uint8_t>(source);
    for (const int32_t slot : slots)
        if (slot < 0 || static_cast<size_t>(slot) >= states_.size())
            throw std::invalid_argument("slot " + std::to_string(slot) + " is not in [0, " +
                                        std::to_string(states_.size()) + ")");
    for (size_t at = 0; at < slots.size(); ++at) {
        uint8_t& state = states_[static_cast<size_t>(slots[at])];
        if (state == from) {
            state |= named;
            continue;
        }
        const bool twice = state & named;
        for (const int32_t slot : slots.first(at)) states_[static_cast<size_t>(slot)] &= static_cast<uint8_t>(~named);
        refuse(slots[at], source, target, twice);
    }
    for (const int32_t slot : slots) set(slot, target);
    counts_[from] -= slots.size();
    counts_[static_cast<size_t>(target)] += slots.size();
}

void SlotStates::set(int32_t slot, SlotState state) {
    const auto at = static_cast<size_t>(slot);
    const uint64_t bit = uint64_t{1} << (at % 64);
    states_[at] = static_cast<uint8_t>(state);
    if (state == SlotState::free) {
        free_[at / 64] |= bit;
        lowest_ = std::min(lowest_, at / 64);
    } else {
        free_[at / 64] &= ~bit;
    }
}

void SlotStates::refuse(int32_t slot, SlotState source, SlotState target, bool twice) const {
    const uint8_t state = states_[static_cast<size_t>(slot)];
    std::string message = "slot ";
    message += std::to_string(slot) + (twice ? " is named twice" : std::string(" is ") + name(state));
    message += std::string("; nothing moved from ") + name(static_cast<uint8_t>(source));
    message += std::string(" to ") + name(static_cast<uint8_t>(target));
    const bool is_free = state == static_cast<uint8_t>(SlotState::free);
    if (target == SlotState::free && (twice || is_free)) throw DoubleFree(message);
    throw StateError(message);
}

}  // namespace cachesvc
