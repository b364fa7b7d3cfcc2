#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <system_error>

#include "arrays.hpp"
#include "bindings.hpp"
#include "fault_guard.hpp"
#include "page_keys.hpp"
#include "region.hpp"
#include "region_ops.hpp"

namespace nb = nanobind;

namespace cachesvc {
namespace {

using FrameArray = const Input<int32_t>&;
using KeyArray = const Input<uint8_t>&;
using DepthArray = const Input<uint32_t>&;
using U64Array = const Input<uint64_t>&;
using OptionalKeys = const std::optional<Input<uint8_t>>&;
using OptionalU64 = const std::optional<Input<uint64_t>>&;

std::vector<int32_t> begin_write_py(const Region& region, FrameArray frames, OptionalU64 seen) {
    const auto frame_span = input_1d(frames, "frames");
    const uint64_t* seen_data = seen ? input_1d(*seen, "seen", frame_span.size()).data() : nullptr;
    nb::gil_scoped_release released;
    return open_frames(region, frame_span, seen_data);
}

std::vector<int32_t> write_records_py(const Region& region, FrameArray frames, KeyArray keys, DepthArray depths,
                                      uint64_t last_use) {
    const auto frame_span = input_1d(frames, "frames");
    const auto key_rows = input_rows(keys, "keys", frame_span.size(), key_bytes);
    const auto depth_span = input_1d(depths, "depths", frame_span.size());
    nb::gil_scoped_release released;
    return write_records(region, frame_span, key_rows.data, depth_span.data(), last_use);
}

std::vector<int32_t> commit_py(const Region& region, FrameArray frames) {
    const auto frame_span = input_1d(frames, "frames");
    nb::gil_scoped_release released;
    return commit_frames(region, frame_span);
}

NumpyArray<uint64_t> snapshot_py(const Region& region, FrameArray frames, OptionalKeys keys) {
    const auto frame_span = input_1d(frames, "frames");
    const uint8_t* key_data = keys ? input_rows(*keys, "keys", frame_span.size(), key_bytes).data : nullptr;
    auto generations = new_array<uint64_t>(frame_span.size());
    nb::gil_scoped_release released;
    snapshot_frames(region, frame_span, key_data, generations.data());
    return generations;
}

NumpyArray<bool> validate_py(const Region& region, FrameArray frames, U64Array generations) {
    const auto frame_span = input_1d(frames, "frames");
    const auto generation_span = input_1d(generations, "generations", frame_span.size());
    auto valid = new_array<bool>(frame_span.size());
    nb::gil_scoped_release released;
    validate_frames(region, frame_span, generation_span.data(), valid.data());
    return valid;
}

// addresses [n] of whole pages, or, with `segment_bytes` [m], addresses [n, m].
PageMemory page_memory(const Region& region, const Input<uint64_t>& addresses, OptionalU64 segment_bytes,
                       const uint64_t& frame_bytes, size_t n, const char* name) {
    if (!segment_bytes) return {input_1d(addresses, name, n).data(), {&frame_bytes, 1}};
    const auto sizes = input_1d(*segment_bytes, "segment_bytes");
    uint64_t sum = 0;
    for (uint64_t size : sizes) {
        if (size == 0 || size > region.frame_bytes() - sum) {  // also without overflow
            sum = ~uint64_t{0};
            break;
        }
        sum += size;
    }
    if (sum != region.frame_bytes()) {
        const std::string text =
            "segment_bytes: expected sizes above 0 that add up to " + std::to_string(region.frame_bytes());
        throw nb::value_error(text.c_str());
    }
    return {input_rows(addresses, name, n, sizes.size()).data, sizes};
}

NumpyArray<bool> read_py(const Region& region, FrameArray frames, U64Array generations, U64Array out_addresses,
                         OptionalU64 segment_bytes) {
    const auto frame_span = input_1d(frames, "frames");
    const auto generation_span = input_1d(generations, "generations", frame_span.size());
    const uint64_t frame_bytes = region.frame_bytes();
    const PageMemory out =
        page_memory(region, out_addresses, segment_bytes, frame_bytes, frame_span.size(), "out_addresses");
    auto valid = new_array<bool>(frame_span.size());
    nb::gil_scoped_release released;
    read_frames(region, frame_span, generation_span.data(), out, valid.data());
    return valid;
}

std::tuple<NumpyArray<bool>, std::vector<int32_t>> write_py(const Region& region, FrameArray frames,
                                                            U64Array addresses, OptionalU64 segment_bytes,
                                                            KeyArray keys, DepthArray depths, uint64_t last_use) {
    const auto frame_span = input_1d(frames, "frames");
    const size_t n = frame_span.size();
    const uint64_t frame_bytes = region.frame_bytes();
    const FrameWrite write{region,
                           frame_span,
                           page_memory(region, addresses, segment_bytes, frame_bytes, n, "addresses"),
                           input_rows(keys, "keys", n, key_bytes).data,
                           input_1d(depths, "depths", n).data(),
                           last_use};
    auto written = new_array<bool>(n);
    std::vector<int32_t> lost;
    {
        nb::gil_scoped_release released;
        lost = write_frames(write, written.data());
    }
    return {written, lost};
}

std::tuple<size_t, size_t, size_t> count_frames_py(const Region& region) {
    nb::gil_scoped_release released;
    const FrameCounts counts = count_frames(region);
    return {counts.readable, counts.odd, counts.never_written};
}

void touch_py(const Region& region, FrameArray frames, uint64_t last_use) {
    const auto frame_span = input_1d(frames, "frames");
    nb::gil_scoped_release released;
    touch_frames(region, frame_span, last_use);
}

NumpyArray<uint64_t> frame_addresses_py(const Region& region, FrameArray frames) {
    const auto frame_span = input_1d(frames, "frames");
    auto addresses = new_array<uint64_t>(frame_span.size());
    frame_addresses(region, frame_span, addresses.data());
    return addresses;
}

using RecordArrays = std::tuple<NumpyArray<uint64_t>, NumpyArray<uint8_t>, NumpyArray<uint32_t>, NumpyArray<uint32_t>,
                                NumpyArray<uint64_t>>;

RecordArrays records_py(const Region& region) {
    auto generations = new_array<uint64_t>(region.num_frames());
    auto keys = new_array<uint8_t>(region.num_frames(), key_bytes);
    auto depths = new_array<uint32_t>(region.num_frames());
    auto flags = new_array<uint32_t>(region.num_frames());
    auto last_use = new_array<uint64_t>(region.num_frames());
    const RecordColumns columns{generations.data(), keys.data(), depths.data(), flags.data(), last_use.data()};
    {
        nb::gil_scoped_release released;
        read_records(region, columns);
    }
    return {generations, keys, depths, flags, last_use};
}

NumpyArray<bool> copy_open_frames_py(const Region& source, FrameArray source_frames, U64Array generations,
                                     const Region& target, FrameArray target_frames, KeyArray keys,
                                     DepthArray depths) {
    const auto source_span = input_1d(source_frames, "source_frames");
    const size_t n = source_span.size();
    const FrameCopy copy{source,
                         source_span,
                         input_1d(generations, "generations", n).data(),
                         target,
                         input_1d(target_frames, "target_frames", n),
                         input_rows(keys, "keys", n, key_bytes).data,
                         input_1d(depths, "depths", n).data()};
    auto copied = new_array<bool>(n);
    nb::gil_scoped_release released;
    copy_open_frames(copy, copied.data());
    return copied;
}

// The array refers to the region's Python object, so that the mapping outlives every view of it.
nb::ndarray<nb::numpy, uint8_t> data_py(nb::handle self) {
    const auto& region = nb::cast<const Region&>(self);
    const size_t shape[] = {region.num_frames(), static_cast<size_t>(region.header().stride_bytes)};
    return {reinterpret_cast<uint8_t*>(region.data()), 2, shape, self};
}

nb::bytes region_id_py(const Region& region) {
    const RegionId& id = region.header().region_id;
    return nb::bytes(reinterpret_cast<const char*>(id.data()), id.size());
}

std::shared_ptr<Region> create_py(uint64_t num_frames, uint64_t frame_bytes, unsigned touch_threads,
                                  size_t huge_page_bytes) {
    nb::gil_scoped_release released;
    return Region::create({num_frames, frame_bytes}, touch_threads, huge_page_bytes);
}

void raise_os_error(const std::exception_ptr& error, void*) {
    try {
        std::rethrow_exception(error);
    } catch (const std::system_error& failure) {
        const nb::object arguments = nb::make_tuple(failure.code().value(), failure.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

}  // namespace

void bind_region(nb::module_& m) {
    nb::register_exception_translator(raise_os_error);
    nb::exception<MemoryFault>(m, "MemoryFault", PyExc_OSError);
    nb::exception<RegionInvalid>(m, "RegionInvalid", PyExc_ValueError);
    nb::enum_<Side>(m, "Side", "Whose life a lock tells: the engine holds the data memfd, the node the directory.")
        .value("ENGINE", Side::engine)
        .value("NODE", Side::node);
    nb::class_<Region>(m, "Region")
        .def_static("create", &create_py, nb::arg("num_frames"), nb::arg("frame_bytes"), nb::arg("touch_threads"),
                    nb::arg("huge_page_bytes"))
        .def_static("open", &Region::open, nb::arg("data_fd"), nb::arg("directory_fd"))
        .def_prop_ro("region_id", &region_id_py)
        .def_prop_ro("num_frames", &Region::num_frames)
        .def_prop_ro("frame_bytes", &Region::frame_bytes)
        .def_prop_ro("stride_bytes", [](const Region& region) { return region.header().stride_bytes; })
        .def_prop_ro("data_address", [](const Region& region) { return reinterpret_cast<uint64_t>(region.data()); })
        .def_prop_ro("data_fd", &Region::data_fd)
        .def_prop_ro("directory_fd", &Region::directory_fd)
        .def("data", &data_py)
        .def("frame_addresses", &frame_addresses_py, nb::arg("frames"))
        .def("begin_write", &begin_write_py, nb::arg("frames"), nb::arg("seen").none())
        .def("write_records", &write_records_py, nb::arg("frames"), nb::arg("keys"), nb::arg("depths"),
             nb::arg("last_use"))
        .def("commit", &commit_py, nb::arg("frames"))
        .def("snapshot", &snapshot_py, nb::arg("frames"), nb::arg("keys").none())
        .def("validate", &validate_py, nb::arg("frames"), nb::arg("generations"))
        .def("read", &read_py, nb::arg("frames"), nb::arg("generations"), nb::arg("out_addresses"),
             nb::arg("segment_bytes").none())
        .def("write", &write_py, nb::arg("frames"), nb::arg("addresses"), nb::arg("segment_bytes").none(),
             nb::arg("keys"), nb::arg("depths"), nb::arg("last_use"))
        .def("records", &records_py)
        .def("count_frames", &count_frames_py)
        .def("hold", &Region::hold, nb::arg("side"), nb::arg("patience_ms"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("lock_memory", &Region::lock_memory, nb::call_guard<nb::gil_scoped_release>())
        .def("is_held", &Region::is_held, nb::arg("side"), nb::call_guard<nb::gil_scoped_release>())
        .def("touch", &touch_py, nb::arg("frames"), nb::arg("last_use"));
    m.def("copy_open_frames", &copy_open_frames_py, nb::arg("source"), nb::arg("source_frames"), nb::arg("generations"),
          nb::arg("target"), nb::arg("target_frames"), nb::arg("keys"), nb::arg("depths"));
}

}  // namespace cachesvc
