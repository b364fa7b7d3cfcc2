#include "byte_planes.hpp"

#include <cstring>

#include "fault_guard.hpp"

namespace cachesvc {
namespace {

// Fixed widths, so that the compiler makes shuffles of the inner loops.
template <size_t width>
void split_page(const uint8_t* __restrict page, size_t num_values, uint8_t* __restrict planes) {
    for (size_t i = 0; i < num_values; ++i)
        for (size_t plane = 0; plane < width; ++plane) planes[plane * num_values + i] = page[i * width + plane];
}

template <size_t width>
void join_page(const uint8_t* __restrict planes, size_t num_values, uint8_t* __restrict page) {
    for (size_t i = 0; i < num_values; ++i)
        for (size_t plane = 0; plane < width; ++plane) page[i * width + plane] = planes[plane * num_values + i];
}

}  // namespace

void split_planes(std::span<const uint64_t> addresses, size_t page_bytes, size_t value_bytes, uint8_t* planes) {
    const size_t num_values = page_bytes / value_bytes;
    const size_t whole = num_values * value_bytes;
    guarded_all(addresses.size(), [&](size_t i) {
        const auto* page = reinterpret_cast<const uint8_t*>(addresses[i]);
        uint8_t* out = planes + i * page_bytes;
        if (value_bytes == 1) std::memcpy(out, page, num_values);
        else if (value_bytes == 2) split_page<2>(page, num_values, out);
        else split_page<4>(page, num_values, out);
        std::memcpy(out + whole, page + whole, page_bytes - whole);
    });
}

void join_planes(std::span<const uint64_t> planes, size_t page_bytes, size_t value_bytes,
                 std::span<const uint64_t> addresses) {
    const size_t num_values = page_bytes / value_bytes;
    const size_t whole = num_values * value_bytes;
    guarded_all(addresses.size(), [&](size_t i) {
        const auto* in = reinterpret_cast<const uint8_t*>(planes[i]);
        auto* page = reinterpret_cast<uint8_t*>(addresses[i]);
        if (value_bytes == 1) std::memcpy(page, in, num_values);
        else if (value_bytes == 2) join_page<2>(in, num_values, page);
        else join_page<4>(in, num_values, page);
        std::memcpy(page + whole, in + whole, page_bytes - whole);
    });
}

}  // namespace cachesvc
