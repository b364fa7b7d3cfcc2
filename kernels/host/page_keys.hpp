// Page keys: 32 bytes that name the tokens up to and including one page, under an engine namespace and a scope.
//
//   k0 = SHA256("cs1/root" ‖ engine_ns(32) ‖ scope(32) ‖ tokens0)        tokens are u32, little-endian
//   ki = SHA256("cs1/next" ‖ k(i-1) ‖ tokensi)
//   wrapped engine hash = SHA256("cs1/wrap" ‖ u32le(len(scheme)) ‖ scheme ‖ engine_ns ‖ scope ‖ hash)
//
// Every function here is pure: any of them may run in any thread at any time.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "sha256.hpp"

namespace cachesvc {

constexpr size_t key_bytes = 32;

// The key of the first page of a scope; `n` is the number of tokens of the page.
void root_key(const uint8_t ns[32], const uint8_t scope[32], const uint32_t* tokens, size_t n, uint8_t out[32]);
// The key of the page that follows the page named `prev`. `out` may be `prev`.
void next_key(const uint8_t prev[32], const uint32_t* tokens, size_t n, uint8_t out[32]);

// Keys of `num_pages` consecutive pages, [num_pages * 32] bytes. `prev` null: the first page is a root.
void chain_keys(const uint8_t ns[32], const uint8_t scope[32], const uint8_t* prev, const uint32_t* tokens,
                size_t page_size, size_t num_pages, uint8_t* out);

// Keys of `num_hashes` engine hashes of `hash_bytes` bytes each. Throws std::invalid_argument for a scheme that is not
// collision resistant (see accepted_schemes): a key decides whose KV a request reads.
void wrap_hashes(std::string_view scheme, const uint8_t ns[32], const uint8_t scope[32], const uint8_t* hashes,
                 size_t hash_bytes, size_t num_hashes, uint8_t* out);
// The schemes wrap_hashes takes, as a readable list.
std::string_view accepted_schemes();

// The 32 bytes of a hash as engines write it. False: these are not hexadecimal digits, and `out` is undefined.
constexpr size_t hex_digits = 2 * key_bytes;
bool read_hex(const char digits[hex_digits], uint8_t out[key_bytes]);

// The same for many batches: what every message begins with is worked through once.
class HashWrapper {
  public:
    // Throws std::invalid_argument, as wrap_hashes does.
    HashWrapper(std::string_view scheme, const uint8_t ns[32], const uint8_t scope[32], size_t hash_bytes);

    // Keys of `num_hashes` hashes, [num_hashes * 32] bytes.
    void wrap(const uint8_t* hashes, size_t num_hashes, uint8_t* out) const;

  private:
    Sha256 beginning_;
    size_t hash_bytes_;
};

// How a tree names its pages: chained over their tokens; or *wrapped*, where the tokens of a page are the words of the hash
// that the engine has for it, and an engine's own chain already stands for everything before the page.
class KeyScheme {
  public:
    // `wrapped` names the engine's scheme; empty: chained. Throws std::invalid_argument for a scheme that wrap_hashes does
    // not take, or whose hash has not the bytes of a page's tokens.
    KeyScheme(const uint8_t ns[32], size_t page_size, std::string_view wrapped);

    // Keys of `num_pages` consecutive pages, [num_pages * 32] bytes, the first of them after the page named `prev` (null: at
    // the root). `scope` may be null unless needs_scope(prev).
    void name(const uint8_t* scope, const uint8_t* prev, const uint32_t* tokens, size_t num_pages, uint8_t* out) const;
    bool needs_scope(const uint8_t* prev) const { return prev == nullptr || !wrapped_.empty(); }

  private:
    std::array<uint8_t, key_bytes> namespace_;
    size_t page_size_;
    std::string wrapped_;
};

}  // namespace cachesvc
