#include "bindings.hpp"

namespace cachesvc {
void bind_paged_copy(nanobind::module_&) {}
}  // namespace cachesvc
