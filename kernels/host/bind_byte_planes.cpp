#include "arrays.hpp"
#include "bindings.hpp"
#include "byte_planes.hpp"

namespace nb = nanobind;

namespace cachesvc {
namespace {

void check_value_bytes(size_t value_bytes) {
    if (value_bytes != 1 && value_bytes != 2 && value_bytes != 4)
        throw nb::value_error("value_bytes: expected 1, 2 or 4");
}

NumpyArray<uint8_t> split_planes_py(const Input<uint64_t>& addresses, size_t page_bytes, size_t value_bytes) {
    const auto pages = input_1d(addresses, "addresses");
    check_value_bytes(value_bytes);
    auto planes = new_array<uint8_t>(pages.size(), page_bytes);
    nb::gil_scoped_release released;
    split_planes(pages, page_bytes, value_bytes, planes.data());
    return planes;
}

void join_planes_py(const Input<uint64_t>& planes, size_t page_bytes, size_t value_bytes,
                    const Input<uint64_t>& addresses) {
    const auto rows = input_1d(planes, "planes");
    const auto pages = input_1d(addresses, "addresses", rows.size());
    check_value_bytes(value_bytes);
    nb::gil_scoped_release released;
    join_planes(rows, page_bytes, value_bytes, pages);
}

}  // namespace

void bind_byte_planes(nb::module_& m) {
    m.def("split_planes", &split_planes_py, nb::arg("addresses"), nb::arg("page_bytes"), nb::arg("value_bytes"));
    m.def("join_planes", &join_planes_py, nb::arg("planes"), nb::arg("page_bytes"), nb::arg("value_bytes"),
          nb::arg("addresses"));
}

}  // namespace cachesvc
