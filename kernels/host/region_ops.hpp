// The region protocol in batches: each call takes n frames of one region. See frame_record.hpp for the rules.
//
// Frame numbers are checked (std::out_of_range) before anything is done. All loads and stores run under the SIGBUS
// guard; where there is no answer per frame a fault throws MemoryFault. Any call may race with any other on the same
// region, from any thread or process, except that one frame has one writer at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "page_memory.hpp"
#include "region.hpp"

namespace cachesvc {

using Frames = std::span<const int32_t>;

// Throws std::out_of_range naming the first frame of `name` that the region does not have.
void check_frames(const Region& region, Frames frames, const char* name);

// Where each frame's bytes begin in this process, [n].
void frame_addresses(const Region& region, Frames frames, uint64_t* addresses);

// W1 for each frame: even -> odd; odd stays odd. `seen` null: from the generation found; else from seen[i]. Returns the
// frames that another writer moved meanwhile; the others are open.
std::vector<int32_t> open_frames(const Region& region, Frames frames, const uint64_t* seen);
// W2 of the records: keys [n, 32], depths [n]. Returns the frames that are not open; nothing was written if there are
// any.
std::vector<int32_t> write_records(const Region& region, Frames frames, const uint8_t* keys, const uint32_t* depths,
                                   uint64_t last_use);
// W4. Returns the frames that are not open; nothing was committed if there are any.
std::vector<int32_t> commit_frames(const Region& region, Frames frames);

// R1: generations [n], 0 where odd, never written, or where keys[i] ([n, 32]; null: any) is not the frame's key.
void snapshot_frames(const Region& region, Frames frames, const uint8_t* keys, uint64_t* generations);
// R3 and R4: whether each frame still has the readable generation generations[i].
void validate_frames(const Region& region, Frames frames, const uint64_t* generations, bool* valid);
// R1-R4: copies each frame to page i of `out`, on several threads where that pays. False: not at generations[i] all
// along; the target holds bytes to be thrown away.
void read_frames(const Region& region, Frames frames, const uint64_t* generations, const PageMemory& out, bool* valid);
// W1 to W4: page i of `pages` into each frame, under keys[i] and depths[i], with streaming stores, on several threads
// where that pays. written[i] false: the memory of one of the two faulted, the frame stays odd. Returns the frames that another
// writer moved meanwhile; nothing was written if there are any, and the others stay open.
struct FrameWrite {
    const Region& region;
    Frames frames;
    PageMemory pages;
    const uint8_t* keys;
    const uint32_t* depths;
    uint64_t last_use;
};
std::vector<int32_t> write_frames(const FrameWrite& write, bool* written);
void touch_frames(const Region& region, Frames frames, uint64_t last_use);

// R1-R4 on `source`, whose frames must be at `generations` with the given keys, and W2 and W4 on open frames of
// `target`. copied[i] false: the target frame stays odd. Frame sizes must be equal. W1 of the targets is the caller's
// (open_frames).
struct FrameCopy {
    const Region& source;
    Frames source_frames;
    const uint64_t* generations;
    const Region& target;
    Frames target_frames;
    const uint8_t* keys;
    const uint32_t* depths;
};
void copy_open_frames(const FrameCopy& copy, bool* copied);

// Every record of the region, column by column, each [num_frames]. A record caught in a write shows an odd generation.
struct RecordColumns {
    uint64_t* generations;
    uint8_t* keys;
    uint32_t* depths;
    uint32_t* flags;
    uint64_t* last_use;
};
void read_records(const Region& region, const RecordColumns& columns);

// How many frames are readable, being written (odd; also those whose record faults), and never written.
struct FrameCounts {
    size_t readable = 0, odd = 0, never_written = 0;
};
FrameCounts count_frames(const Region& region);

}  // namespace cachesvc
