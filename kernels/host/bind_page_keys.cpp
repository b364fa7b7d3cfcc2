#include "bindings.hpp"

namespace cachesvc {
void bind_page_keys(nanobind::module_&) {}
}  // namespace cachesvc
