// XXH3-128 of whole pages, in its canonical byte order (what xxhsum prints), with AVX2 where the CPU has it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cachesvc {

constexpr size_t checksum_bytes = 16;

void page_checksum(const void* data, size_t bytes, uint8_t out[checksum_bytes]);

// For tests only: false makes every later checksum of the process take the path of a CPU without AVX2.
void allow_avx2_checksum(bool is_allowed);

}  // namespace cachesvc
