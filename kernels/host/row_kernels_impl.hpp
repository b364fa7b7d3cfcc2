// The bodies of RowKernels over Lanes: one translation unit per instruction set includes this file (see row_lanes.hpp).
#pragma once
#include "row_kernels.hpp"
#include "row_lanes.hpp"

namespace cachesvc {
namespace {

// The largest tile whose sums stay in registers.
#if defined(ROW_LANES_AVX512)
constexpr size_t panel_vectors = 2, max_tile_rows = 12;
#elif defined(ROW_LANES_AVX2)
constexpr size_t panel_vectors = 1, max_tile_rows = 6;
#else
constexpr size_t panel_vectors = 1, max_tile_rows = 3;
#endif
constexpr size_t lane_count = 16;
// A panel's rows [k, k + k_step) stay in the first-level cache while the rows go by; summing step by step also halves the
// rounding error. NOTE: k_step decides bits.
constexpr size_t k_step = 192;

inline size_t min_of(size_t a, size_t b) { return a < b ? a : b; }
inline size_t max_of(size_t a, size_t b) { return a > b ? a : b; }

// c[ROWS, 16 * VECTORS] += a[ROWS, k] * b[k, 16 * VECTORS], b dense. The one place where products are summed.
template <size_t ROWS, size_t VECTORS>
inline void multiply_tile(const float* a, size_t a_stride, const float* b, size_t k, float* c, size_t c_stride) {
    Lanes sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (size_t r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (size_t v = 0; v < VECTORS; ++v) sums[r][v] = zero();
    for (size_t i = 0; i < k; ++i) {
        Lanes right[VECTORS];
#pragma GCC unroll 2
        for (size_t v = 0; v < VECTORS; ++v) right[v] = load(b + (i * VECTORS + v) * lane_count);
#pragma GCC unroll 16
        for (size_t r = 0; r < ROWS; ++r) {
            const Lanes left = all(a[r * a_stride + i]);
#pragma GCC unroll 2
            for (size_t v = 0; v < VECTORS; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
        }
    }
#pragma GCC unroll 16
    for (size_t r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (size_t v = 0; v < VECTORS; ++v) {
            float* to = c + r * c_stride + v * lane_count;
            store(to, load(to) + sums[r][v]);
        }
}

template <size_t VECTORS, size_t ROWS>
inline void multiply_rest(size_t rows, const float* a, size_t a_stride, const float* b, size_t k, float* c,
                          size_t c_stride) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return multiply_tile<ROWS, VECTORS>(a, a_stride, b, k, c, c_stride);
        multiply_rest<VECTORS, ROWS - 1>(rows, a, a_stride, b, k, c, c_stride);
    }
}

// c[rows, 16 * VECTORS] += a[rows, k] * b, any number of rows.
template <size_t VECTORS>
inline void multiply_rows(size_t rows, const float* a, size_t a_stride, const float* b, size_t k, float* c,
                          size_t c_stride) {
    size_t r = 0;
    for (; r + max_tile_rows <= rows; r += max_tile_rows) {
        multiply_tile<max_tile_rows, VECTORS>(a + r * a_stride, a_stride, b, k, c + r * c_stride, c_stride);
    }
    multiply_rest<VECTORS, max_tile_rows - 1>(rows - r, a + r * a_stride, a_stride, b, k, c + r * c_stride, c_stride);
}

constexpr size_t linear_block_rows = 48;  // rows whose partial sums are kept on the stack

void linear(const LinearArgs& args, size_t row_begin, size_t row_end, size_t panel_begin, size_t panel_end) {
    constexpr size_t columns = panel_vectors * lane_count;
    alignas(64) float sums[linear_block_rows * columns];
    for (size_t row = row_begin; row < row_end; row += linear_block_rows) {
        const size_t rows = min_of(linear_block_rows, row_end - row);
        for (size_t panel = panel_begin; panel < panel_end; ++panel) {
            memset(sums, 0, rows * columns * sizeof(float));
            for (size_t k = 0; k < args.k; k += k_step) {
                multiply_rows<panel_vectors>(rows, args.x + row * args.k + k, args.k,
                                             args.panels + (panel * args.k + k) * columns, min_of(k_step, args.k - k),
                                             sums, columns);
            }
            const size_t column = panel * columns;
            const size_t width = min_of(columns, args.n - column);
            for (size_t r = 0; r < rows; ++r) {
                float* y = args.y + (row + r) * args.n + column;
                const float* from = sums + r * columns;
                if (args.accumulate) {
                    for (size_t i = 0; i < width; ++i) y[i] += from[i];
                } else {
                    memcpy(y, from, width * sizeof(float));
                }
            }
        }
    }
}

void rms_norm(const RmsNormArgs& args, size_t row_begin, size_t row_end) {
    for (size_t row = row_begin; row < row_end; ++row) {
        const float* x = args.x + row * args.width;
        float* y = args.y + row * args.width;
        Lanes squares = zero();
        for (size_t i = 0; i < args.width; i += lane_count) {
            const Lanes value = load(x + i);
            squares = fma(value, value, squares);
        }
        const Lanes mean = all(sum(squares)) / all(static_cast<float>(args.width));
        const Lanes factor = all(1.0f) / square_root(mean + all(args.epsilon));
        for (size_t i = 0; i < args.width; i += lane_count) {
            store(y + i, load(args.weight + i) * (load(x + i) * factor));
        }
    }
}

void silu_and_multiply(const float* x, float* y, size_t width, size_t row_begin, size_t row_end) {
    for (size_t row = row_begin; row < row_end; ++row) {
        const float* gate = x + row * 2 * width;
        for (size_t i = 0; i < width; i += lane_count) {
            const Lanes value = load(gate + i);
            const Lanes silu = value / (all(1.0f) + exponential(zero() - value));
            store(y + row * width + i, silu * load(gate + width + i));
        }
    }
}

inline void store_kv(uint8_t* to, KvType type, size_t index, Lanes value) {
    if (type == KvType::float32) return store(reinterpret_cast<float*>(to) + index, value);
    uint16_t* halves = reinterpret_cast<uint16_t*>(to) + index;
    if (type == KvType::bfloat16) return store_bfloat16(halves, value);
    store_float16(halves, value);
}

inline Lanes load_kv(const uint8_t* from, KvType type, size_t index) {
    if (type == KvType::float32) return load(reinterpret_cast<const float*>(from) + index);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(from) + index;
    return type == KvType::bfloat16 ? load_bfloat16(halves) : load_float16(halves);
}

inline size_t kv_row_bytes(const KvPool& pool) {
    return pool.num_kv_heads * pool.head_dim * (pool.type == KvType::float32 ? 4 : 2);
}

// Heads of 32 or more: the halves of a head are whole vectors.
inline void rotate_head(float* head, const float* cosines, const float* sines, size_t half) {
    for (size_t i = 0; i < half; i += lane_count) {
        const Lanes first = load(head + i), second = load(head + half + i);
        const Lanes cosine = load(cosines + i), sine = load(sines + i);
        store(head + i, first * cosine - second * sine);
        store(head + half + i, second * cosine + first * sine);
    }
}

void rotary_and_store(const RotaryStoreArgs& args, size_t row_begin, size_t row_end) {
    const KvPool& pool = args.pool;
    const size_t dim = pool.head_dim, half = dim / 2, kv_width = pool.num_kv_heads * dim;
    const size_t row_width = args.num_heads * dim + 2 * kv_width;
    for (size_t row = row_begin; row < row_end; ++row) {
        float* heads = args.qkv + row * row_width;
        const size_t table = static_cast<size_t>(args.positions[row]) * half;
        for (size_t head = 0; head < args.num_heads + pool.num_kv_heads; ++head) {
            rotate_head(heads + head * dim, args.cosines + table, args.sines + table, half);
        }
        const float* key = heads + args.num_heads * dim;
        const size_t offset = static_cast<size_t>(args.slots[row]) * kv_row_bytes(pool);
        for (size_t i = 0; i < kv_width; i += lane_count) {
            store_kv(pool.keys + offset, pool.type, i, load(key + i));
            store_kv(pool.values + offset, pool.type, i, load(key + kv_width + i));
        }
    }
}

// Sixteen rows of `width` floats (a multiple of 16) become panels [16] of the transpose: out[d * 16 + row].
inline void transpose_sixteen(const float* rows, size_t width, float* out);

#if defined(ROW_LANES_AVX2) || defined(ROW_LANES_AVX512)
inline void transpose_eight(const float* in, size_t in_stride, float* out, size_t out_stride) {
    __m256 r[8], t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(in + i * in_stride);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(out + i * out_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * out_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
inline void transpose_sixteen(const float* rows, size_t width, float* out) {
    for (size_t d = 0; d < width; d += 8) {
        transpose_eight(rows + d, width, out + d * lane_count, lane_count);
        transpose_eight(rows + 8 * width + d, width, out + d * lane_count + 8, lane_count);
    }
}
#else
inline void transpose_sixteen(const float* rows, size_t width, float* out) {
    for (size_t row = 0; row < lane_count; ++row) {
        for (size_t d = 0; d < width; ++d) out[d * lane_count + row] = rows[row * width + d];
    }
}
#endif

// One call's working memory: the softmax runs over key blocks, so each query row keeps its maximum and its sum.
struct AttentionState {
    float* keys;     // [4][head_dim][16]: the block's keys, transposed
    float* values;   // [head_dim / 16][64][16]
    float* queries;  // [rows, head_dim], scaled
    float* sums;     // [rows, head_dim]
    float* highest;  // [rows]
    float* weights;  // [rows]
    float* scores;   // [tile rows, 64]
    float* staging;  // [16, head_dim]
};

inline AttentionState lay_out(float* scratch, size_t rows, size_t dim) {
    AttentionState s;
    s.keys = scratch;
    s.values = s.keys + attention_block * dim;
    s.queries = s.values + attention_block * dim;
    s.sums = s.queries + rows * dim;
    s.scores = s.sums + rows * dim;
    s.staging = s.scores + max_attention_group * attention_block;
    s.highest = s.staging + lane_count * dim;
    s.weights = s.highest + rows;
    return s;
}

// Keys and values of positions [block, block + count); what lies beyond is zero, never read from the pool.
inline void gather_block(const AttentionArgs& args, size_t block, size_t count, const AttentionState& s) {
    const size_t dim = args.pool.head_dim, row_bytes = kv_row_bytes(args.pool);
    const size_t head = args.kv_head * dim;
    for (size_t first = 0; first < count; first += lane_count) {
        for (size_t i = 0; i < lane_count; ++i) {
            float* key = s.staging + i * dim;
            float* value = s.values + (first + i) * lane_count;
            if (first + i >= count) {
                memset(key, 0, dim * sizeof(float));
                continue;
            }
            const size_t position = block + first + i;
            const size_t slot = static_cast<size_t>(args.page_table[position / args.page_size]) * args.page_size +
                                position % args.page_size;
            for (size_t d = 0; d < dim; d += lane_count) {
                store(key + d, load_kv(args.pool.keys + slot * row_bytes, args.pool.type, head + d));
                store(value + d * attention_block,
                      load_kv(args.pool.values + slot * row_bytes, args.pool.type, head + d));
            }
        }
        transpose_sixteen(s.staging, dim, s.keys + first * dim);
    }
}

// Query rows [row, row + rows) against the first `visible` keys of the gathered block.
inline void attend(const AttentionState& s, size_t dim, size_t row, size_t rows, size_t visible) {
    const size_t panels = (visible + lane_count - 1) / lane_count;
    memset(s.scores, 0, rows * attention_block * sizeof(float));
    for (size_t p = 0; p < panels; ++p) {
        multiply_rows<1>(rows, s.queries + row * dim, dim, s.keys + p * lane_count * dim, dim,
                         s.scores + p * lane_count, attention_block);
    }
    for (size_t r = 0; r < rows; ++r) {
        float* scores = s.scores + r * attention_block;
        for (size_t i = visible; i < panels * lane_count; ++i) scores[i] = -__builtin_inff();
        Lanes top = load(scores);
        for (size_t p = 1; p < panels; ++p) top = larger(top, load(scores + p * lane_count));
        const float before = s.highest[row + r];
        const float block_top = maximum(top);
        const float now = before > block_top ? before : block_top;
        Lanes total = zero();
        for (size_t p = 0; p < panels; ++p) {
            const Lanes weight = exponential(load(scores + p * lane_count) - all(now));
            store(scores + p * lane_count, weight);
            total = total + weight;
        }
        float weights = s.weights[row + r];
        if (now != before) {  // multiplying by e^0 = 1 changes no bit
            const Lanes shrink = exponential(all(before) - all(now));
            float* sums = s.sums + (row + r) * dim;
            for (size_t d = 0; d < dim; d += lane_count) store(sums + d, load(sums + d) * shrink);
            float factor[lane_count];
            store(factor, shrink);
            weights *= factor[0];
            s.highest[row + r] = now;
        }
        s.weights[row + r] = weights + sum(total);
    }
    for (size_t d = 0; d < dim; d += lane_count) {
        multiply_rows<1>(rows, s.scores, attention_block, s.values + d * attention_block, visible,
                         s.sums + row * dim + d, dim);
    }
}

inline void begin_rows(const AttentionArgs& args, size_t begin, size_t rows, const AttentionState& s) {
    const size_t dim = args.pool.head_dim;
    for (size_t row = 0; row < rows; ++row) {
        const size_t position = begin + row / args.group;
        const float* query = args.queries + (position - args.first_position) * args.query_stride +
                             (args.kv_head * args.group + row % args.group) * dim;
        for (size_t d = 0; d < dim; d += lane_count) store(s.queries + row * dim + d, load(query + d) * all(args.scale));
        s.highest[row] = -__builtin_inff();
        s.weights[row] = 0.0f;
    }
    memset(s.sums, 0, rows * dim * sizeof(float));
}

void attention(const AttentionArgs& args, size_t begin, size_t end, float* scratch) {
    const size_t dim = args.pool.head_dim, group = args.group, rows = (end - begin) * group;
    const AttentionState s = lay_out(scratch, rows, dim);
    begin_rows(args, begin, rows, s);
    for (size_t block = 0; block < end; block += attention_block) {
        const size_t block_end = block + attention_block;
        gather_block(args, block, min_of(attention_block, end - block), s);
        // Positions that see a part of the block come one by one, each with its own limit; the rest see all of it.
        size_t position = max_of(begin, block);
        for (; position < end && position + 1 < block_end; ++position) {
            attend(s, dim, (position - begin) * group, group, position + 1 - block);
        }
        for (size_t row = (position - begin) * group; row < rows; row += max_tile_rows) {
            attend(s, dim, row, min_of(max_tile_rows, rows - row), attention_block);
        }
    }
    for (size_t row = 0; row < rows; ++row) {
        const size_t position = begin + row / group;
        float* out = args.out + (position - args.first_position) * args.out_stride +
                     (args.kv_head * group + row % group) * dim;
        const Lanes weight = all(s.weights[row]);
        for (size_t d = 0; d < dim; d += lane_count) store(out + d, load(s.sums + row * dim + d) / weight);
    }
}

constexpr RowKernels row_kernels_here(const char* name) {
    return {name,    panel_vectors * lane_count, max_tile_rows, &linear, &rms_norm, &silu_and_multiply,
            &rotary_and_store, &attention};
}

}  // namespace
}  // namespace cachesvc
