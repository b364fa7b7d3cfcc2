// PlaceTable: a hash table from a 64-bit hash to up to four places (slot, frame). 32 bytes an entry, no other memory.
//
// Linear probing from home = hash * capacity / 2^64; removal shifts the entries behind it forward, so there are no
// tombstones and a table never decays. Not locked: its owner is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "huge_page_allocator.hpp"

namespace cachesvc {

struct Place {
    int16_t slot;
    int32_t frame;
    bool operator==(const Place&) const = default;
};

class PlaceTable {
public:
    static constexpr int num_places = 4;
    static constexpr int16_t no_slot = -1;

    struct Entry {
        uint64_t hash;  // 0: no entry
        int32_t frames[num_places];
        int16_t slots[num_places];  // no_slot: no place

        Place place(int i) const { return {slots[i], frames[i]}; }
        void set_place(int i, Place place) { slots[i] = place.slot, frames[i] = place.frame; }
        int index_of(Place place) const;  // -1: not here
        int free_place() const;           // -1: all taken
        bool has_places() const;
    };
    static_assert(sizeof(Entry) == 32, "two entries per cache line");

    using Entries = std::vector<Entry, HugePageAllocator<Entry>>;

    // Room for `num_entries` entries at a load that keeps probes short.
    explicit PlaceTable(size_t num_entries);

    void prefetch(uint64_t hash) const { __builtin_prefetch(&entries_[home(hash)]); }
    const Entry* find(uint64_t hash) const;  // null: none
    Entry* find(uint64_t hash) { return const_cast<Entry*>(std::as_const(*this).find(hash)); }
    // The entry of `hash`, made without places if need be. Throws std::length_error beyond the table's room.
    Entry& find_or_add(uint64_t hash);
    // Removes an entry; pointers to other entries become invalid.
    void remove(Entry* entry);

    size_t num_entries() const { return num_entries_; }
    size_t room() const { return room_; }
    size_t memory_bytes() const { return entries_.capacity() * sizeof(Entry); }
    const Entries& entries() const { return entries_; }

private:
    size_t home(uint64_t hash) const;
    size_t next(size_t position) const { return position + 1 == entries_.size() ? 0 : position + 1; }

    size_t room_;
    size_t num_entries_ = 0;
    Entries entries_;
};

}  // namespace cachesvc
