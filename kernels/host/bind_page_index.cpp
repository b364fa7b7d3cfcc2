#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include "arrays.hpp"
#include "bindings.hpp"
#include "page_index.hpp"
#include "page_keys.hpp"

namespace nb = nanobind;

namespace cachesvc {
namespace {

using LocationArrays = std::tuple<NumpyArray<int16_t>, NumpyArray<int32_t>, NumpyArray<uint64_t>>;

size_t publish_py(PageIndex& index, int slot, const Input<int32_t>& frames) {
    const auto frame_span = input_1d(frames, "frames");
    nb::gil_scoped_release released;
    return index.publish(slot, frame_span);
}

LocationArrays lookup_py(const PageIndex& index, const Input<uint8_t>& keys, int exclude_slot) {
    const auto key_rows = input_rows(keys, "keys", any_length, key_bytes);
    auto slots = new_array<int16_t>(key_rows.num_rows);
    auto frames = new_array<int32_t>(key_rows.num_rows);
    auto generations = new_array<uint64_t>(key_rows.num_rows);
    const PageIndex::Locations out{slots.data(), frames.data(), generations.data()};
    {
        nb::gil_scoped_release released;
        index.lookup(key_rows.data, key_rows.num_rows, exclude_slot, out);
    }
    return {slots, frames, generations};
}

}  // namespace

void bind_page_index(nb::module_& m) {
    nb::exception<IndexInvariantBroken>(m, "IndexInvariantBroken", PyExc_AssertionError);
    using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<PageIndex>(m, "PageIndex")
        .def(nb::init<>())
        .def("add_region", &PageIndex::add_region, nb::arg("region"), ReleaseGil())
        .def("remove_region", &PageIndex::remove_region, nb::arg("slot"), ReleaseGil())
        .def("publish", &publish_py, nb::arg("slot"), nb::arg("frames"))
        .def("lookup", &lookup_py, nb::arg("keys"), nb::arg("exclude_slot"))
        .def_prop_ro("num_keys", &PageIndex::num_keys)
        .def_prop_ro("memory_bytes", &PageIndex::memory_bytes)
        .def("check", &PageIndex::check, ReleaseGil());
}

}  // namespace cachesvc
