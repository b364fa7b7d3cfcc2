// One bind function per noun; each lives in bind_NOUN.cpp and is called once by bindings.cpp.
#pragma once
#include <nanobind/nanobind.h>

namespace cachesvc {
void bind_radix_tree(nanobind::module_& m);
void bind_page_keys(nanobind::module_& m);
void bind_page_format(nanobind::module_& m);
void bind_byte_planes(nanobind::module_& m);
void bind_region(nanobind::module_& m);
void bind_page_index(nanobind::module_& m);
void bind_paged_copy(nanobind::module_& m);
void bind_object_index(nanobind::module_& m);
void bind_file_io(nanobind::module_& m);
void bind_spoiled_memory(nanobind::module_& m);
void bind_row_math(nanobind::module_& m);
void bind_exchange(nanobind::module_& m);
}  // namespace cachesvc
