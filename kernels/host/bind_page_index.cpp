#include "bindings.hpp"

namespace cachesvc {
void bind_page_index(nanobind::module_&) {}
}  // namespace cachesvc
