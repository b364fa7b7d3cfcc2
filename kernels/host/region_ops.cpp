#include "region_ops.hpp"

#include <stdexcept>
#include <string>

#include "copy_threads.hpp"
#include "fault_guard.hpp"
#include "stream_copy.hpp"

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

uint8_t* frame_at(const Region& region, int32_t frame) {
    return reinterpret_cast<uint8_t*>(region.frame(frame));
}

// Where the copy of the batch's item after `i` will read; null at the end.
const uint8_t* next_frame(const Region& region, Frames frames, size_t i) {
    return i + 1 < frames.size() ? frame_at(region, frames[i + 1]) : nullptr;
}

// R1 to R4 around one copy, which is fenced by the caller before it tells anyone. NOTE: the bytes race with a writer by
// design; what was torn is thrown away by R4.
bool read_frame(const Region& region, int32_t frame, uint64_t generation, uint8_t* out, const uint8_t* next) {
    const FrameRecord& record = region.record(frame);
    if (!is_readable(generation) || load_generation(record) != generation) return false;
    stream_copy()(out, frame_at(region, frame), region.frame_bytes(), next);
    return is_unchanged(record, generation);
}

// Page `i` of `pages` <-> its bytes in a frame; `next` is where the copy after it will read, or null.
void gather_page(uint8_t* frame, const PageMemory& pages, size_t i, const uint8_t* next) {
    const size_t last = pages.num_segments() - 1;
    for (size_t s = 0; s <= last; frame += pages.segment_bytes[s++]) {
        stream_copy()(frame, pages.segment(i, s), pages.segment_bytes[s], s < last ? pages.segment(i, s + 1) : next);
    }
}

void scatter_page(const PageMemory& pages, size_t i, const uint8_t* frame, const uint8_t* next) {
    const size_t last = pages.num_segments() - 1;
    for (size_t s = 0; s <= last; ++s) {
        const uint8_t* behind = frame + pages.segment_bytes[s];
        stream_copy()(pages.segment(i, s), frame, pages.segment_bytes[s], s < last ? behind : next);
        frame = behind;
    }
}

// W4 for the frames whose flag is set, after the fence W3 of this thread's streaming stores.
void close_frames(const Region& region, Frames frames, bool* flags) {
    stream_fence();
    guarded_each(
        frames.size(),
        [&](size_t i) {
            if (flags[i]) close_record(region.record(frames[i]));
        },
        [&](size_t i) { flags[i] = false; });
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

void read_frames(const Region& region, Frames frames, const uint64_t* generations, const PageMemory& out,
                 bool* valid) {
    check_frames(region, frames, "frames");
    // R1 to R4 around one page. NOTE: the bytes race with a writer by design; what was torn is thrown away by R4.
    const auto read_page = [&](size_t i, size_t end) {
        const FrameRecord& record = region.record(frames[i]);
        if (!is_readable(generations[i]) || load_generation(record) != generations[i]) return false;
        scatter_page(out, i, frame_at(region, frames[i]), i + 1 < end ? frame_at(region, frames[i + 1]) : nullptr);
        return is_unchanged(record, generations[i]);
    };
    in_runs(frames.size(), region.frame_bytes(), [&](size_t begin, size_t end) {
        guarded_each(
            end - begin, [&](size_t i) { valid[begin + i] = read_page(begin + i, end); },
            [&](size_t i) { valid[begin + i] = false; });
        stream_fence();
    });
}

std::vector<int32_t> write_frames(const FrameWrite& write, bool* written) {
    const Region& region = write.region;
    auto lost = open_frames(region, write.frames, nullptr);
    if (!lost.empty()) return lost;
    const auto write_page = [&](size_t i, size_t end) {
        const int32_t frame = write.frames[i];
        gather_page(frame_at(region, frame), write.pages, i, i + 1 < end ? write.pages.segment(i + 1, 0) : nullptr);
        store_record(region.record(frame), write.keys + 32 * i, write.depths[i], write.last_use);
    };
    in_runs(write.frames.size(), region.frame_bytes(), [&](size_t begin, size_t end) {
        guarded_each(
            end - begin,
            [&](size_t i) {
                write_page(begin + i, end);
                written[begin + i] = true;
            },
            [&](size_t i) { written[begin + i] = false; });
        stream_fence();  // W3, of this thread
    });
    close_frames(region, write.frames, written);
    return lost;
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
                                              frame_at(copy.target, target_frame),
                                              next_frame(copy.source, copy.source_frames, i));
            if (copied[i]) store_record(copy.target.record(target_frame), key, copy.depths[i], 0);
        },
        [&](size_t i) { copied[i] = false; });
    close_frames(copy.target, copy.target_frames, copied);
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

FrameCounts count_frames(const Region& region) {
    FrameCounts counts;
    guarded_each(
        region.num_frames(),
        [&](size_t i) {
            const uint64_t generation = load_relaxed(region.record(static_cast<int32_t>(i)).generation);
            ++(generation == 0 ? counts.never_written : is_odd(generation) ? counts.odd : counts.readable);
        },
        [&](size_t) { ++counts.odd; });
    return counts;
}

}  // namespace cachesvc
