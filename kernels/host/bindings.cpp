#include "bindings.hpp"

#include "source_digest.hpp"

NB_MODULE(_core, m) {
    using namespace cachesvc;
    // A model or a tree that lives until the process ends is no leak worth a page of warnings.
    nanobind::set_leak_warnings(false);
    m.doc() = "Native core of cachesvc; use the typed faces in cachekernels.*";
    m.attr("source_digest") = source_digest;
    bind_radix_tree(m);
    bind_page_keys(m);
    bind_page_format(m);
    bind_byte_planes(m);
    bind_region(m);
    bind_page_index(m);
    bind_paged_copy(m);
    bind_object_index(m);
    bind_file_io(m);
    bind_spoiled_memory(m);
    bind_row_math(m);
    bind_exchange(m);
}
