// PageIndex: page key -> up to four places (region slot, frame) that hold the page.
//
// DESIGN. The index is a cache of the regions' directories and holds no truth: it files places under a 64-bit seeded
// hash of the key. Whether a place still holds the key is asked of its record, under the reader protocol, at every use;
// a stale place is a miss, two keys with one hash share an entry and are told apart by their records.
//   memory   48 bytes of table per frame of all regions, plus 8 for the hash a frame is filed under, which lets a frame
//            that is published again take its old place away. So entries never outnumber frames, publish() never grows
//            anything, and the size is known when a region is added.
//   removal  remove_region() only retires the slot. Its places are stale from then on; they go when a publish wants
//            their entry or when the table is rebuilt, after which the slot's number can be given again.
//
// Threads: every function may run in any thread at any time. Lookups share a lock. Writers exclude each other for their
// whole call and readers for short slices of it; a rebuild happens beside the readers and is swapped in.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <stdexcept>
#include <vector>

#include "place_table.hpp"
#include "region.hpp"

namespace cachesvc {

class IndexInvariantBroken : public std::logic_error {
public:
    using std::logic_error::logic_error;
};

class PageIndex {
public:
    static constexpr int max_slots = 32767;  // slots are int16 outside

    // Where n keys are: slot -1 is a miss. generations: the record's when its key was checked.
    struct Found {
        Place place{PlaceTable::no_slot, -1};
        uint64_t generation = 0;
    };
    struct Locations {
        int16_t* slots;
        int32_t* frames;
        uint64_t* generations;
        void set(size_t i, const Found& found) const {
            slots[i] = found.place.slot, frames[i] = found.place.frame, generations[i] = found.generation;
        }
    };

    PageIndex();

    // Makes room for the region's frames and returns its slot. Keeps the region mapped until remove_region.
    // Throws std::length_error when all slots are taken.
    int add_region(std::shared_ptr<Region> region);
    // Forgets the region; returns how many of its frames were filed. Throws std::out_of_range for a slot not in use.
    size_t remove_region(int slot);
    // Files frames under the keys their records show now; a frame that is unreadable is taken out. Returns how many are
    // filed afterwards: a fifth valid place of one key is not. Throws std::out_of_range for a slot or a frame.
    size_t publish(int slot, std::span<const int32_t> frames);
    // Looks n keys [n, 32] up; places in `exclude_slot` (-1: none) do not count.
    void lookup(const uint8_t* keys, size_t num_keys, int exclude_slot, const Locations& out) const;

    size_t num_keys() const;  // entries, including those that only retired slots still hold
    size_t memory_bytes() const;
    // Throws IndexInvariantBroken naming the first broken invariant.
    void check() const;

private:
    struct Slot {
        std::shared_ptr<Region> region;     // null: retired, or free
        std::vector<uint64_t> filed_under;  // per frame: the hash of its entry, 0: not filed
        size_t num_filed = 0;
        bool is_retired = false;  // places of it may still be in the table
    };
    struct PublishedFrame {
        int32_t frame;
        uint64_t hash;  // 0: unreadable
    };

    uint64_t hash_of(const KeyWords& key) const;
    const Slot& live_slot(int slot) const;
    int free_slot() const;
    void rebuild(size_t num_more_frames);
    std::vector<PublishedFrame> read_keys(const Region& region, std::span<const int32_t> frames) const;
    bool file(Place place, uint64_t hash);
    void unfile(Place place);
    void forget(Place place);
    int choose_place(const PlaceTable::Entry& entry) const;
    bool is_stale(Place place, uint64_t hash) const;
    void lookup_group(const uint8_t* keys, size_t num_keys, int exclude_slot, const Locations& out) const;
    Found find_valid(const PlaceTable::Entry* entry, const KeyWords& key, int exclude_slot) const;
    int next_candidate(const PlaceTable::Entry* entry, int from, int exclude_slot) const;
    const FrameRecord& record_at(Place place) const;
    void check_entry(const PlaceTable::Entry& entry, std::vector<size_t>& num_filed) const;

    const uint64_t seeds_[4];  // random: nobody can aim keys at one stretch of the table
    mutable std::mutex writers_;  // taken before table_lock_
    mutable std::shared_mutex table_lock_;
    std::vector<Slot> slots_;
    std::unique_ptr<PlaceTable> table_;
};

}  // namespace cachesvc
