// Names of stored objects: page key (32 bytes) ‖ pool (u16le) ‖ rank (u16le).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cachesvc {

struct ObjectId {
    static constexpr size_t size = 36;
    std::array<uint8_t, size> bytes;

    bool operator==(const ObjectId&) const = default;

    // The key is a cryptographic digest already; pool and rank are folded in, then mixed for ids that are not (tests).
    uint64_t hash() const {
        uint64_t low;
        uint32_t tail;
        std::memcpy(&low, bytes.data(), sizeof low);
        std::memcpy(&tail, bytes.data() + 32, sizeof tail);
        uint64_t mixed = low ^ (tail * 0x9E3779B97F4A7C15ull);
        mixed ^= mixed >> 32;
        mixed *= 0xD6E8FEB86659FD93ull;
        return mixed ^ (mixed >> 32);
    }
};
static_assert(sizeof(ObjectId) == ObjectId::size);

struct ObjectIdHash {
    size_t operator()(const ObjectId& id) const { return id.hash(); }
};

}  // namespace cachesvc
