#include "place_table.hpp"

#include <algorithm>
#include <stdexcept>

namespace cachesvc {

int PlaceTable::Entry::index_of(Place wanted) const {
    for (int i = 0; i < num_places; ++i) {
        if (place(i) == wanted) return i;
    }
    return -1;
}

int PlaceTable::Entry::free_place() const {
    for (int i = 0; i < num_places; ++i) {
        if (slots[i] == no_slot) return i;
    }
    return -1;
}

bool PlaceTable::Entry::has_places() const {
    return std::any_of(std::begin(slots), std::end(slots), [](int16_t slot) { return slot != no_slot; });
}

PlaceTable::PlaceTable(size_t num_entries) : room_(num_entries), entries_(num_entries + num_entries / 2 + 8) {}

size_t PlaceTable::home(uint64_t hash) const {
    return static_cast<size_t>(static_cast<unsigned __int128>(hash) * entries_.size() >> 64);
}

const PlaceTable::Entry* PlaceTable::find(uint64_t hash) const {
    for (size_t at = home(hash);; at = next(at)) {
        const Entry& entry = entries_[at];
        if (entry.hash == hash) return &entry;
        if (entry.hash == 0) return nullptr;
    }
}

PlaceTable::Entry& PlaceTable::find_or_add(uint64_t hash) {
    size_t at = home(hash);
    for (; entries_[at].hash != 0; at = next(at)) {
        if (entries_[at].hash == hash) return entries_[at];
    }
    if (num_entries_ == room_) throw std::length_error("place table is full");
    ++num_entries_;
    Entry& entry = entries_[at];
    entry.hash = hash;
    std::fill(std::begin(entry.slots), std::end(entry.slots), no_slot);
    return entry;
}

void PlaceTable::remove(Entry* entry) {
    size_t hole = static_cast<size_t>(entry - entries_.data());
    for (size_t at = next(hole); entries_[at].hash != 0; at = next(at)) {
        // An entry may move into the hole unless its home lies behind the hole: (hole, at], cyclically.
        const size_t wanted = home(entries_[at].hash);
        const bool is_behind = hole < at ? hole < wanted && wanted <= at : hole < wanted || wanted <= at;
        if (is_behind) continue;
        entries_[hole] = entries_[at];
        hole = at;
    }
    entries_[hole] = Entry{};
    --num_entries_;
}

}  // namespace cachesvc
