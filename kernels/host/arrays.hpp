// The boundary between Python arrays and native code: shape, dtype and contiguity are checked once here, with an error
// that says what was expected and what came; behind it everything works on plain spans.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace cachesvc {

// Any CPU array, taken as it is: a converting copy would cost what the batch saves.
using InputArray = nanobind::ndarray<nanobind::ro, nanobind::device::cpu>;

// An argument that must be an array of T. The type stub says so; input_1d and input_rows check it.
template <class T>
struct Input {
    InputArray array;
};
template <class T>
using NumpyArray = nanobind::ndarray<nanobind::numpy, T>;

constexpr size_t any_length = ~size_t{0};

namespace detail {

inline std::string dtype_text(nanobind::dlpack::dtype dtype) {
    static constexpr const char* kinds[] = {"int", "uint", "float", "?", "bfloat", "complex", "bool"};
    const std::string kind = dtype.code < std::size(kinds) ? kinds[dtype.code] : "?";
    return kind == "bool" ? kind : kind + std::to_string(dtype.bits);
}

inline std::string shape_text(std::initializer_list<size_t> shape) {
    std::string text;
    for (size_t length : shape) {
        text += (text.empty() ? "" : ", ") + (length == any_length ? "n" : std::to_string(length));
    }
    return "[" + text + "]";
}

inline std::string shape_text(const InputArray& array) {
    std::string text;
    for (size_t d = 0; d < array.ndim(); ++d) text += (d == 0 ? "" : ", ") + std::to_string(array.shape(d));
    return "[" + text + "]";
}

inline bool is_c_contiguous(const InputArray& array) {
    int64_t expected = 1;
    if (array.size() == 0) return true;
    for (size_t d = array.ndim(); d-- > 0;) {
        if (array.shape(d) != 1 && array.stride(d) != expected) return false;
        expected *= static_cast<int64_t>(array.shape(d));
    }
    return true;
}

template <class T>
const T* checked_data(const InputArray& array, const char* name, std::initializer_list<size_t> shape) {
    if (array.dtype() != nanobind::dtype<T>()) {
        const std::string text = std::string(name) + ": expected dtype " + dtype_text(nanobind::dtype<T>()) + ", got " +
                                 dtype_text(array.dtype());
        throw nanobind::type_error(text.c_str());
    }
    bool fits = array.ndim() == shape.size();
    for (size_t d = 0; fits && d < shape.size(); ++d) {
        fits = shape.begin()[d] == any_length || shape.begin()[d] == array.shape(d);
    }
    if (!fits) {
        const std::string text =
            std::string(name) + ": expected shape " + shape_text(shape) + ", got " + shape_text(array);
        throw nanobind::value_error(text.c_str());
    }
    if (!is_c_contiguous(array)) {
        throw nanobind::value_error((std::string(name) + ": expected a C-contiguous array").c_str());
    }
    return static_cast<const T*>(array.data());
}

}  // namespace detail

// A one-dimensional array of T; `length` where it must match another argument.
template <class T>
std::span<const T> input_1d(const Input<T>& input, const char* name, size_t length = any_length) {
    const T* data = detail::checked_data<T>(input.array, name, {length});
    return {data, input.array.shape(0)};
}

template <class T>
struct Rows {
    const T* data;
    size_t num_rows;
    size_t row_length;
    const T* operator[](size_t row) const { return data + row * row_length; }
};

// An array of shape [num_rows, row_length].
template <class T>
Rows<T> input_rows(const Input<T>& input, const char* name, size_t num_rows = any_length,
                   size_t row_length = any_length) {
    const T* data = detail::checked_data<T>(input.array, name, {num_rows, row_length});
    return {data, input.array.shape(0), input.array.shape(1)};
}

// Exactly `length` bytes, e.g. a digest. The pointer lives as long as the bytes object.
inline const uint8_t* input_bytes(const nanobind::bytes& bytes, const char* name, size_t length) {
    if (bytes.size() != length) {
        const std::string text = std::string(name) + ": expected " + std::to_string(length) + " bytes, got " +
                                 std::to_string(bytes.size());
        throw nanobind::value_error(text.c_str());
    }
    return reinterpret_cast<const uint8_t*>(bytes.c_str());
}

// A new, uninitialised numpy array that owns its memory. Needs the GIL.
template <class T, class... Lengths>
NumpyArray<T> new_array(Lengths... lengths) {
    const size_t shape[] = {static_cast<size_t>(lengths)...};
    size_t size = 1;
    for (size_t length : shape) size *= length;
    auto data = std::make_unique_for_overwrite<T[]>(size);
    nanobind::capsule owner(data.get(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return NumpyArray<T>(data.release(), sizeof...(lengths), shape, owner);
}

// A numpy array that takes a vector's memory over: [n], or [n / row_length, row_length]. Needs the GIL.
template <class T>
NumpyArray<T> array_of(std::vector<T> values, size_t row_length = 0) {
    auto kept = std::make_unique<std::vector<T>>(std::move(values));
    const size_t rows = row_length ? kept->size() / row_length : kept->size();
    const size_t shape[] = {rows, row_length};
    static T nothing{};  // an empty vector has no memory, and a null array would not be a numpy array
    T* data = kept->empty() ? &nothing : kept->data();
    nanobind::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    kept.release();
    return NumpyArray<T>(data, row_length ? 2 : 1, shape, owner);
}

}  // namespace cachesvc

template <class T>
struct nanobind::detail::type_caster<cachesvc::Input<T>> {
    NB_TYPE_CASTER(cachesvc::Input<T>,
                   const_name("numpy.ndarray[dtype=") + dtype_traits<T>::name + const_name("]"))

    bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
        make_caster<cachesvc::InputArray> caster;
        if (!caster.from_python(source, flags & ~static_cast<uint32_t>(cast_flags::convert), cleanup)) return false;
        value.array = std::move(caster.value);
        return true;
    }
};
