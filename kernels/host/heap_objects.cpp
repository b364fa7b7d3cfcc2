#include "heap_objects.hpp"

#include <algorithm>

#include "fault_guard.hpp"

namespace cachesvc {
namespace {

uint8_t* pointer(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

// Calls visit(segment address, offset in the object, bytes) over the first `size` bytes of an object.
template <class Visit>
bool each_range(const Segments::Object& object, size_t size, Visit visit) {
    size_t at = 0;
    for (size_t i = 0; i < object.lengths.size() && at < size; ++i) {
        const size_t length = std::min<size_t>(object.lengths[i], size - at);
        if (!visit(pointer(object.addresses[i]), at, length)) return false;
        at += length;
    }
    return true;
}

}  // namespace

std::vector<HeapObjects::Block> HeapObjects::stage(const Segments& segments, const uint8_t* which) {
    std::vector<Block> staged(segments.count);
    for (size_t i = 0; i < segments.count; ++i) {
        if (!which[i]) continue;
        const Segments::Object object = segments.object(i);
        Block& block = staged[i];
        block.size = object.bytes();
        block.bytes = std::make_unique_for_overwrite<uint8_t[]>(block.size);
        const bool is_whole = each_range(object, block.size, [&](const uint8_t* source, size_t at, size_t length) {
            return guarded_copy(block.bytes.get() + at, source, length);
        });
        if (!is_whole) throw MemoryFault(i);
    }
    return staged;
}

void HeapObjects::publish(const ObjectId* ids, std::vector<Block>& staged, const uint8_t* which, size_t count,
                          uint8_t* stored) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
        stored[i] = 0;
        if (!which[i] || objects_.contains(ids[i])) continue;
        objects_.emplace(ids[i], std::make_shared<const Block>(std::move(staged[i])));
        stored[i] = 1;
    }
}

HeapObjects::Shared HeapObjects::find(const ObjectId& id) const {
    std::lock_guard lock(mutex_);
    const auto place = objects_.find(id);
    return place == objects_.end() ? nullptr : place->second;
}

void HeapObjects::read(const ObjectId* ids, const Segments& segments, Found* found) const {
    for (size_t i = 0; i < segments.count; ++i) {
        const Shared block = find(ids[i]);
        found[i] = Found::missing;
        if (!block) continue;
        const Segments::Object object = segments.object(i);
        const bool is_whole = each_range(object, block->size, [&](uint8_t* target, size_t at, size_t length) {
            return guarded_copy(target, block->bytes.get() + at, length);
        });
        if (!is_whole) throw MemoryFault(i);
        found[i] = object.bytes() == block->size ? Found::ok : Found::wrong_length;
    }
}

void HeapObjects::remove_if_equal(const ObjectId* ids, const Segments& segments, Found* found) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < segments.count; ++i) {
        const auto place = objects_.find(ids[i]);
        found[i] = Found::missing;
        if (place == objects_.end()) continue;
        const Block& block = *place->second;
        const bool equal =
            each_range(segments.object(i), block.size, [&](const uint8_t* seen, size_t at, size_t length) {
                return guarded_equal(seen, block.bytes.get() + at, length);
            });
        found[i] = equal ? Found::ok : Found::different;
        if (equal) objects_.erase(place);
    }
}

void HeapObjects::remove(const ObjectId* ids, size_t count, uint8_t* removed) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) removed[i] = objects_.erase(ids[i]) != 0;
}

void HeapObjects::sizes(const ObjectId* ids, size_t count, int64_t* bytes) const {
    for (size_t i = 0; i < count; ++i) {
        const Shared block = find(ids[i]);
        bytes[i] = block ? static_cast<int64_t>(block->size) : -1;
    }
}

std::vector<std::pair<ObjectId, uint64_t>> HeapObjects::list() const {
    std::lock_guard lock(mutex_);
    std::vector<std::pair<ObjectId, uint64_t>> all;
    all.reserve(objects_.size());
    for (const auto& [id, block] : objects_) all.emplace_back(id, block->size);
    return all;
}

}  // namespace cachesvc
