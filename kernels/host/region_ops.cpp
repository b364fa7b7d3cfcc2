#include "region_ops.hpp"

#include <stdexcept>
#include <string>

#include "fault_guard.hpp"

namespace cachesvc {
namespace {

std::vector<int32_t> frames_marked(Frames frames, const std::vector<uint8_t>& marks) {
    std::vector<int32_t> marked;
    for (size_t i = 0; i < frames.size(); ++i) {
        if (marks[i] != 0) marked.push_back(frames[i]);
    }
    return marked;
}

std::vector<int32_t> frames_not_open(const Region& region, Frames frames) {
    std::vector<uint8_t> closed(frames.size());
    guarded_all(frames.size(), [&](size_t i) { closed[i] = !is_odd(load_generation(region.record(frames[i]))); });
    return frames_marked(frames, closed);
}

void store_record(FrameRecord& record, const uint8_t* key, uint32_t depth, uint64_t last_use) {
    const KeyWords words = key_words(key);
    for (size_t w = 0; w < words.size(); ++w) store_relaxed(record.key[w], words[w]);
    store_relaxed(record.depth, depth);
    store_relaxed(record.flags, uint32_t{0});
    store_relaxed(record.last_use, last_use);
}

// R1 to R4 around one memcpy. NOTE: the bytes race with a writer by design; what was torn is thrown away by R4.
bool read_frame(const Region& region, int32_t frame, uint64_t generation, void* out) {
    const FrameRecord& record = region.record(frame);
    if (!is_readable(generation) || load_generation(record) != generation) return false;
    std::memcpy(out, region.frame(frame), region.frame_bytes());
    return is_unchanged(record, generation);
}

}  // namespace

void check_frames(const Region& region, Frames frames, const char* name) {
    for (size_t i = 0; i < frames.size(); ++i) {
        if (frames[i] >= 0 && static_cast<size_t>(frames[i]) < region.num_frames()) continue;
        throw std::out_of_range(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(frames[i]) +
                                ", expected [0, " + std::to_string(region.num_frames()) + ")");
    }
}

void frame_addresses(const Region& region, Frames frames, uint64_t* addresses) {
    check_frames(region, frames, "frames");
    for (size_t i = 0; i < frames.size(); ++i) addresses[i] = reinterpret_cast<uint64_t>(region.frame(frames[i]));
}

std::vector<int32_t> open_frames(const Region& region, Frames frames, const uint64_t* seen) {
    check_frames(region, frames, "frames");
    std::vector<uint8_t> lost(frames.size());
    guarded_all(frames.size(), [&](size_t i) {
        FrameRecord& record = region.record(frames[i]);
        lost[i] = !open_record(record, seen == nullptr ? load_relaxed(record.generation) : seen[i]);
    });
    open_fence();
    return frames_marked(frames, lost);
}

std::vector<int32_t> write_records(const Region& region, Frames frames, const uint8_t* keys, const uint32_t* depths,
                                   uint64_t last_use) {
    check_frames(region, frames, "frames");
    auto closed = frames_not_open(region, frames);
    if (!closed.empty()) return closed;
    guarded_all(frames.size(), [&](size_t i) {
        store_record(region.record(frames[i]), keys + 32 * i, depths[i], last_use);
    });
    return closed;
}

std::vector<int32_t> commit_frames(const Region& region, Frames frames) {
    check_frames(region, frames, "frames");
    auto closed = frames_not_open(region, frames);
    if (!closed.empty()) return closed;
    open_fence();  // also drains this thread's own non-temporal stores
    guarded_all(frames.size(), [&](size_t i) { close_record(region.record(frames[i])); });
    return closed;
}

void snapshot_frames(const Region& region, Frames frames, const uint8_t* keys, uint64_t* generations) {
    check_frames(region, frames, "frames");
    guarded_each(
        frames.size(),
        [&](size_t i) {
            const FrameRecord& record = region.record(frames[i]);
            const uint64_t generation = load_generation(record);
            generations[i] = keys != nullptr          ? snapshot_record(record, key_words(keys + 32 * i))
                             : is_readable(generation) ? generation
                                                       : 0;
        },
        [&](size_t i) { generations[i] = 0; });
}

void validate_frames(const Region& region, Frames frames, const uint64_t* generations, bool* valid) {
    check_frames(region, frames, "frames");
    guarded_each(
        frames.size(),
        [&](size_t i) {
            valid[i] = is_readable(generations[i]) && is_unchanged(region.record(frames[i]), generations[i]);
        },
        [&](size_t i) { valid[i] = false; });
}

void read_frames(const Region& region, Frames frames, const uint64_t* generations, const uint64_t* out_addresses,
                 bool* valid) {
    check_frames(region, frames, "frames");
    guarded_each(
        frames.size(),
        [&](size_t i) {
            valid[i] = read_frame(region, frames[i], generations[i], reinterpret_cast<void*>(out_addresses[i]));
        },
        [&](size_t i) { valid[i] = false; });
}

void touch_frames(const Region& region, Frames frames, uint64_t last_use) {
    check_frames(region, frames, "frames");
    guarded_all(frames.size(), [&](size_t i) { store_relaxed(region.record(frames[i]).last_use, last_use); });
}

void copy_open_frames(const FrameCopy& copy, bool* copied) {
    check_frames(copy.source, copy.source_frames, "source_frames");
    check_frames(copy.target, copy.target_frames, "target_frames");
    guarded_each(
        copy.source_frames.size(),
        [&](size_t i) {
            const int32_t source_frame = copy.source_frames[i], target_frame = copy.target_frames[i];
            const uint8_t* key = copy.keys + 32 * i;
            const bool has_key = snapshot_record(copy.source.record(source_frame), key_words(key)) != 0;
            copied[i] = has_key && read_frame(copy.source, source_frame, copy.generations[i],
                                              copy.target.frame(target_frame));
            if (!copied[i]) return;
            store_record(copy.target.record(target_frame), key, copy.depths[i], 0);
            close_record(copy.target.record(target_frame));
        },
        [&](size_t i) { copied[i] = false; });
}

void read_records(const Region& region, const RecordColumns& columns) {
    guarded_all(region.num_frames(), [&](size_t i) {
        const FrameRecord& record = region.record(static_cast<int32_t>(i));
        const uint64_t generation = load_generation(record);
        const KeyWords key = load_key(record);
        std::memcpy(columns.keys + 32 * i, key.data(), sizeof(key));
        columns.depths[i] = load_relaxed(record.depth);
        columns.flags[i] = load_relaxed(record.flags);
        columns.last_use[i] = load_relaxed(record.last_use);
        const bool is_stable = is_unchanged(record, generation);
        columns.generations[i] = is_stable ? generation : generation | 1;
    });
}

}  // namespace cachesvc
