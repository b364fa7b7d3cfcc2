// Arrays that the object stores have in common, checked once at the boundary.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "object_id.hpp"
#include "segments.hpp"

namespace cachesvc {

// n ids, uint8[n, 36].
struct Ids {
    const ObjectId* data;
    size_t count;

    explicit Ids(const Input<uint8_t>& input) {
        const Rows<uint8_t> rows = input_rows(input, "ids", any_length, ObjectId::size);
        data = reinterpret_cast<const ObjectId*>(rows.data);
        count = rows.num_rows;
    }
};

// Raises unless the three arrays describe `count` objects, each a multiple of `alignment` bytes long.
inline Segments checked_segments(const Input<uint64_t>& addresses, const Input<uint64_t>& lengths,
                                 const Input<int64_t>& offsets, size_t count, size_t alignment) {
    const auto address = input_1d(addresses, "segment addresses");
    const auto length = input_1d(lengths, "segment lengths", address.size());
    const auto offset = input_1d(offsets, "segment offsets", count + 1);
    for (size_t i = 0; i < count; ++i)
        if (offset[i] > offset[i + 1]) throw std::invalid_argument("segment offsets are not ascending");
    if (offset[0] != 0 || offset[count] != static_cast<int64_t>(address.size()))
        throw std::invalid_argument("segment offsets must run from 0 to the number of segments");
    const Segments segments{address.data(), length.data(), offset.data(), count};
    for (size_t i = 0; i < count; ++i)
        if (const size_t bytes = segments.object(i).bytes(); bytes % alignment != 0)
            throw std::invalid_argument("object " + std::to_string(i) + " has " + std::to_string(bytes) +
                                        " bytes, expected a multiple of " + std::to_string(alignment));
    return segments;
}

template <class T>
NumpyArray<T> to_array(const std::vector<T>& values) {
    NumpyArray<T> array = new_array<T>(values.size());
    std::copy(values.begin(), values.end(), array.data());
    return array;
}

inline NumpyArray<uint8_t> to_array(const std::vector<ObjectId>& ids) {
    NumpyArray<uint8_t> array = new_array<uint8_t>(ids.size(), ObjectId::size);
    if (!ids.empty()) std::memcpy(array.data(), ids.data(), ids.size() * ObjectId::size);
    return array;
}

}  // namespace cachesvc
