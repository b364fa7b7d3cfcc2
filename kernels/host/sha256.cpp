#include "sha256.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace cachesvc {
namespace {

using Compress = void (*)(uint32_t state[8], const uint8_t* data, size_t num_blocks);
// One block after each of two states, independent of each other.
using CompressTwo = void (*)(uint32_t states[2][8], const uint8_t* const data[2]);

struct Path {
    Compress compress;
    CompressTwo compress_two;
};

alignas(64) constexpr uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static_assert(std::endian::native == std::endian::little, "big-endian words are made by swapping bytes");

// Whole words, not byte loops: the digest of one page is read back at once as the input of the next.
uint32_t load_be32(const uint8_t* bytes) {
    uint32_t value;
    std::memcpy(&value, bytes, sizeof(value));
    return __builtin_bswap32(value);
}

void store_be32(uint8_t* bytes, uint32_t value) {
    value = __builtin_bswap32(value);
    std::memcpy(bytes, &value, sizeof(value));
}

void compress_portable(uint32_t state[8], const uint8_t* data, size_t num_blocks) {
    for (; num_blocks > 0; --num_blocks, data += 64) {
        uint32_t w[64];
        for (int t = 0; t < 16; ++t) w[t] = load_be32(data + 4 * t);
        for (int t = 16; t < 64; ++t) {
            const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
            const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
            w[t] = w[t - 16] + s0 + w[t - 7] + s1;
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int t = 0; t < 64; ++t) {
            const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
            const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + round_constants[t] + w[t];
            const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
            const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

void compress_two_portable(uint32_t states[2][8], const uint8_t* const data[2]) {
    for (int i = 0; i < 2; ++i) compress_portable(states[i], data[i], 1);
}

constexpr Path portable_path{compress_portable, compress_two_portable};

#if defined(__x86_64__)
#define CACHESVC_SHA_NI __attribute__((target("sha,sse4.1,ssse3")))

// The instructions want the state as (a b e f) and (c d g h); `schedule` holds the last 16 words of the message
// schedule. Each waits for the one before it of its own lane: a second lane costs next to nothing.
template <int lanes>
CACHESVC_SHA_NI inline __attribute__((always_inline)) void compress_lanes(__m128i (&abef)[lanes], __m128i (&cdgh)[lanes],
                                                                          const uint8_t* const (&data)[lanes]) {
    const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i abef_before[lanes], cdgh_before[lanes], schedule[lanes][4];
#pragma GCC unroll 2
    for (int lane = 0; lane < lanes; ++lane) abef_before[lane] = abef[lane], cdgh_before[lane] = cdgh[lane];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(round_constants) + i);
#pragma GCC unroll 2
        for (int lane = 0; lane < lanes; ++lane) {
            __m128i& w = schedule[lane][i & 3];
            if (i < 4) {
                w = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data[lane]) + i), byte_swap);
            } else {
                const __m128i newest = schedule[lane][(i + 3) & 3];
                const __m128i seven_back = _mm_alignr_epi8(newest, schedule[lane][(i + 2) & 3], 4);
                w = _mm_add_epi32(_mm_sha256msg1_epu32(w, schedule[lane][(i + 1) & 3]), seven_back);
                w = _mm_sha256msg2_epu32(w, newest);
            }
            const __m128i input = _mm_add_epi32(w, k);
            cdgh[lane] = _mm_sha256rnds2_epu32(cdgh[lane], abef[lane], input);
            abef[lane] = _mm_sha256rnds2_epu32(abef[lane], cdgh[lane], _mm_shuffle_epi32(input, 0x0E));
        }
    }
#pragma GCC unroll 2
    for (int lane = 0; lane < lanes; ++lane) {
        abef[lane] = _mm_add_epi32(abef[lane], abef_before[lane]);
        cdgh[lane] = _mm_add_epi32(cdgh[lane], cdgh_before[lane]);
    }
}

CACHESVC_SHA_NI inline __attribute__((always_inline)) void load_state(const uint32_t state[8], __m128i& abef,
                                                                      __m128i& cdgh) {
    const auto* words = reinterpret_cast<const __m128i*>(state);
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
    abef = _mm_alignr_epi8(cdab, efgh, 8);
    cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
}

CACHESVC_SHA_NI inline __attribute__((always_inline)) void store_state(uint32_t state[8], __m128i abef, __m128i cdgh) {
    auto* words = reinterpret_cast<__m128i*>(state);
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

CACHESVC_SHA_NI void compress_sha_ni(uint32_t state[8], const uint8_t* data, size_t num_blocks) {
    __m128i abef[1], cdgh[1];
    load_state(state, abef[0], cdgh[0]);
    for (; num_blocks > 0; --num_blocks, data += 64) compress_lanes<1>(abef, cdgh, {data});
    store_state(state, abef[0], cdgh[0]);
}

CACHESVC_SHA_NI void compress_two_sha_ni(uint32_t states[2][8], const uint8_t* const data[2]) {
    __m128i abef[2], cdgh[2];
    for (int lane = 0; lane < 2; ++lane) load_state(states[lane], abef[lane], cdgh[lane]);
    compress_lanes<2>(abef, cdgh, {data[0], data[1]});
    for (int lane = 0; lane < 2; ++lane) store_state(states[lane], abef[lane], cdgh[lane]);
}

constexpr Path sha_ni_path{compress_sha_ni, compress_two_sha_ni};

bool cpu_has_sha_ni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    const bool has_shuffles = (c & bit_SSSE3) != 0 && (c & bit_SSE4_1) != 0;
    if (!has_shuffles || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (b & bit_SHA) != 0;
}
#else
constexpr Path sha_ni_path{};
bool cpu_has_sha_ni() { return false; }
#endif

const Path* fastest() { return cpu_has_sha_ni() ? &sha_ni_path : &portable_path; }

std::atomic<const Path*>& path_in_use() {
    static std::atomic<const Path*> choice{fastest()};
    return choice;
}

const Path& path() { return *path_in_use().load(std::memory_order_relaxed); }

// The end of a message's last block.
void write_bit_count(uint8_t block[64], uint64_t bits) {
    store_be32(block + 56, static_cast<uint32_t>(bits >> 32));
    store_be32(block + 60, static_cast<uint32_t>(bits));
}

void write_digest(uint8_t* out, const uint32_t state[8]) {
    for (int i = 0; i < 8; ++i) store_be32(out + 4 * i, state[i]);
}

}  // namespace

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::update(const void* data, size_t bytes) {
    const auto* next = static_cast<const uint8_t*>(data);
    const Compress compress = path().compress;
    total_bytes_ += bytes;
    if (pending_bytes_ > 0) {
        const size_t take = std::min(bytes, block_bytes - pending_bytes_);
        if (take > 0) std::memcpy(pending_ + pending_bytes_, next, take);
        pending_bytes_ += take, next += take, bytes -= take;
        if (pending_bytes_ < block_bytes) return;
        compress(state_, pending_, 1);
        pending_bytes_ = 0;
    }
    const size_t whole_blocks = bytes / block_bytes;
    if (whole_blocks > 0) compress(state_, next, whole_blocks);
    pending_bytes_ = bytes - whole_blocks * block_bytes;
    if (pending_bytes_ > 0) std::memcpy(pending_, next + whole_blocks * block_bytes, pending_bytes_);
}

void Sha256::finish(uint8_t out[digest_bytes]) {
    const Compress compress = path().compress;
    const uint64_t total_bits = total_bytes_ * 8;
    pending_[pending_bytes_++] = 0x80;
    if (pending_bytes_ > block_bytes - 8) {
        std::memset(pending_ + pending_bytes_, 0, block_bytes - pending_bytes_);
        compress(state_, pending_, 1);
        pending_bytes_ = 0;
    }
    std::memset(pending_ + pending_bytes_, 0, block_bytes - 8 - pending_bytes_);
    write_bit_count(pending_, total_bits);
    compress(state_, pending_, 1);
    write_digest(out, state_);
}

void Sha256::finish_each(const uint8_t* ends, size_t end_bytes, size_t num_ends, uint8_t* out) const {
    const size_t last_block_bytes = pending_bytes_ + end_bytes;
    size_t num_done = 0;
    if (last_block_bytes + 1 + 8 <= block_bytes) {
        uint8_t blocks[2][block_bytes]{};
        for (auto& block : blocks) {
            std::memcpy(block, pending_, pending_bytes_);
            block[last_block_bytes] = 0x80;
            write_bit_count(block, (total_bytes_ + end_bytes) * 8);
        }
        for (const CompressTwo compress_two = path().compress_two; num_done + 2 <= num_ends; num_done += 2) {
            uint32_t states[2][8];
            for (size_t lane = 0; lane < 2; ++lane) {
                std::memcpy(states[lane], state_, sizeof state_);
                std::memcpy(blocks[lane] + pending_bytes_, ends + (num_done + lane) * end_bytes, end_bytes);
            }
            const uint8_t* const data[] = {blocks[0], blocks[1]};
            compress_two(states, data);
            for (size_t lane = 0; lane < 2; ++lane) write_digest(out + (num_done + lane) * digest_bytes, states[lane]);
        }
    }
    for (; num_done < num_ends; ++num_done) {
        Sha256 one = *this;
        one.update(ends + num_done * end_bytes, end_bytes);
        one.finish(out + num_done * digest_bytes);
    }
}

bool sha256_path_supported(Sha256Path path) { return path != Sha256Path::sha_ni || cpu_has_sha_ni(); }

Sha256Path sha256_path() {
    return path_in_use().load() == &portable_path ? Sha256Path::portable : Sha256Path::sha_ni;
}

void select_sha256_path(Sha256Path path) {
    if (!sha256_path_supported(path)) throw std::invalid_argument("this CPU has no SHA-256 instructions");
    if (path == Sha256Path::automatic) path_in_use() = fastest();
    if (path == Sha256Path::portable) path_in_use() = &portable_path;
    if (path == Sha256Path::sha_ni) path_in_use() = &sha_ni_path;
}

}  // namespace cachesvc
