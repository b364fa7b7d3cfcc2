// Compiled with AVX-512: see row_lanes.hpp for what may be included here.
#if defined(__AVX512F__)
#define ROW_LANES_AVX512
#include "row_kernels_impl.hpp"

namespace cachesvc {
const RowKernels* row_kernels_avx512() {
    static constexpr RowKernels kernels = row_kernels_here("avx512");
    return __builtin_cpu_supports("avx512f") ? &kernels : nullptr;
}
}  // namespace cachesvc
#else
#include "row_kernels.hpp"

namespace cachesvc {
const RowKernels* row_kernels_avx512() { return nullptr; }
}  // namespace cachesvc
#endif
