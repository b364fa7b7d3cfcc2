// Compiled with AVX2, FMA and F16C: see row_lanes.hpp for what may be included here.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ROW_LANES_AVX2
#include "row_kernels_impl.hpp"

namespace cachesvc {
const RowKernels* row_kernels_avx2() {
    static constexpr RowKernels kernels = row_kernels_here("avx2");
    const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return runs ? &kernels : nullptr;
}
}  // namespace cachesvc
#else
#include "row_kernels.hpp"

namespace cachesvc {
const RowKernels* row_kernels_avx2() { return nullptr; }
}  // namespace cachesvc
#endif
