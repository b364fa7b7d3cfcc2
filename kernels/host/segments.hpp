// Memory of n objects as address ranges: object i is ranges [offsets[i], offsets[i + 1]).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace cachesvc {

struct Segments {
    const uint64_t* addresses;
    const uint64_t* lengths;
    const int64_t* offsets;  // [count + 1]
    size_t count;

    struct Object {
        std::span<const uint64_t> addresses;
        std::span<const uint64_t> lengths;

        size_t bytes() const {
            size_t total = 0;
            for (uint64_t length : lengths) total += length;
            return total;
        }
    };

    Object object(size_t i) const {
        const size_t begin = static_cast<size_t>(offsets[i]), size = static_cast<size_t>(offsets[i + 1]) - begin;
        return {{addresses + begin, size}, {lengths + begin, size}};
    }
};

}  // namespace cachesvc
