// Compiled for any machine; slow where fused multiply-add is a library call, and equal in every bit.
#include "row_kernels_impl.hpp"

namespace cachesvc {
const RowKernels* row_kernels_portable() {
    static constexpr RowKernels kernels = row_kernels_here("portable");
    return &kernels;
}
}  // namespace cachesvc
