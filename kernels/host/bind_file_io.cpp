#include "bindings.hpp"

namespace cachesvc {
void bind_file_io(nanobind::module_&) {}
}  // namespace cachesvc
