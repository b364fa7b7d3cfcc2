// Sixteen float32 lanes, for each instruction set. Included only by the translation unit that is compiled for that set.
//
// Whatever the set, a Lanes operation gives the same bits: every product is one fused multiply-add, every sum over
// lanes adds lane i and i+8, then i+4, i+2, i+1. Nothing here may come from a header with inline functions: the linker
// could keep this unit's copy of them, and an older machine would stop at the first instruction it does not know.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(ROW_LANES_AVX2) || defined(ROW_LANES_AVX512)
#include <immintrin.h>
#else
#include <math.h>
#endif

namespace cachesvc {
namespace {

#if defined(ROW_LANES_AVX512)

struct Lanes {
    __m512 v;
};
struct Ints {
    __m512i v;
};
inline Lanes zero() { return {_mm512_setzero_ps()}; }
inline Lanes all(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Lanes x) { _mm512_storeu_ps(p, x.v); }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes smaller(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes nearest(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Lanes power_of_two(Lanes whole) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(whole.v), _mm512_set1_epi32(127)), 23))};
}
inline Lanes zero_where_below(Lanes value, Lanes x, float bound) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_GE_OQ), value.v)};
}
inline Lanes square_root(Lanes a) { return {_mm512_sqrt_ps(a.v)}; }
inline Lanes load_bfloat16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Lanes load_float16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_float16(uint16_t* p, Lanes x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(ROW_LANES_AVX2)

struct Lanes {
    __m256 a, b;
};
inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Lanes x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline Lanes operator+(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes operator-(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Lanes operator*(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Lanes operator/(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Lanes fma(Lanes x, Lanes y, Lanes z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Lanes larger(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Lanes smaller(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Lanes nearest(Lanes x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 power_of_two_half(__m256 whole) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
}
inline Lanes power_of_two(Lanes whole) { return {power_of_two_half(whole.a), power_of_two_half(whole.b)}; }
inline Lanes zero_where_below(Lanes value, Lanes x, float bound) {
    const __m256 limit = _mm256_set1_ps(bound);
    return {_mm256_and_ps(value.a, _mm256_cmp_ps(x.a, limit, _CMP_GE_OQ)),
            _mm256_and_ps(value.b, _mm256_cmp_ps(x.b, limit, _CMP_GE_OQ))};
}
inline Lanes square_root(Lanes x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline __m256 bfloat16_half(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Lanes load_bfloat16(const uint16_t* p) { return {bfloat16_half(p), bfloat16_half(p + 8)}; }
inline Lanes load_float16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_float16(uint16_t* p, Lanes x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, mode));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, mode));
}

#else

struct Lanes {
    float v[16];
};
template <class F>
inline Lanes each(F f) {
    Lanes out;
    for (int i = 0; i < 16; ++i) out.v[i] = f(i);
    return out;
}
inline Lanes zero() { return Lanes{}; }
inline Lanes all(float x) {
    return each([&](int) { return x; });
}
inline Lanes load(const float* p) {
    Lanes out;
    memcpy(out.v, p, sizeof(out.v));
    return out;
}
inline void store(float* p, Lanes x) { memcpy(p, x.v, sizeof(x.v)); }
inline Lanes operator+(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Lanes operator-(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Lanes operator*(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Lanes operator/(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline Lanes larger(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Lanes smaller(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Lanes nearest(Lanes a) {
    return each([&](int i) { return __builtin_rintf(a.v[i]); });
}
inline Lanes power_of_two(Lanes whole) {
    return each([&](int i) {
        const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(whole.v[i]) + 127) << 23;
        float out;
        memcpy(&out, &bits, 4);
        return out;
    });
}
inline Lanes zero_where_below(Lanes value, Lanes x, float bound) {
    return each([&](int i) { return x.v[i] >= bound ? value.v[i] : 0.0f; });
}
inline Lanes square_root(Lanes a) {
    return each([&](int i) { return __builtin_sqrtf(a.v[i]); });
}
inline Lanes load_bfloat16(const uint16_t* p) {
    return each([&](int i) {
        const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
        float out;
        memcpy(&out, &bits, 4);
        return out;
    });
}
inline float float16_value(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 31;
    const uint32_t fraction = half & 1023;
    float out;
    if (exponent == 0) {
        out = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -out : out;
    }
    const uint32_t bits = sign | ((exponent == 31 ? 255u : exponent + 112) << 23) | (fraction << 13);
    memcpy(&out, &bits, 4);
    return out;
}
inline uint16_t float16_bits(float x) {  // rounds to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude < 0x38800000) {  // subnormal there: a whole number of 2^-24
        float positive;
        memcpy(&positive, &magnitude, 4);
        return sign | static_cast<uint16_t>(__builtin_rintf(positive * 0x1p24f));
    }
    const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
}
inline Lanes load_float16(const uint16_t* p) {
    return each([&](int i) { return float16_value(p[i]); });
}
inline void store_float16(uint16_t* p, Lanes x) {
    for (int i = 0; i < 16; ++i) p[i] = float16_bits(x.v[i]);
}

#endif

inline void store_bfloat16(uint16_t* p, Lanes x) {  // rounds to nearest, ties to even
    uint32_t bits[16];
    memcpy(bits, &x, sizeof(bits));
    for (int i = 0; i < 16; ++i) {
        const bool is_nan = (bits[i] & 0x7fffffff) > 0x7f800000;
        p[i] = static_cast<uint16_t>(is_nan ? (bits[i] >> 16) | 0x40 : (bits[i] + 0x7fff + ((bits[i] >> 16) & 1)) >> 16);
    }
}

#if defined(ROW_LANES_AVX2) || defined(ROW_LANES_AVX512)
#if defined(ROW_LANES_AVX512)
inline __m256 low_half(Lanes x) { return _mm512_castps512_ps256(x.v); }
inline __m256 high_half(Lanes x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1)); }
#else
inline __m256 low_half(Lanes x) { return x.a; }
inline __m256 high_half(Lanes x) { return x.b; }
#endif
inline float sum(Lanes x) {
    const __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float maximum(Lanes x) {
    const __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
template <class Combine>
inline float across(Lanes x, Combine combine) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) x.v[i] = combine(x.v[i], x.v[i + half]);
    }
    return x.v[0];
}
inline float sum(Lanes x) {
    return across(x, [](float a, float b) { return a + b; });
}
inline float maximum(Lanes x) {
    return across(x, [](float a, float b) { return a > b ? a : b; });
}
#endif

// e^x to about one unit in the last place; exactly 0 below -87 (where float32 would leave its
// normal range), e^88 above 88.
inline Lanes exponential(Lanes x) {
    const Lanes clamped = smaller(larger(x, all(-87.0f)), all(88.0f));
    const Lanes whole = nearest(clamped * all(1.44269504088896341f));
    Lanes rest = fma(whole, all(-0.693359375f), clamped);
    rest = fma(whole, all(2.12194440e-4f), rest);
    Lanes series = all(1.9875691500e-4f);  // Cephes expf: minimax on [-ln2/2, ln2/2]
    series = fma(series, rest, all(1.3981999507e-3f));
    series = fma(series, rest, all(8.3334519073e-3f));
    series = fma(series, rest, all(4.1665795894e-2f));
    series = fma(series, rest, all(1.6666665459e-1f));
    series = fma(series, rest, all(5.0000001201e-1f));
    const Lanes value = fma(series, rest * rest, rest) + all(1.0f);
    return zero_where_below(value * power_of_two(whole), x, -87.0f);
}

}  // namespace
}  // namespace cachesvc
