// FileIo for Python; cachekernels.files is its typed face.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind_objects.hpp"
#include "bindings.hpp"
#include "file_io.hpp"
#include "file_transfer.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace cachesvc {
namespace {

// Files are padded alike whether O_DIRECT is on or not, so that a directory can be opened either way.
Segments file_segments(const Input<uint64_t>& addresses, const Input<uint64_t>& lengths, const Input<int64_t>& offsets,
                       size_t count) {
    return checked_segments(addresses, lengths, offsets, count, direct_alignment);
}

auto write(FileIo& files, const Input<uint8_t>& id_rows, const Input<uint64_t>& addresses,
           const Input<uint64_t>& lengths, const Input<int64_t>& offsets, const Input<uint8_t>& flags,
           const Input<int64_t>& modified_ns, const Input<uint64_t>& reused) {
    const Ids ids(id_rows);
    const Segments segments = file_segments(addresses, lengths, offsets, ids.count);
    const auto which = input_1d(flags, "which", ids.count);
    const auto times = input_1d(modified_ns, "modified_ns", ids.count);
    const auto there = input_1d(reused, "reused", ids.count);
    NumpyArray<uint64_t> numbers = new_array<uint64_t>(ids.count);
    std::copy(there.begin(), there.end(), numbers.data());
    NumpyArray<int32_t> errors = new_array<int32_t>(ids.count);
    {
        nb::gil_scoped_release unlocked;
        files.write(ids.data, segments, which.data(), times.data(), numbers.data(), errors.data());
    }
    return std::tuple(numbers, errors);
}

NumpyArray<int32_t> publish(FileIo& files, const Input<uint8_t>& id_rows, const Input<uint64_t>& file_numbers,
                            const Input<uint8_t>& flags) {
    const Ids ids(id_rows);
    const auto numbers = input_1d(file_numbers, "numbers", ids.count);
    const auto which = input_1d(flags, "which", ids.count);
    NumpyArray<int32_t> errors = new_array<int32_t>(ids.count);
    nb::gil_scoped_release unlocked;
    files.publish(ids.data, numbers.data(), which.data(), ids.count, errors.data());
    return errors;
}

void discard(FileIo& files, const Input<uint8_t>& id_rows, const Input<uint64_t>& file_numbers,
             const Input<uint8_t>& flags) {
    const Ids ids(id_rows);
    const auto numbers = input_1d(file_numbers, "numbers", ids.count);
    const auto which = input_1d(flags, "which", ids.count);
    nb::gil_scoped_release unlocked;
    files.discard(ids.data, numbers.data(), which.data(), ids.count);
}

template <auto method>
NumpyArray<int32_t> with_segments(FileIo& files, const Input<uint8_t>& id_rows, const Input<uint64_t>& addresses,
                                  const Input<uint64_t>& lengths, const Input<int64_t>& offsets) {
    const Ids ids(id_rows);
    const Segments segments = file_segments(addresses, lengths, offsets, ids.count);
    NumpyArray<int32_t> errors = new_array<int32_t>(ids.count);
    nb::gil_scoped_release unlocked;
    (files.*method)(ids.data, segments, errors.data());
    return errors;
}

NumpyArray<int32_t> remove(FileIo& files, const Input<uint8_t>& id_rows, const Input<uint8_t>& flags) {
    const Ids ids(id_rows);
    const auto set_aside = input_1d(flags, "set_aside", ids.count);
    NumpyArray<int32_t> errors = new_array<int32_t>(ids.count);
    nb::gil_scoped_release unlocked;
    files.remove(ids.data, set_aside.data(), ids.count, errors.data());
    return errors;
}

auto reuse(FileIo& files, const Input<uint8_t>& victim_rows, const Input<uint8_t>& id_rows,
           const Input<int64_t>& most_bytes) {
    const Ids victims(victim_rows), ids(id_rows);
    if (ids.count != victims.count) throw nb::value_error("ids: expected as many as victims");
    const auto bytes = input_1d(most_bytes, "num_bytes", ids.count);
    NumpyArray<uint64_t> numbers = new_array<uint64_t>(ids.count);
    NumpyArray<int32_t> errors = new_array<int32_t>(ids.count);
    {
        nb::gil_scoped_release unlocked;
        files.reuse(victims.data, ids.data, bytes.data(), ids.count, numbers.data(), errors.data());
    }
    return std::tuple(numbers, errors);
}

NumpyArray<int64_t> sizes(FileIo& files, const Input<uint8_t>& id_rows) {
    const Ids ids(id_rows);
    NumpyArray<int64_t> bytes = new_array<int64_t>(ids.count);
    nb::gil_scoped_release unlocked;
    files.sizes(ids.data, ids.count, bytes.data());
    return bytes;
}

auto to_python(const FileIo::Found& found) {
    return std::tuple(to_array(found.ids), to_array(found.bytes), to_array(found.modified_ns), found.temporary);
}

auto scan(FileIo& files, size_t begin, size_t end) {
    if (begin > end || end > FileIo::num_shards) throw std::invalid_argument("shards are numbered 0 to 255");
    FileIo::Found found;
    {
        nb::gil_scoped_release unlocked;
        found = files.scan(begin, end);
    }
    return to_python(found);
}

auto scan_set_aside(FileIo& files) {
    FileIo::Found found;
    {
        nb::gil_scoped_release unlocked;
        found = files.scan_set_aside();
    }
    return to_python(found);
}

}  // namespace

void bind_file_io(nb::module_& m) {
    nb::class_<FileIo>(m, "FileIo")
        .def(nb::init<int, std::string, bool, size_t>(), "directory_fd"_a, "writer"_a, "direct"_a, "num_threads"_a)
        .def("write", &write, "ids"_a, "addresses"_a, "lengths"_a, "offsets"_a, "which"_a, "modified_ns"_a,
             "reused"_a)
        .def("publish", &publish, "ids"_a, "numbers"_a, "which"_a)
        .def("discard", &discard, "ids"_a, "numbers"_a, "which"_a)
        .def("read", &with_segments<&FileIo::read>, "ids"_a, "addresses"_a, "lengths"_a, "offsets"_a)
        .def("set_aside", &with_segments<&FileIo::set_aside>, "ids"_a, "addresses"_a, "lengths"_a, "offsets"_a)
        .def("remove", &remove, "ids"_a, "set_aside"_a)
        .def("reuse", &reuse, "victims"_a, "ids"_a, "num_bytes"_a)
        .def("sizes", &sizes, "ids"_a)
        .def("scan", &scan, "begin"_a, "end"_a)
        .def("scan_set_aside", &scan_set_aside);
}

}  // namespace cachesvc
