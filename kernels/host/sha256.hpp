// SHA-256 (FIPS 180-4), one message at a time, with the SHA instructions of x86-64 where the CPU has them.
//
// Ours and not a system library's: page keys are the only user, the wheel must not depend on an OpenSSL it finds at run
// time, and a 300-byte message costs more in a general-purpose library's set-up than in its rounds.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cachesvc {

class Sha256 {
public:
    static constexpr size_t digest_bytes = 32;

    Sha256();
    // Adds `bytes` bytes of message.
    void update(const void* data, size_t bytes);
    // Writes the digest. The object must not be used after it.
    void finish(uint8_t out[digest_bytes]);
    // Digests of `num_ends` messages that begin with what was added so far and end with ends [num_ends, end_bytes], to
    // out [num_ends, 32]: two at a time where what is left of them is one block, which is what a CPU can do at once.
    void finish_each(const uint8_t* ends, size_t end_bytes, size_t num_ends, uint8_t* out) const;

private:
    static constexpr size_t block_bytes = 64;

    uint32_t state_[8];
    uint64_t total_bytes_ = 0;
    size_t pending_bytes_ = 0;
    uint8_t pending_[block_bytes];
};

enum class Sha256Path { automatic, portable, sha_ni };

// True where this CPU can run `path`.
bool sha256_path_supported(Sha256Path path);
// The path in use: never `automatic`.
Sha256Path sha256_path();
// For tests only: makes every later hash of the process take `path`. Throws std::invalid_argument where the CPU cannot.
void select_sha256_path(Sha256Path path);

}  // namespace cachesvc
