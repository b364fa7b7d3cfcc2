// Checks every shape, range and size of a copy once, then copies without the GIL.
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "arrays.hpp"
#include "bindings.hpp"
#include "paged_copy.hpp"
#include "stream_copy.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace cachesvc {
namespace {

using Copy = void (*)(const PagedPool&, const Frames&, LayerRange, const int32_t*, const int32_t*, size_t);

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

void check_range(std::span<const int32_t> indices, size_t bound, const char* name) {
    for (size_t i = 0; i < indices.size(); ++i) {
        const int32_t value = indices[i];
        require(value >= 0 && static_cast<size_t>(value) < bound,
                std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value) + ", expected [0, " +
                    std::to_string(bound) + ")");
    }
}

template <Copy copy>
void checked_copy(const Input<uint64_t>& base_addresses, size_t num_layers, size_t chunk_bytes, size_t num_pages,
                  const Input<int32_t>& page_indices, uint64_t data_address, size_t stride_bytes, size_t num_frames,
                  const Input<int32_t>& frame_indices, size_t layer_begin, size_t layer_end) {
    const auto bases = input_1d(base_addresses, "bases");
    const auto pages = input_1d(page_indices, "pages");
    const auto frames = input_1d(frame_indices, "frames", pages.size());
    require(num_layers && bases.size() % num_layers == 0,
            "bases: expected the same number for each of " + std::to_string(num_layers) + " layers, got " +
                std::to_string(bases.size()) + " in all");
    const PagedPool pool{bases.data(), num_layers, bases.size() / num_layers, chunk_bytes, num_pages};
    require(layer_begin <= layer_end && layer_end <= pool.num_layers,
            "layers [" + std::to_string(layer_begin) + ", " + std::to_string(layer_end) + ") are not within [0, " +
                std::to_string(pool.num_layers) + ")");
    require(pool.page_bytes() <= stride_bytes, "a page has " + std::to_string(pool.page_bytes()) +
                                                   " bytes and does not fit a frame of " +
                                                   std::to_string(stride_bytes));
    check_range(pages, num_pages, "pages");
    check_range(frames, num_frames, "frames");
    nb::gil_scoped_release unlocked;
    copy(pool, Frames{data_address, stride_bytes}, LayerRange{layer_begin, layer_end}, pages.data(), frames.data(),
         pages.size());
}

bool stream_copy_once(const std::string& name, uint64_t target, uint64_t source, size_t bytes) {
    const StreamCopy copy = stream_copy_named(name);
    if (!copy) return false;
    nb::gil_scoped_release unlocked;
    copy(reinterpret_cast<uint8_t*>(target), reinterpret_cast<const uint8_t*>(source), bytes, nullptr);
    stream_fence();
    return true;
}

}  // namespace

void bind_paged_copy(nb::module_& m) {
    m.def("pool_to_frames", &checked_copy<&pool_to_frames>, "bases"_a, "num_layers"_a, "chunk_bytes"_a, "num_pages"_a,
          "pages"_a, "data_address"_a, "stride_bytes"_a, "num_frames"_a, "frames"_a, "layer_begin"_a, "layer_end"_a);
    m.def("frames_to_pool", &checked_copy<&frames_to_pool>, "bases"_a, "num_layers"_a, "chunk_bytes"_a, "num_pages"_a,
          "pages"_a, "data_address"_a, "stride_bytes"_a, "num_frames"_a, "frames"_a, "layer_begin"_a, "layer_end"_a);
    m.def("stream_copy_name", [] { return std::string(stream_copy_name()); });
    m.def("stream_copy", &stream_copy_once, "name"_a, "target"_a, "source"_a, "num_bytes"_a);
}

}  // namespace cachesvc
