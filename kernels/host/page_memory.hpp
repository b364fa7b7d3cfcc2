// Memory of a batch of pages of one size outside of any region: page i is the segments at addresses[i * m + s], of
// segment_bytes[s] bytes each, one behind the other. Every page has the same m segments.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace cachesvc {

struct PageMemory {
    const uint64_t* addresses;                // [n, m]
    std::span<const uint64_t> segment_bytes;  // [m]; their sum is the page's size

    size_t num_segments() const { return segment_bytes.size(); }
    uint8_t* segment(size_t page, size_t s) const {
        return reinterpret_cast<uint8_t*>(addresses[page * num_segments() + s]);
    }
};

}  // namespace cachesvc
