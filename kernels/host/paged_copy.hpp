// Copies between a paged, layer-first pool and page-first frames.
//
//   pool:  the same number of arrays ("runs") for each layer, each [num_pages] chunks of chunk_bytes: one for K and one
//          for V in the reference engine, one in all where an engine keeps K and V of a block together
//   frame: [layer][run][chunk]
//
// Both directions use streaming stores and fence before they return: what was copied is visible to any thread that
// learns of it afterwards (rule W3 of the region protocol). Nothing is checked here; see bind_paged_copy.cpp.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cachesvc {

struct PagedPool {
    const uint64_t* bases;  // [num_layers * num_runs]: the runs of layer 0, those of layer 1 ...
    size_t num_layers;
    size_t num_runs;  // of a layer
    size_t chunk_bytes;
    size_t num_pages;

    size_t page_bytes() const { return num_layers * num_runs * chunk_bytes; }
};

struct Frames {
    uint64_t data_address;  // of frame 0
    size_t stride_bytes;
};

struct LayerRange {
    size_t begin, end;
};

// pages[i] of the pool -> frames[i], the chunks of `layers` only.
void pool_to_frames(const PagedPool& pool, const Frames& place, LayerRange layers, const int32_t* pages,
                    const int32_t* frames, size_t count);
// frames[i] -> pages[i] of the pool.
void frames_to_pool(const PagedPool& pool, const Frames& place, LayerRange layers, const int32_t* pages,
                    const int32_t* frames, size_t count);

}  // namespace cachesvc
