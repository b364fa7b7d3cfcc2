// Pages in a region that the tree does not know yet: key -> frame, given away oldest first, then deepest first, so that
// what is left of a prompt is always a prefix of it.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace cachesvc {

class Orphans {
  public:
    using Key = std::array<uint8_t, 32>;

    // False (frame not taken) when the key is known already.
    bool add(const uint8_t* key, int32_t frame, uint32_t depth, uint64_t last_use);
    std::optional<int32_t> adopt(const uint8_t* key);  // by key; it is no orphan afterwards
    std::vector<int32_t> take(size_t n);               // the n that matter least
    std::vector<int32_t> take_all();
    std::vector<int32_t> frames() const;
    size_t size() const { return held_.size(); }

  private:
    struct KeyHash {
        size_t operator()(const Key& key) const {  // keys are digests: any eight bytes are a hash
            size_t hash;
            std::memcpy(&hash, key.data(), sizeof hash);
            return hash;
        }
    };
    struct Held {
        int32_t frame;
        uint64_t serial;  // tells an orphan from an earlier one of the same key
    };
    struct Rank {
        uint64_t last_use;
        uint32_t depth;
        int32_t frame;
        uint64_t serial;
        Key key;
        bool operator<(const Rank& other) const;  // true: other goes first
    };

    bool is_held(const Rank& rank) const;

    std::unordered_map<Key, Held, KeyHash> held_;
    std::vector<Rank> ranks_;  // what goes first is at the back; may name orphans that were adopted since
    bool sorted_ = true;
    uint64_t next_serial_ = 0;
};

}  // namespace cachesvc
