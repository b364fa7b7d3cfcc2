#include "bindings.hpp"

namespace cachesvc {
void bind_radix_tree(nanobind::module_&) {}
}  // namespace cachesvc
