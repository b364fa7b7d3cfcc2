// Byte planes: the first byte of every value, then the second byte of every value, and so on.
//
// The high bytes of neighbouring KV values are alike and the low bytes are noise; side by side in planes a compressor
// finds the one and skips the other. The bytes past the last whole value follow the planes unchanged.
//
// Pure, any thread. Pages are read and written under the SIGBUS guard; a fault throws MemoryFault.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace cachesvc {

// Pages at `addresses`, page_bytes each, to the n rows [n, page_bytes] of `planes`; value_bytes is 1 (a copy), 2 or 4.
void split_planes(std::span<const uint64_t> addresses, size_t page_bytes, size_t value_bytes, uint8_t* planes);
// The reverse: from planes at `planes[i]` to pages at `addresses[i]`.
void join_planes(std::span<const uint64_t> planes, size_t page_bytes, size_t value_bytes,
                 std::span<const uint64_t> addresses);

}  // namespace cachesvc
