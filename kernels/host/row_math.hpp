// Row-invariant products, norms and attention on the threads of one ForkJoin (the property: see row_kernels.hpp).
//
// Nothing here checks shapes; bind_row_math.cpp does, once. Calls block until done. One RowMath serves one caller at a
// time well; several take turns loop by loop.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "fork_join.hpp"
#include "row_kernels.hpp"

namespace cachesvc {

// A weight of [n, k] floats, laid out for one instruction set. Owns its copy.
class PackedMatrix {
public:
    PackedMatrix(const float* weight, size_t n, size_t k, size_t panel_columns);

    size_t n() const { return n_; }
    size_t k() const { return k_; }
    size_t panel_columns() const { return panel_columns_; }
    size_t num_panels() const { return (n_ + panel_columns_ - 1) / panel_columns_; }
    const float* panels() const { return panels_.get(); }

private:
    struct Free {
        void operator()(float* p) const;
    };
    size_t n_, k_, panel_columns_;
    std::unique_ptr<float[], Free> panels_;
};

// The sequences of one attention call: query rows [row_offsets[s], row_offsets[s + 1]) are the consecutive positions
// from starts[s] on; their KV lies in pages page_tables[table_offsets[s]...].
struct AttentionBatch {
    const int64_t* row_offsets;
    const int64_t* starts;
    const int64_t* table_offsets;
    const int32_t* page_tables;
    size_t num_sequences;
    size_t page_size;
};

class RowMath {
public:
    // `instructions`: "auto" (the widest), "avx512", "avx2" or "portable"; throws std::invalid_argument when unknown or
    // not supported by this machine.
    RowMath(size_t num_threads, std::string_view instructions);

    const RowKernels& kernels() const { return kernels_; }
    size_t num_threads() const { return threads_.num_threads(); }

    void linear(const float* x, size_t rows, const PackedMatrix& weight, float* y, bool accumulate);
    void rms_norm(const RmsNormArgs& args, size_t rows);
    void silu_and_multiply(const float* x, float* y, size_t width, size_t rows);
    void rotary_and_store(const RotaryStoreArgs& args, size_t rows);
    void attention(const AttentionBatch& batch, const float* queries, size_t query_stride, size_t num_heads,
                   const KvPool& pool, float scale, float* out);

private:
    template <class Piece>
    void in_row_blocks(size_t rows, size_t floats_per_row, Piece&& piece);

    const RowKernels& kernels_;
    ForkJoin threads_;
};

// The sets this machine can run, widest first, separated by spaces.
std::string_view supported_row_instructions();

}  // namespace cachesvc
