// Copies between a paged, layer-first pool and page-first frames.
//
//   pool:  one array per (layer, K|V), [num_pages * page_size] rows of row_bytes; a page is page_size adjacent rows
//   frame: [layer][K|V][token][row], so each (layer, K|V) is one contiguous chunk of page_size * row_bytes
//
// Both directions use streaming stores and fence before they return: what was copied is visible to any thread that
// learns of it afterwards (rule W3 of the region protocol). Nothing is checked here; see bind_paged_copy.cpp.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cachesvc {

struct PagedPool {
    const uint64_t* bases;  // [num_layers * 2]: K of layer 0, V of layer 0, K of layer 1 ...
    size_t num_layers;
    size_t row_bytes;
    size_t page_size;
    size_t num_pages;

    size_t chunk_bytes() const { return page_size * row_bytes; }
    size_t page_bytes() const { return num_layers * 2 * chunk_bytes(); }
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
