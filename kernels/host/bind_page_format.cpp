#include "bindings.hpp"

namespace cachesvc {
void bind_page_format(nanobind::module_&) {}
}  // namespace cachesvc
