#include "bindings.hpp"

namespace cachesvc {
void bind_region(nanobind::module_&) {}
}  // namespace cachesvc
