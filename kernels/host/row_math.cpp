#include "row_math.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace cachesvc {
namespace {

constexpr size_t huge_page_bytes = 2 << 20;
constexpr size_t floats_per_task = 16384;   // of an elementwise loop: some microseconds
constexpr size_t products_per_task = 1 << 20;  // of a matrix product: some tens of microseconds

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

struct NamedKernels {
    std::string_view name;
    const RowKernels* kernels;
};

std::vector<NamedKernels> all_kernels() {
    return {{"avx512", row_kernels_avx512()}, {"avx2", row_kernels_avx2()}, {"portable", row_kernels_portable()}};
}

const RowKernels& choose(std::string_view instructions) {
    for (const auto& [name, kernels] : all_kernels()) {
        if (kernels != nullptr && (instructions == name || instructions == "auto")) return *kernels;
    }
    throw std::invalid_argument("instructions: expected auto or one of " + std::string(supported_row_instructions()) +
                                " on this machine, got " + std::string(instructions));
}

size_t checked_threads(size_t num_threads) {
    if (num_threads < 1) throw std::invalid_argument("num_threads: expected at least 1, the caller's own");
    return num_threads;
}

float* allocate_floats(size_t count) {
    const size_t bytes = divide_up(std::max<size_t>(count, 1) * sizeof(float), 64) * 64;
    const bool is_large = bytes >= huge_page_bytes;  // a decode step reads every weight once: misses of the TLB show
    void* memory = std::aligned_alloc(is_large ? huge_page_bytes : 64,
                                      is_large ? divide_up(bytes, huge_page_bytes) * huge_page_bytes : bytes);
    if (memory == nullptr) throw std::bad_alloc();
    if (is_large) madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<float*>(memory);
}

}  // namespace

void PackedMatrix::Free::operator()(float* p) const { std::free(p); }

PackedMatrix::PackedMatrix(const float* weight, size_t n, size_t k, size_t panel_columns)
    : n_(n), k_(k), panel_columns_(panel_columns), panels_(allocate_floats(divide_up(n, panel_columns) * panel_columns * k)) {
    for (size_t panel = 0; panel < num_panels(); ++panel) {
        float* to = panels_.get() + panel * panel_columns * k;
        const size_t first = panel * panel_columns, columns = std::min(panel_columns, n - first);
        for (size_t i = 0; i < k; ++i) {
            for (size_t column = 0; column < columns; ++column) *to++ = weight[(first + column) * k + i];
            for (size_t column = columns; column < panel_columns; ++column) *to++ = 0.0f;
        }
    }
}

std::string_view supported_row_instructions() {
    static const std::string names = [] {
        std::string text;
        for (const auto& [name, kernels] : all_kernels()) {
            if (kernels == nullptr) continue;
            if (!text.empty()) text += ' ';
            text += name;
        }
        return text;
    }();
    return names;
}

RowMath::RowMath(size_t num_threads, std::string_view instructions)
    : kernels_(choose(instructions)), threads_(checked_threads(num_threads)) {}

template <class Piece>
void RowMath::in_row_blocks(size_t rows, size_t floats_per_row, Piece&& piece) {
    const size_t block = std::max<size_t>(1, floats_per_task / std::max<size_t>(1, floats_per_row));
    threads_.run(divide_up(rows, block), [&](size_t i) { piece(i * block, std::min(rows, (i + 1) * block)); });
}

void RowMath::linear(const float* x, size_t rows, const PackedMatrix& weight, float* y, bool accumulate) {
    if (rows == 0) return;
    const LinearArgs args{x, weight.panels(), y, weight.k(), weight.n(), accumulate};
    const size_t row_block = std::min<size_t>(rows, 96);
    const size_t products_per_panel = row_block * weight.k() * weight.panel_columns();
    const size_t fair_share = divide_up(weight.num_panels(), 4 * num_threads());
    const size_t panel_block =
        std::clamp<size_t>(products_per_task / std::max<size_t>(1, products_per_panel), 1, std::max<size_t>(1, fair_share));
    const size_t panel_blocks = divide_up(weight.num_panels(), panel_block);
    threads_.run(divide_up(rows, row_block) * panel_blocks, [&](size_t i) {
        const size_t row = i / panel_blocks * row_block, panel = i % panel_blocks * panel_block;
        kernels_.linear(args, row, std::min(rows, row + row_block), panel,
                        std::min(weight.num_panels(), panel + panel_block));
    });
}

void RowMath::rms_norm(const RmsNormArgs& args, size_t rows) {
    in_row_blocks(rows, args.width, [&](size_t begin, size_t end) { kernels_.rms_norm(args, begin, end); });
}

void RowMath::silu_and_multiply(const float* x, float* y, size_t width, size_t rows) {
    in_row_blocks(rows, 4 * width,
                  [&](size_t begin, size_t end) { kernels_.silu_and_multiply(x, y, width, begin, end); });
}

void RowMath::rotary_and_store(const RotaryStoreArgs& args, size_t rows) {
    const size_t width = (args.num_heads + 2 * args.pool.num_kv_heads) * args.pool.head_dim;
    in_row_blocks(rows, width, [&](size_t begin, size_t end) { kernels_.rotary_and_store(args, begin, end); });
}

void RowMath::attention(const AttentionBatch& batch, const float* queries, size_t query_stride, size_t num_heads,
                        const KvPool& pool, float scale, float* out) {
    struct Span {
        size_t sequence, begin, end;
    };
    std::vector<Span> spans;
    for (size_t s = 0; s < batch.num_sequences; ++s) {
        const size_t start = static_cast<size_t>(batch.starts[s]);
        const size_t end = start + static_cast<size_t>(batch.row_offsets[s + 1] - batch.row_offsets[s]);
        for (size_t begin = start; begin < end; begin += attention_span) {
            spans.push_back({s, begin, std::min(end, begin + attention_span)});
        }
    }
    // The longest first: a long one that begins last would leave the other threads idle.
    std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.end > b.end; });
    const size_t group = num_heads / pool.num_kv_heads, out_stride = num_heads * pool.head_dim;
    threads_.run(spans.size() * pool.num_kv_heads, [&](size_t i) {
        thread_local std::vector<float> scratch;
        scratch.resize(std::max(scratch.size(), attention_scratch_floats(group, pool.head_dim)));
        const Span& span = spans[i / pool.num_kv_heads];
        const size_t row = static_cast<size_t>(batch.row_offsets[span.sequence]);
        const AttentionArgs args{queries + row * query_stride,
                                 out + row * out_stride,
                                 query_stride,
                                 out_stride,
                                 static_cast<size_t>(batch.starts[span.sequence]),
                                 batch.page_tables + batch.table_offsets[span.sequence],
                                 batch.page_size,
                                 pool,
                                 i % pool.num_kv_heads,
                                 group,
                                 scale};
        kernels_.attention(args, span.begin, span.end, scratch.data());
    });
}

}  // namespace cachesvc
