// Copies that do not pull the destination through the cache.
//
// DESIGN. KV pages are written once and read much later, so the destination's old lines are neither worth loading nor
// worth keeping: non-temporal stores skip both. The widest store the CPU has is chosen once at run time (AVX-512, AVX2,
// SSE2); other architectures use memcpy. The hardware prefetcher stops at page ends and knows nothing of the next chunk
// of a gather, so the source is prefetched in software, across the end of a chunk into the next one.
//
// Non-temporal stores are weakly ordered: whoever used a Copy must call stream_fence() before it tells anyone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cachesvc {

// Copies `bytes` from `source` to `target` (no overlap); `next` is where the caller will read afterwards, or null.
using StreamCopy = void (*)(uint8_t* target, const uint8_t* source, size_t bytes, const uint8_t* next);

// The best copy this CPU can run, chosen once.
StreamCopy stream_copy();
// Which one that is: "avx512", "avx2", "sse2" or "portable".
std::string_view stream_copy_name();
// A copy by that name; null when this CPU or architecture lacks it. For tests and benchmarks.
StreamCopy stream_copy_named(std::string_view name);
// Makes all streaming stores of this thread visible before any later store of it.
void stream_fence();

}  // namespace cachesvc
