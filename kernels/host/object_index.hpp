// Which objects a bounded store holds, how large they are, in which order they leave, and how much room is promised.
//
// DESIGN. A hash table of ids with an LRU list through its entries, under one mutex; no I/O. Room is counted in one
// number, the total: bytes of objects, of objects set aside, of victims not removed yet and of reservations. It may
// live in memory shared by several processes that use one directory, so that total <= capacity holds for all of them
// together. Whoever can write there can also cut that memory off (a file made shorter); it then counts as full.
//
// What a process that dies had reserved can be told from a second shared number, its own: bytes of reservations whose
// objects have no name on the medium yet. It is never more than what the total holds of them, whenever the process
// ends: the total is raised first and lowered last. A third one says which count this is: who counts the store anew
// changes it before the total, and from then on nothing of an index that counted along before changes either number.
//
// A put goes reserve -> (remove the victims) -> settle -> write -> commit. A reservation takes free room at once and
// the room of its victims when they are gone, so the total never passes the capacity at any instant. Until `settle` the
// victims can be read, and `contains` says so: who evicts may have to find another place for them first.
//
// Order: the most recently used object leaves last. Of ids touched in one call, later ones are older: they are deeper
// pages of a prefix, and a prefix without its deepest page is worth more than one without its first.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "object_id.hpp"

namespace cachesvc {

class ObjectIndex {
   public:
    // total_address: a uint64_t shared with other processes, or 0 to keep it here.
    explicit ObjectIndex(uint64_t capacity_bytes, uint64_t total_address = 0);
    // From now on the total is this index's only as long as the uint64_t at `count` is what it is now, and what is
    // reserved and not named is kept at `unnamed` too, a uint64_t; 0: nowhere. Before the first `reserve`.
    void join_count(uint64_t count, uint64_t unnamed);

    enum Admission : uint8_t { granted = 0, exists = 1, no_space = 2, too_large = 3 };

    struct Victim {
        ObjectId id;
        uint64_t bytes;
        bool set_aside;
    };
    struct Plan {
        std::vector<Victim> victims;  // to be removed from the medium; already gone from the index
        uint64_t shortfall = 0;       // bytes this reservation lacks until they are
        uint64_t excess = 0;          // bytes the total was above the capacity
        bool is_eviction = true;      // the victims leave for room, and not because somebody wants them gone
    };
    // What became of a victim. `vanished`: another process had removed it and counted it off.
    enum Removal : uint8_t { kept = 0, removed = 1, vanished = 2 };
    struct Usage {
        uint64_t total, reserved, capacity, set_aside, objects;
    };

    // found[i] = 1 where ids[i] is known, or is evicted and may still be on the medium.
    void contains(const ObjectId* ids, size_t count, uint8_t* found) const;
    void touch(const ObjectId* ids, const uint8_t* which, size_t count);

    // Takes room for new objects; what does not fit is refused from the end of the batch. Objects of the batch that
    // exist are touched and are no victims of it. Every `granted` one must reach `commit`, after `settle`.
    Plan reserve(const ObjectId* ids, const uint64_t* bytes, size_t count, uint8_t* admission);
    // Victims whose removal failed return to the index; when that leaves too little room, granted objects become
    // no_space.
    void settle(const Plan& plan, const uint8_t* removal, const uint64_t* bytes, size_t count, uint8_t* admission);
    // Granted objects with named[i] != 0 get their names on the medium from here on: they may be there, or not, when
    // this process ends before `commit`. False: the room they have is in no count any more; they must not get names.
    bool name(const uint64_t* bytes, const uint8_t* admission, const uint8_t* named, size_t count);
    // Ends the reservations of the granted objects: stored[i] != 0 puts it into the index, else its room is given back.
    // named: as in `name`.
    void commit(const ObjectId* ids, const uint64_t* bytes, const uint8_t* admission, const uint8_t* named,
                const uint8_t* stored, size_t count);
    // Room that a process which has ended had reserved.
    void give_back(uint64_t bytes);
    // What must leave because the total is above the capacity (lowered, or filled from outside); settle it as well.
    Plan overflow();
    // Takes the known ones among these out of the index, for deletion; settle it as well.
    Plan withdraw(const ObjectId* ids, size_t count);

    // Objects found on the medium that the index did not know; whoever put them has counted them.
    void adopt(const ObjectId* ids, const uint64_t* bytes, const uint8_t* which, size_t count);
    // The next two act on what the index knew at a moment: an object that another thread added since is left alone.
    uint64_t moment() const;
    // Objects that turned out to be gone. counted: their bytes leave the total.
    void forget(const ObjectId* ids, const uint8_t* which, size_t count, bool counted, uint64_t as_of);
    // Objects taken out of sight: they still count, with the bytes they have now, and are the first to leave.
    void set_aside(const ObjectId* ids, const uint64_t* bytes, const uint8_t* which, size_t count, uint64_t as_of);
    // The same, found by a scan.
    void adopt_set_aside(const ObjectId* ids, const uint64_t* bytes, size_t count, bool counted);

    // A scan runs from here on: ids forgotten meanwhile are not added by it.
    void begin_scan();
    void add_scanned(const ObjectId* ids, const uint64_t* bytes, const int64_t* modified_ns, size_t count, bool
    counted);
    // Orders what the scan found by modification time, all of it older than whatever was used since.
    void end_scan();

    Usage usage() const;
    // Every invariant; throws std::logic_error naming the broken one.
    void check() const;

   private:
    static constexpr uint32_t none = UINT32_MAX;
    struct Entry {
        ObjectId id;
        uint32_t newer, older;
        uint32_t stamp;  // the reserve() that touched it last; scan_stamp while a scan added it and nobody used it
        uint64_t bytes;
        uint64_t born;  // the moment of its insertion
    };
    static constexpr uint32_t scan_stamp = UINT32_MAX;

    uint32_t find(const ObjectId& id) const;
    uint32_t find_as_of(const ObjectId& id, uint64_t as_of) const;
    uint32_t insert(const ObjectId& id, uint64_t bytes);  // the id must be unknown; the entry is in no list yet
    void erase(uint32_t slot);
    void link_newest(uint32_t slot);
    void link_oldest(uint32_t slot);
    void unlink(uint32_t slot);
    void use(uint32_t slot, uint32_t stamp);
    void place(uint32_t slot);
    void grow_table();
    void next_stamp();
    size_t home(const ObjectId& id) const { return id.hash() & (table_.size() - 1); }

    std::pair<uint64_t, uint64_t> take_free(uint64_t wanted);
    std::vector<Victim> choose_victims(uint64_t to_free) const;
    void remove_victims(const std::vector<Victim>& victims);
    void forget_victims(const Plan& plan);
    bool is_own_count() const;
    bool is_counted() const;
    static uint64_t refuse_from_end(const uint64_t* bytes, size_t count, uint8_t* admission, uint64_t too_much);
    template <class Change>
    uint64_t change_total(const Change& change) const;
    void add_total(uint64_t bytes);
    void sub_total(uint64_t bytes);
    void set_unnamed(uint64_t bytes);

    mutable std::mutex mutex_;
    const uint64_t capacity_;
    const bool is_alone_;  // the total is this index's own and must add up
    alignas(8) uint64_t own_total_ = 0;
    uint64_t* const total_;
    uint64_t reserved_ = 0, unnamed_ = 0, set_aside_bytes_ = 0;
    uint64_t* shown_unnamed_ = nullptr;
    const uint64_t* count_ = nullptr;
    uint64_t own_count_ = 0;
    std::unordered_multiset<ObjectId, ObjectIdHash> leaving_;  // victims of evictions that are not settled
    uint32_t stamp_ = 0;
    uint64_t moment_ = 0;  // insertions so far

    std::vector<Entry> entries_;
    std::vector<uint32_t> free_;
    std::vector<uint32_t> table_;  // open addressing, linear probing; slots of entries_, or none
    size_t num_objects_ = 0;
    uint32_t newest_ = none, oldest_ = none;
    std::deque<Victim> set_aside_;

    bool scanning_ = false;
    std::unordered_set<ObjectId, ObjectIdHash> forgotten_;
    std::vector<std::pair<int64_t, ObjectId>> scanned_;
};

}  // namespace cachesvc
