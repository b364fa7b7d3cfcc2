// The single-threaded pieces of a transformer's forward pass, each compiled once per instruction set.
//
// Every piece has one property: what it computes for a row (a token) depends on that row's inputs alone, not on how
// many rows come with it, where the row stands among them, or how the work was cut into calls. It holds by
// construction, not by measurement: each output element is one chain of operations in a fixed order (k ascending in a
// product, key position ascending in attention), and the number of rows in a tile decides only which chains run side
// by side. The chains are the same for each instruction set too, so the bits are.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cachesvc {

enum class KvType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

// y[rows, n] = x[rows, k] * W^T, or y += that. `panels` holds W as [n_padded / panel_columns][k][panel_columns].
struct LinearArgs {
    const float* x;
    const float* panels;
    float* y;
    size_t k, n;
    bool accumulate;  // adds the finished product to y: the residual connection
};

struct RmsNormArgs {
    const float* x;
    const float* weight;
    float* y;
    size_t width;
    float epsilon;
};

// One layer's KV in the device pool: row of slot s at base + s * row_bytes, heads side by side.
struct KvPool {
    uint8_t* keys;
    uint8_t* values;
    KvType type;
    size_t num_kv_heads, head_dim;
};

// qkv[rows, (heads + 2 * kv_heads) * head_dim]: q and k are rotated in place (halves, not pairs), k and v go to the pool.
struct RotaryStoreArgs {
    float* qkv;
    const float* cosines;  // [positions, head_dim / 2]
    const float* sines;
    const int64_t* positions;  // [rows]
    const int64_t* slots;      // [rows]
    KvPool pool;
    size_t num_heads;
};

// Causal attention of query positions [begin, end) of one sequence under one KV head.
struct AttentionArgs {
    const float* queries;  // row of position p at queries + (p - first_position) * query_stride; head h at h * head_dim
    float* out;            // likewise, with out_stride
    size_t query_stride, out_stride;
    size_t first_position;
    const int32_t* page_table;
    size_t page_size;
    KvPool pool;
    size_t kv_head, group;  // query heads [kv_head * group, (kv_head + 1) * group) share the KV head
    float scale;
};

constexpr size_t attention_span = 64;   // query positions per call at most
constexpr size_t attention_block = 64;  // key positions per step
constexpr size_t max_attention_group = 32;

// Floats of scratch that one attention call needs.
static inline size_t attention_scratch_floats(size_t group, size_t head_dim) {
    const size_t rows = attention_span * group;
    return 2 * attention_block * head_dim + rows * (2 * head_dim + 2) + max_attention_group * attention_block + 16 * head_dim;
}

struct RowKernels {
    const char* name;
    size_t panel_columns;
    size_t rows_in_flight;  // rows of one tile: blocks of rows are cut at multiples of it
    void (*linear)(const LinearArgs&, size_t row_begin, size_t row_end, size_t panel_begin, size_t panel_end);
    void (*rms_norm)(const RmsNormArgs&, size_t row_begin, size_t row_end);
    // y[rows, width] = silu(x[:, :width]) * x[:, width:], x of [rows, 2 * width]; width a multiple of 16
    void (*silu_and_multiply)(const float* x, float* y, size_t width, size_t row_begin, size_t row_end);
    void (*rotary_and_store)(const RotaryStoreArgs&, size_t row_begin, size_t row_end);
    void (*attention)(const AttentionArgs&, size_t begin, size_t end, float* scratch);
};

// Null where this machine cannot run the set.
const RowKernels* row_kernels_avx512();
const RowKernels* row_kernels_avx2();
const RowKernels* row_kernels_portable();

}  // namespace cachesvc
