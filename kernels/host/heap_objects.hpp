// Objects in ordinary memory, under their ids.
//
// DESIGN. A put first copies the bytes (`stage`, no lock), then makes them visible (`publish`). A reader takes a
// reference under the lock and copies without it, so a removal never waits for a copy and never pulls memory from under
// one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "object_id.hpp"
#include "segments.hpp"

namespace cachesvc {

class HeapObjects {
   public:
    struct Block {
        std::unique_ptr<uint8_t[]> bytes;
        size_t size = 0;
    };
    enum class Found : uint8_t { ok = 0, missing = 1, wrong_length = 2, different = 3 };

    // Copies of the objects; which[i] == 0 leaves block i empty. Throws std::bad_alloc, MemoryFault.
    static std::vector<Block> stage(const Segments& segments, const uint8_t* which);
    // Takes staged[i] for every which[i]; stored[i] = 0 where the id was taken already.
    void publish(const ObjectId* ids, std::vector<Block>& staged, const uint8_t* which, size_t count, uint8_t* stored);
    // Copies as much as fits; wrong_length when not every byte of both sides was used. Throws MemoryFault.
    void read(const ObjectId* ids, const Segments& segments, Found* found) const;
    // Removes objects whose first bytes equal the segments; `different` otherwise.
    void remove_if_equal(const ObjectId* ids, const Segments& segments, Found* found);
    void remove(const ObjectId* ids, size_t count, uint8_t* removed);
    // -1 where there is none.
    void sizes(const ObjectId* ids, size_t count, int64_t* bytes) const;
    std::vector<std::pair<ObjectId, uint64_t>> list() const;

   private:
    using Shared = std::shared_ptr<const Block>;
    Shared find(const ObjectId& id) const;

    mutable std::mutex mutex_;
    std::unordered_map<ObjectId, Shared, ObjectIdHash> objects_;
};

}  // namespace cachesvc
