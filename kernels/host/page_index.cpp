#include "page_index.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "fault_guard.hpp"
#include "region_ops.hpp"

namespace cachesvc {
namespace {

// Frames filed per hold of the table's lock: bounds how long a lookup waits (about 20 µs).
constexpr size_t publish_slice = 256;
// Keys in flight between a prefetch and its use; also how often the SIGBUS guard is armed.
constexpr size_t lookup_group_size = 128;

uint64_t random_word() {
    uint64_t word = 0;
    if (getentropy(&word, sizeof(word)) != 0) throw std::system_error(errno, std::generic_category(), "getentropy");
    return word;
}

uint64_t fold_product(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

void expect(bool holds, const char* invariant) {
    if (!holds) throw IndexInvariantBroken(std::string("page index: ") + invariant);
}

}  // namespace

PageIndex::PageIndex()
    : seeds_{random_word(), random_word(), random_word(), random_word()}, table_(std::make_unique<PlaceTable>(0)) {}

uint64_t PageIndex::hash_of(const KeyWords& key) const {
    const uint64_t hash =
        fold_product(key[0] ^ seeds_[0], key[1] ^ seeds_[1]) + fold_product(key[2] ^ seeds_[2], key[3] ^ seeds_[3]);
    return hash == 0 ? 1 : hash;
}

const PageIndex::Slot& PageIndex::live_slot(int slot) const {
    if (slot >= 0 && static_cast<size_t>(slot) < slots_.size() && slots_[slot].region != nullptr) return slots_[slot];
    throw std::out_of_range("slot " + std::to_string(slot) + " holds no region");
}

int PageIndex::free_slot() const {
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
        if (slots_[slot].region == nullptr && !slots_[slot].is_retired) return static_cast<int>(slot);
    }
    return slots_.size() < max_slots ? static_cast<int>(slots_.size()) : -1;
}

int PageIndex::add_region(std::shared_ptr<Region> region) {
    const std::lock_guard writer(writers_);
    size_t num_places = region->num_frames();
    for (const Slot& slot : slots_) num_places += slot.region != nullptr ? slot.region->num_frames() : slot.num_filed;
    int slot = free_slot();
    if (num_places > table_->room() || slot < 0) {
        rebuild(region->num_frames());
        slot = free_slot();
    }
    if (slot < 0) throw std::length_error("all " + std::to_string(max_slots) + " region slots are taken");
    std::vector<uint64_t> filed_under(region->num_frames());
    const std::unique_lock table(table_lock_);
    if (static_cast<size_t>(slot) == slots_.size()) slots_.emplace_back();
    slots_[slot] = {std::move(region), std::move(filed_under), 0, false};
    return slot;
}

// Needs writers_. Copies what lives into a table for all live regions and `num_more_frames`; frees the retired slots.
void PageIndex::rebuild(size_t num_more_frames) {
    size_t num_frames = num_more_frames;
    for (const Slot& slot : slots_) num_frames += slot.region != nullptr ? slot.region->num_frames() : 0;
    auto table = std::make_unique<PlaceTable>(num_frames);
    for (const PlaceTable::Entry& entry : table_->entries()) {
        for (int i = 0; entry.hash != 0 && i < PlaceTable::num_places; ++i) {
            const Place place = entry.place(i);
            if (place.slot == PlaceTable::no_slot || slots_[place.slot].region == nullptr) continue;
            PlaceTable::Entry& copy = table->find_or_add(entry.hash);
            copy.set_place(copy.free_place(), place);
        }
    }
    const std::unique_lock lock(table_lock_);
    table_.swap(table);
    for (Slot& slot : slots_) {
        if (slot.is_retired) slot = Slot{};
    }
}

size_t PageIndex::remove_region(int slot) {
    std::shared_ptr<Region> region;  // unmapped after the locks are gone: that takes its time
    const std::lock_guard writer(writers_);
    live_slot(slot);
    const std::unique_lock table(table_lock_);
    Slot& removed = slots_[slot];
    region.swap(removed.region);
    std::vector<uint64_t>().swap(removed.filed_under);
    removed.is_retired = true;
    return removed.num_filed;
}

std::vector<PageIndex::PublishedFrame> PageIndex::read_keys(const Region& region,
                                                            std::span<const int32_t> frames) const {
    std::vector<PublishedFrame> published(frames.size());
    guarded_each(
        frames.size(),
        [&](size_t i) {
            const FrameRecord& record = region.record(frames[i]);
            const uint64_t generation = load_generation(record);
            const KeyWords key = load_key(record);
            const bool is_stable = is_readable(generation) && is_unchanged(record, generation);
            published[i] = {frames[i], is_stable ? hash_of(key) : 0};
        },
        [&](size_t i) { published[i] = {frames[i], 0}; });
    return published;
}

size_t PageIndex::publish(int slot, std::span<const int32_t> frames) {
    const std::lock_guard writer(writers_);
    const Region& region = *live_slot(slot).region;
    check_frames(region, frames, "frames");
    size_t num_filed = 0;
    for (size_t begin = 0; begin < frames.size(); begin += publish_slice) {
        const auto slice = frames.subspan(begin, std::min(publish_slice, frames.size() - begin));
        const auto published = read_keys(region, slice);
        const std::unique_lock table(table_lock_);
        for (const PublishedFrame& frame : published) {
            const Place place{static_cast<int16_t>(slot), frame.frame};
            if (slots_[slot].filed_under[frame.frame] != frame.hash) unfile(place);
            if (frame.hash != 0) num_filed += file(place, frame.hash);
        }
    }
    return num_filed;
}

bool PageIndex::file(Place place, uint64_t hash) {
    Slot& owner = slots_[place.slot];
    if (owner.filed_under[place.frame] == hash) return true;
    PlaceTable::Entry& entry = table_->find_or_add(hash);
    const int index = choose_place(entry);
    if (index < 0) return false;
    if (entry.slots[index] != PlaceTable::no_slot) forget(entry.place(index));
    entry.set_place(index, place);
    owner.filed_under[place.frame] = hash;
    ++owner.num_filed;
    return true;
}

void PageIndex::unfile(Place place) {
    const uint64_t hash = slots_[place.slot].filed_under[place.frame];
    if (hash == 0) return;
    PlaceTable::Entry* entry = table_->find(hash);
    entry->slots[entry->index_of(place)] = PlaceTable::no_slot;
    if (!entry->has_places()) table_->remove(entry);
    forget(place);
}

// Its slot no longer counts the place. The places of a retired slot are not listed any more, only counted.
void PageIndex::forget(Place place) {
    Slot& owner = slots_[place.slot];
    --owner.num_filed;
    if (!owner.is_retired) owner.filed_under[place.frame] = 0;
}

// A free place, else a stale one, else -1.
int PageIndex::choose_place(const PlaceTable::Entry& entry) const {
    int chosen = entry.free_place();
    for (int i = 0; chosen < 0 && i < PlaceTable::num_places; ++i) {
        if (is_stale(entry.place(i), entry.hash)) chosen = i;
    }
    return chosen;
}

bool PageIndex::is_stale(Place place, uint64_t hash) const {
    const Slot& owner = slots_[place.slot];
    return owner.region == nullptr || read_keys(*owner.region, {&place.frame, 1})[0].hash != hash;
}

void PageIndex::lookup(const uint8_t* keys, size_t num_keys, int exclude_slot, const Locations& out) const {
    const std::shared_lock table(table_lock_);
    for (size_t begin = 0; begin < num_keys; begin += lookup_group_size) {
        const size_t group_size = std::min(lookup_group_size, num_keys - begin);
        const Locations group{out.slots + begin, out.frames + begin, out.generations + begin};
        lookup_group(keys + 32 * begin, group_size, exclude_slot, group);
    }
}

// Three passes, so that the cache misses of a whole group overlap: entries, then records, then the checks.
void PageIndex::lookup_group(const uint8_t* keys, size_t num_keys, int exclude_slot, const Locations& out) const {
    uint64_t hashes[lookup_group_size];
    const PlaceTable::Entry* entries[lookup_group_size];
    for (size_t i = 0; i < num_keys; ++i) {
        hashes[i] = hash_of(key_words(keys + 32 * i));
        table_->prefetch(hashes[i]);
    }
    for (size_t i = 0; i < num_keys; ++i) {
        entries[i] = table_->find(hashes[i]);
        const int first = next_candidate(entries[i], 0, exclude_slot);
        if (first < PlaceTable::num_places) __builtin_prefetch(&record_at(entries[i]->place(first)));
    }
    guarded_each(
        num_keys,
        [&](size_t i) { out.set(i, find_valid(entries[i], key_words(keys + 32 * i), exclude_slot)); },
        [&](size_t i) { out.set(i, Found{}); });
}

// The first place whose record shows `key`.
PageIndex::Found PageIndex::find_valid(const PlaceTable::Entry* entry, const KeyWords& key, int exclude_slot) const {
    for (int i = next_candidate(entry, 0, exclude_slot); i < PlaceTable::num_places;
         i = next_candidate(entry, i + 1, exclude_slot)) {
        const Place place = entry->place(i);
        const uint64_t generation = snapshot_record(record_at(place), key);
        if (generation != 0) return {place, generation};
    }
    return {};
}

// The first place from `from` on whose region lives and is not excluded; num_places: none.
int PageIndex::next_candidate(const PlaceTable::Entry* entry, int from, int exclude_slot) const {
    if (entry == nullptr) return PlaceTable::num_places;
    for (int i = from; i < PlaceTable::num_places; ++i) {
        const int16_t slot = entry->slots[i];
        if (slot != PlaceTable::no_slot && slot != exclude_slot && slots_[slot].region != nullptr) return i;
    }
    return PlaceTable::num_places;
}

const FrameRecord& PageIndex::record_at(Place place) const { return slots_[place.slot].region->record(place.frame); }

size_t PageIndex::num_keys() const {
    const std::shared_lock table(table_lock_);
    return table_->num_entries();
}

size_t PageIndex::memory_bytes() const {
    const std::shared_lock table(table_lock_);
    size_t bytes = sizeof(*this) + sizeof(PlaceTable) + table_->memory_bytes() + slots_.capacity() * sizeof(Slot);
    for (const Slot& slot : slots_) bytes += slot.filed_under.capacity() * sizeof(uint64_t);
    return bytes;
}

void PageIndex::check() const {
    const std::lock_guard writer(writers_);
    std::vector<size_t> num_filed(slots_.size());
    size_t num_entries = 0;
    for (const PlaceTable::Entry& entry : table_->entries()) {
        if (entry.hash == 0) continue;
        ++num_entries;
        check_entry(entry, num_filed);
    }
    expect(num_entries == table_->num_entries(), "the table miscounts its entries");
    expect(num_entries <= table_->room(), "the table holds more entries than it has room for");
    for (size_t s = 0; s < slots_.size(); ++s) {
        const Slot& slot = slots_[s];
        expect(num_filed[s] == slot.num_filed, "a slot miscounts its places");
        expect(slot.region == nullptr || !slot.is_retired, "a retired slot holds a region");
        if (slot.region == nullptr) continue;
        const auto is_filed = [](uint64_t hash) { return hash != 0; };
        const auto num_listed = std::count_if(slot.filed_under.begin(), slot.filed_under.end(), is_filed);
        expect(static_cast<size_t>(num_listed) == slot.num_filed, "a slot lists frames that have no place");
    }
}

void PageIndex::check_entry(const PlaceTable::Entry& entry, std::vector<size_t>& num_filed) const {
    expect(table_->find(entry.hash) == &entry, "an entry cannot be found");
    expect(entry.has_places(), "an entry has no place");
    for (int i = 0; i < PlaceTable::num_places; ++i) {
        const Place place = entry.place(i);
        if (place.slot == PlaceTable::no_slot) continue;
        expect(static_cast<size_t>(place.slot) < slots_.size(), "a place names a slot that never was");
        const Slot& slot = slots_[place.slot];
        ++num_filed[place.slot];
        expect(slot.is_retired || slot.region != nullptr, "a place names a free slot");
        expect(entry.index_of(place) == i, "an entry names a place twice");
        const bool is_listed = slot.is_retired || slot.filed_under[place.frame] == entry.hash;
        expect(is_listed, "a frame is not listed under its entry");
    }
}

}  // namespace cachesvc
