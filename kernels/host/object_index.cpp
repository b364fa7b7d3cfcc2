#include "object_index.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "fault_guard.hpp"

namespace cachesvc {
namespace {

uint64_t load_count(const uint64_t* count) { return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(*count)).load(); }

}  // namespace

ObjectIndex::ObjectIndex(uint64_t capacity_bytes, uint64_t total_address)
    : capacity_(capacity_bytes),
      is_alone_(total_address == 0),
      total_(total_address ? reinterpret_cast<uint64_t*>(total_address) : &own_total_),
      table_(64, none) {}

void ObjectIndex::join_count(uint64_t count, uint64_t unnamed) {
    std::lock_guard lock(mutex_);
    count_ = reinterpret_cast<const uint64_t*>(count);
    shown_unnamed_ = reinterpret_cast<uint64_t*>(unnamed);
    own_count_ = 0;
    guarded_each(1, [this](size_t) { own_count_ = load_count(count_); }, [](size_t) {});
    set_unnamed(unnamed_);
}

// ---- the hash table and the list ----

uint32_t ObjectIndex::find(const ObjectId& id) const {
    for (size_t at = home(id);; at = (at + 1) & (table_.size() - 1)) {
        const uint32_t slot = table_[at];
        if (slot == none || entries_[slot].id == id) return slot;
    }
}

uint32_t ObjectIndex::find_as_of(const ObjectId& id, uint64_t as_of) const {
    const uint32_t slot = find(id);
    return slot != none && entries_[slot].born <= as_of ? slot : none;
}

uint32_t ObjectIndex::insert(const ObjectId& id, uint64_t bytes) {
    if ((num_objects_ + 1) * 3 > table_.size() * 2) grow_table();
    uint32_t slot;
    if (free_.empty()) {
        slot = static_cast<uint32_t>(entries_.size());
        entries_.emplace_back();
    } else {
        slot = free_.back();
        free_.pop_back();
    }
    entries_[slot] = Entry{id, none, none, 0, bytes, ++moment_};
    place(slot);
    ++num_objects_;
    return slot;
}

void ObjectIndex::place(uint32_t slot) {
    size_t at = home(entries_[slot].id);
    while (table_[at] != none) at = (at + 1) & (table_.size() - 1);
    table_[at] = slot;
}

void ObjectIndex::grow_table() {
    std::vector<uint32_t> old(table_.size() * 2, none);
    old.swap(table_);
    for (uint32_t slot : old)
        if (slot != none) place(slot);
}

void ObjectIndex::erase(uint32_t slot) {
    const size_t mask = table_.size() - 1;
    size_t hole = home(entries_[slot].id);
    while (table_[hole] != slot) hole = (hole + 1) & mask;
    // Backward shift: entries behind the hole move up unless they already sit at or after their home.
    for (size_t at = (hole + 1) & mask; table_[at] != none; at = (at + 1) & mask) {
        const size_t wanted = home(entries_[table_[at]].id);
        if (((at - wanted) & mask) >= ((at - hole) & mask)) {
            table_[hole] = table_[at];
            hole = at;
        }
    }
    table_[hole] = none;
    unlink(slot);
    free_.push_back(slot);
    --num_objects_;
}

void ObjectIndex::link_newest(uint32_t slot) {
    entries_[slot].newer = none;
    entries_[slot].older = newest_;
    (newest_ == none ? oldest_ : entries_[newest_].newer) = slot;
    newest_ = slot;
}

void ObjectIndex::link_oldest(uint32_t slot) {
    entries_[slot].older = none;
    entries_[slot].newer = oldest_;
    (oldest_ == none ? newest_ : entries_[oldest_].older) = slot;
    oldest_ = slot;
}

void ObjectIndex::unlink(uint32_t slot) {
    const Entry& entry = entries_[slot];
    (entry.newer == none ? newest_ : entries_[entry.newer].older) = entry.older;
    (entry.older == none ? oldest_ : entries_[entry.older].newer) = entry.newer;
}

void ObjectIndex::use(uint32_t slot, uint32_t stamp) {
    unlink(slot);
    link_newest(slot);
    entries_[slot].stamp = stamp;
}

void ObjectIndex::next_stamp() {
    if (++stamp_ == scan_stamp) stamp_ = 1;
}

// ---- lookups ----

void ObjectIndex::contains(const ObjectId* ids, size_t count, uint8_t* found) const {
    std::lock_guard lock(mutex_);
    constexpr size_t block = 16;  // cache misses of a block overlap
    for (size_t begin = 0; begin < count; begin += block) {
        const size_t end = std::min(count, begin + block);
        for (size_t i = begin; i < end; ++i) __builtin_prefetch(&table_[home(ids[i])]);
        for (size_t i = begin; i < end; ++i)
            if (const uint32_t slot = table_[home(ids[i])]; slot != none) __builtin_prefetch(&entries_[slot]);
        for (size_t i = begin; i < end; ++i) found[i] = find(ids[i]) != none;
    }
    if (leaving_.empty()) return;
    for (size_t i = 0; i < count; ++i) found[i] |= leaving_.contains(ids[i]);
}

void ObjectIndex::touch(const ObjectId* ids, const uint8_t* which, size_t count) {
    std::lock_guard lock(mutex_);
    for (size_t i = count; i-- > 0;)
        if (which[i])
            if (const uint32_t slot = find(ids[i]); slot != none) use(slot, 0);
}

// ---- room ----

// Runs change(total) until nobody else has changed the total meanwhile; returns the total before. Memory that is gone,
// or is somebody else's count by now, counts as full, and changes of it are lost. The count is asked after the total was
// read: whoever begins another one changes the total after that, and what was read is not exchanged any more.
template <class Change>
uint64_t ObjectIndex::change_total(const Change& change) const {
    uint64_t before = capacity_;
    const auto body = [this, &change, &before](size_t) {
        std::atomic_ref<uint64_t> total(*total_);
        uint64_t now = total.load();
        do {
            if (!is_own_count()) return;
        } while (!total.compare_exchange_weak(now, change(now)));
        before = now;
    };
    guarded_each(1, body, [](size_t) {});
    return before;
}

void ObjectIndex::add_total(uint64_t bytes) {
    change_total([bytes](uint64_t now) { return now + bytes; });
}

// The medium can be changed from outside (a file removed by hand and by us at once), so the total is kept from
// wrapping.
void ObjectIndex::sub_total(uint64_t bytes) {
    change_total([bytes](uint64_t now) { return now > bytes ? now - bytes : 0; });
}

// To be called where faults are guarded.
bool ObjectIndex::is_own_count() const { return !count_ || load_count(count_) == own_count_; }

bool ObjectIndex::is_counted() const {
    bool is_counted = false;
    guarded_each(1, [&](size_t) { is_counted = is_own_count(); }, [](size_t) {});
    return is_counted;
}

// Memory that is gone shows nothing; in another count the place may be somebody else's.
void ObjectIndex::set_unnamed(uint64_t bytes) {
    unnamed_ = bytes;
    if (!shown_unnamed_) return;
    const auto body = [this](size_t) {
        if (is_own_count()) std::atomic_ref<uint64_t>(*shown_unnamed_).store(unnamed_);
    };
    guarded_each(1, body, [](size_t) {});
}

// Takes up to `wanted` free bytes at once; returns what it got and by how much the total is above the capacity.
std::pair<uint64_t, uint64_t> ObjectIndex::take_free(uint64_t wanted) {
    const auto taken = [this, wanted](uint64_t now) { return std::min(wanted, now < capacity_ ? capacity_ - now : 0); };
    const uint64_t before = change_total([&taken](uint64_t now) { return now + taken(now); });
    return {taken(before), before > capacity_ ? before - capacity_ : 0};
}

std::vector<ObjectIndex::Victim> ObjectIndex::choose_victims(uint64_t to_free) const {
    std::vector<Victim> victims;
    uint64_t found = 0;
    for (size_t i = 0; i < set_aside_.size() && found < to_free; ++i) {
        victims.push_back(set_aside_[i]);
        found += set_aside_[i].bytes;
    }
    for (uint32_t slot = oldest_; slot != none && found < to_free; slot = entries_[slot].newer) {
        const Entry& entry = entries_[slot];
        if (entry.stamp == stamp_) break;  // from here on everything belongs to the batch that asks
        victims.push_back({entry.id, entry.bytes, false});
        found += entry.bytes;
    }
    return victims;
}

void ObjectIndex::remove_victims(const std::vector<Victim>& victims) {
    for (const Victim& victim : victims) {
        if (victim.set_aside) {
            set_aside_bytes_ -= victim.bytes;
            set_aside_.pop_front();
        } else {
            erase(find(victim.id));
            leaving_.insert(victim.id);
        }
    }
}

void ObjectIndex::forget_victims(const Plan& plan) {
    if (!plan.is_eviction) return;
    for (const Victim& victim : plan.victims)
        if (const auto found = leaving_.find(victim.id); !victim.set_aside && found != leaving_.end())
            leaving_.erase(found);
}

uint64_t ObjectIndex::refuse_from_end(const uint64_t* bytes, size_t count, uint8_t* admission, uint64_t too_much) {
    uint64_t refused = 0;
    for (size_t i = count; i-- > 0 && refused < too_much;) {
        if (admission[i] != granted) continue;
        admission[i] = no_space;
        refused += bytes[i];
    }
    return refused;
}

ObjectIndex::Plan ObjectIndex::reserve(const ObjectId* ids, const uint64_t* bytes, size_t count, uint8_t* admission) {
    std::lock_guard lock(mutex_);
    next_stamp();
    uint64_t wanted = 0;
    for (size_t i = count; i-- > 0;) {  // from the end: later ids end up older
        const uint32_t slot = find(ids[i]);
        if (slot != none) use(slot, stamp_);
        admission[i] = slot != none ? exists : bytes[i] > capacity_ ? too_large : granted;
        if (admission[i] == granted) wanted += bytes[i];
    }
    auto [taken, excess] = take_free(wanted);
    Plan plan{{}, wanted - taken, excess, true};
    if (plan.shortfall) {
        plan.victims = choose_victims(plan.shortfall + excess);
        uint64_t found = 0;
        for (const Victim& victim : plan.victims) found += victim.bytes;
        if (found < plan.shortfall + excess) {
            const uint64_t possible = taken + (found > excess ? found - excess : 0);
            wanted -= refuse_from_end(bytes, count, admission, wanted - possible);
            if (taken > wanted) {
                sub_total(taken - wanted);
                taken = wanted;
            }
            plan.shortfall = wanted - taken;
            const uint64_t needed = plan.shortfall ? plan.shortfall + excess : 0;
            while (!plan.victims.empty() && found - plan.victims.back().bytes >= needed) {
                found -= plan.victims.back().bytes;
                plan.victims.pop_back();
            }
        }
        remove_victims(plan.victims);
    }
    reserved_ += taken;
    set_unnamed(unnamed_ + taken);
    return plan;
}

ObjectIndex::Plan ObjectIndex::overflow() {
    std::lock_guard lock(mutex_);
    next_stamp();
    Plan plan{{}, 0, take_free(0).second, true};
    plan.victims = choose_victims(plan.excess);
    remove_victims(plan.victims);
    return plan;
}

ObjectIndex::Plan ObjectIndex::withdraw(const ObjectId* ids, size_t count) {
    std::lock_guard lock(mutex_);
    Plan plan;
    plan.is_eviction = false;
    for (size_t i = 0; i < count; ++i) {
        if (scanning_) forgotten_.insert(ids[i]);
        const uint32_t slot = find(ids[i]);
        if (slot == none) continue;
        plan.victims.push_back({ids[i], entries_[slot].bytes, false});
        erase(slot);
    }
    return plan;
}

void ObjectIndex::settle(const Plan& plan, const uint8_t* removal, const uint64_t* bytes, size_t count,
                         uint8_t* admission) {
    std::lock_guard lock(mutex_);
    forget_victims(plan);
    uint64_t freed = 0;
    for (size_t i = 0; i < plan.victims.size(); ++i) {
        const Victim& victim = plan.victims[i];
        if (removal[i] == removed) freed += victim.bytes;
        if (removal[i] != kept) continue;
        // To the far end: what cannot be removed must not be everybody's first choice.
        if (victim.set_aside) {
            set_aside_.push_back(victim);
            set_aside_bytes_ += victim.bytes;
        } else if (find(victim.id) == none) {
            link_newest(insert(victim.id, victim.bytes));
        }
    }
    const uint64_t needed = plan.shortfall + plan.excess;
    const uint64_t missing = freed >= needed ? 0 : std::min(plan.shortfall, needed - freed);
    const uint64_t got = plan.shortfall - missing;
    sub_total(freed - got);
    const uint64_t spare = missing ? refuse_from_end(bytes, count, admission, missing) - missing : 0;
    reserved_ += got - spare;
    set_unnamed(unnamed_ + got - spare);
    sub_total(spare);
}

bool ObjectIndex::name(const uint64_t* bytes, const uint8_t* admission, const uint8_t* named, size_t count) {
    std::lock_guard lock(mutex_);
    uint64_t naming = 0;
    for (size_t i = 0; i < count; ++i)
        if (admission[i] == granted && named[i]) naming += bytes[i];
    set_unnamed(unnamed_ - naming);
    return is_counted();
}

void ObjectIndex::commit(const ObjectId* ids, const uint64_t* bytes, const uint8_t* admission, const uint8_t* named,
                         const uint8_t* stored, size_t count) {
    std::lock_guard lock(mutex_);
    uint64_t unnamed = 0, given_back = 0;
    for (size_t i = count; i-- > 0;) {
        if (admission[i] != granted) continue;
        reserved_ -= bytes[i];
        if (!named[i]) unnamed += bytes[i];
        // A stored one that is known already was met by a reader between its publication and now (adopt).
        if (!stored[i]) given_back += bytes[i];
        else if (find(ids[i]) == none) link_newest(insert(ids[i], bytes[i]));
    }
    set_unnamed(unnamed_ - unnamed);
    sub_total(given_back);
}

void ObjectIndex::give_back(uint64_t bytes) { sub_total(bytes); }

// ---- what the medium says ----

void ObjectIndex::adopt(const ObjectId* ids, const uint64_t* bytes, const uint8_t* which, size_t count) {
    std::lock_guard lock(mutex_);
    for (size_t i = count; i-- > 0;)
        if (which[i] && find(ids[i]) == none) link_newest(insert(ids[i], bytes[i]));
}

uint64_t ObjectIndex::moment() const {
    std::lock_guard lock(mutex_);
    return moment_;
}

void ObjectIndex::forget(const ObjectId* ids, const uint8_t* which, size_t count, bool counted, uint64_t as_of) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
        if (!which[i]) continue;
        if (scanning_) forgotten_.insert(ids[i]);
        const uint32_t slot = find_as_of(ids[i], as_of);
        if (slot == none) continue;
        if (counted) sub_total(entries_[slot].bytes);
        erase(slot);
    }
}

void ObjectIndex::set_aside(const ObjectId* ids, const uint64_t* bytes, const uint8_t* which, size_t count,
                            uint64_t as_of) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
        if (!which[i]) continue;
        if (scanning_) forgotten_.insert(ids[i]);
        const uint32_t slot = find_as_of(ids[i], as_of);
        if (slot == none) continue;
        // Damage may have changed its length.
        add_total(bytes[i]);
        sub_total(entries_[slot].bytes);
        set_aside_.push_back({ids[i], bytes[i], true});
        set_aside_bytes_ += bytes[i];
        erase(slot);
    }
}

void ObjectIndex::adopt_set_aside(const ObjectId* ids, const uint64_t* bytes, size_t count, bool counted) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
        set_aside_.push_back({ids[i], bytes[i], true});
        set_aside_bytes_ += bytes[i];
        if (counted) add_total(bytes[i]);
    }
}

void ObjectIndex::begin_scan() {
    std::lock_guard lock(mutex_);
    scanning_ = true;
}

void ObjectIndex::add_scanned(const ObjectId* ids, const uint64_t* bytes, const int64_t* modified_ns, size_t count,
                              bool counted) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
        if (find(ids[i]) != none || forgotten_.contains(ids[i])) continue;
        const uint32_t slot = insert(ids[i], bytes[i]);
        link_oldest(slot);
        entries_[slot].stamp = scan_stamp;
        if (counted) add_total(bytes[i]);
        scanned_.emplace_back(modified_ns[i], ids[i]);
    }
}

void ObjectIndex::end_scan() {
    std::lock_guard lock(mutex_);
    std::sort(scanned_.begin(), scanned_.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [modified_ns, id] : scanned_) {
        const uint32_t slot = find(id);
        if (slot == none || entries_[slot].stamp != scan_stamp) continue;
        unlink(slot);
        link_oldest(slot);
        entries_[slot].stamp = 0;
    }
    scanning_ = false;
    forgotten_ = {};
    scanned_ = {};
}

// ---- for people and tests ----

ObjectIndex::Usage ObjectIndex::usage() const {
    std::lock_guard lock(mutex_);
    return {change_total([](uint64_t now) { return now; }), reserved_, capacity_, set_aside_bytes_, num_objects_};
}

void ObjectIndex::check() const {
    std::lock_guard lock(mutex_);
    auto require = [](bool holds, const char* what) {
        if (!holds) throw std::logic_error(std::string("object index: ") + what);
    };
    size_t listed = 0;
    uint64_t bytes = set_aside_bytes_;
    uint32_t newer = none;
    for (uint32_t slot = newest_; slot != none; newer = slot, slot = entries_[slot].older) {
        require(++listed <= num_objects_, "the list is longer than the number of objects");
        require(entries_[slot].newer == newer, "the list's links disagree");
        require(find(entries_[slot].id) == slot, "an object in the list is not found by its id");
        bytes += entries_[slot].bytes;
    }
    require(newer == oldest_ && listed == num_objects_, "the list misses objects");
    require(listed + free_.size() == entries_.size(), "entries leaked");
    uint64_t aside = 0;
    for (const Victim& victim : set_aside_) aside += victim.bytes;
    require(aside == set_aside_bytes_, "bytes set aside do not add up");
    require(unnamed_ <= reserved_, "more is unnamed than reserved");
    require(!is_alone_ || own_total_ == bytes + reserved_, "the total does not add up");
}

}  // namespace cachesvc
