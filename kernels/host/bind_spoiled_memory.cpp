// Copies between plain memory and memory that another process can spoil, for callers that have no native code of their
// own: one guarded pass over the ranges of an object, without the GIL.
#include "arrays.hpp"
#include "bindings.hpp"
#include "fault_guard.hpp"

namespace nb = nanobind;

namespace cachesvc {
namespace {

struct Ranges {
    std::span<const uint64_t> addresses, lengths;

    size_t bytes() const {
        size_t total = 0;
        for (uint64_t length : lengths) total += length;
        return total;
    }

    // Calls copy(range, its offset in the whole) for each; throws MemoryFault for the first that faults.
    template <class Copy>
    void each(const Copy& copy) const {
        size_t at = 0;
        for (size_t i = 0; i < lengths.size(); at += lengths[i++]) {
            if (!copy(reinterpret_cast<uint8_t*>(addresses[i]), at, lengths[i])) throw MemoryFault(i);
        }
    }
};

Ranges ranges(const Input<uint64_t>& addresses, const Input<uint64_t>& lengths) {
    const auto address_span = input_1d(addresses, "addresses");
    return {address_span, input_1d(lengths, "lengths", address_span.size())};
}

nb::bytes gather_py(const Input<uint64_t>& addresses, const Input<uint64_t>& lengths) {
    const Ranges from = ranges(addresses, lengths);
    auto all = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(from.bytes())));
    if (!all.is_valid()) throw nb::python_error();
    auto* target = reinterpret_cast<uint8_t*>(const_cast<char*>(all.c_str()));
    nb::gil_scoped_release released;
    from.each([=](uint8_t* range, size_t at, size_t bytes) { return guarded_copy(target + at, range, bytes); });
    return all;
}

void scatter_py(uint64_t source, const Input<uint64_t>& addresses, const Input<uint64_t>& lengths) {
    const Ranges to = ranges(addresses, lengths);
    const auto* from = reinterpret_cast<const uint8_t*>(source);
    nb::gil_scoped_release released;
    to.each([=](uint8_t* range, size_t at, size_t bytes) { return guarded_copy(range, from + at, bytes); });
}

}  // namespace

void bind_spoiled_memory(nb::module_& m) {
    m.def("gather", &gather_py, nb::arg("addresses"), nb::arg("lengths"));
    m.def("scatter", &scatter_py, nb::arg("source"), nb::arg("addresses"), nb::arg("lengths"));
}

}  // namespace cachesvc
