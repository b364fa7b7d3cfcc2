#include "stream_copy.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cachesvc {
namespace {

void copy_portable(uint8_t* target, const uint8_t* source, size_t bytes, const uint8_t*) {
    std::memcpy(target, source, bytes);
}

#if defined(__x86_64__)

constexpr size_t line = 64;
// How far ahead of the loads the source is prefetched; measured best at 512 of 0 to 2048 bytes, for chunks of 384 B to
// 24 KiB.
constexpr size_t ahead = 512;

// One loop for every width. A macro and not a template: only a function's own body is compiled for its target
// attribute.
#define CACHESVC_STREAM_LOOP(LINE_COPY)                                                                     \
    const size_t head = std::min(bytes, (line - reinterpret_cast<uintptr_t>(target) % line) % line);        \
    std::memcpy(target, source, head);                                                                      \
    const size_t end = head + (bytes - head) / line * line;                                                 \
    size_t at = head;                                                                                       \
    for (; at + ahead < end; at += line) {                                                                  \
        _mm_prefetch(reinterpret_cast<const char*>(source + at + ahead), _MM_HINT_NTA);                     \
        LINE_COPY(target + at, source + at);                                                                \
    }                                                                                                       \
    for (size_t past = 0; at < end; at += line, past += line) {                                             \
        if (next) _mm_prefetch(reinterpret_cast<const char*>(next + past), _MM_HINT_NTA);                   \
        LINE_COPY(target + at, source + at);                                                                \
    }                                                                                                       \
    std::memcpy(target + end, source + end, bytes - end);

#define CACHESVC_SSE2_LINE(T, S)                                                                             \
    for (size_t part = 0; part < line; part += 16)                                                          \
    _mm_stream_si128(reinterpret_cast<__m128i*>((T) + part),                                                \
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>((S) + part)))

void copy_sse2(uint8_t* target, const uint8_t* source, size_t bytes, const uint8_t* next) {
    CACHESVC_STREAM_LOOP(CACHESVC_SSE2_LINE)
}

#define CACHESVC_AVX2_LINE(T, S)                                                                             \
    do {                                                                                                    \
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(S));                          \
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>((S) + 32));                   \
        _mm256_stream_si256(reinterpret_cast<__m256i*>(T), a);                                              \
        _mm256_stream_si256(reinterpret_cast<__m256i*>((T) + 32), b);                                       \
    } while (0)

__attribute__((target("avx2"))) void copy_avx2(uint8_t* target, const uint8_t* source, size_t bytes,
                                                const uint8_t* next) {
    CACHESVC_STREAM_LOOP(CACHESVC_AVX2_LINE)
}

#define CACHESVC_AVX512_LINE(T, S) \
    _mm512_stream_si512(reinterpret_cast<__m512i*>(T), _mm512_loadu_si512(reinterpret_cast<const void*>(S)))

__attribute__((target("avx512f"))) void copy_avx512(uint8_t* target, const uint8_t* source, size_t bytes,
                                                     const uint8_t* next) {
    CACHESVC_STREAM_LOOP(CACHESVC_AVX512_LINE)
}

#endif

}  // namespace

StreamCopy stream_copy_named(std::string_view name) {
#if defined(__x86_64__)
    if (name == "avx512") return __builtin_cpu_supports("avx512f") ? copy_avx512 : nullptr;
    if (name == "avx2") return __builtin_cpu_supports("avx2") ? copy_avx2 : nullptr;
    if (name == "sse2") return copy_sse2;
#endif
    return name == "portable" ? copy_portable : nullptr;
}

std::string_view stream_copy_name() {
    static const std::string_view best = [] {
        for (std::string_view name : {"avx512", "avx2", "sse2"})
            if (stream_copy_named(name)) return name;
        return std::string_view("portable");
    }();
    return best;
}

StreamCopy stream_copy() {
    static const StreamCopy best = stream_copy_named(stream_copy_name());
    return best;
}

void stream_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
    std::atomic_thread_fence(std::memory_order_release);
}

}  // namespace cachesvc
