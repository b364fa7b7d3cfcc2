#include "page_keys.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "sha256.hpp"

namespace cachesvc {
namespace {

static_assert(std::endian::native == std::endian::little, "tokens are hashed as they lie in memory: u32 little-endian");

constexpr char root_tag[] = "cs1/root";
constexpr char next_tag[] = "cs1/next";
constexpr char wrap_tag[] = "cs1/wrap";
constexpr size_t tag_bytes = 8;

// Hash schemes of engines whose output an attacker cannot steer: each is a full-length cryptographic digest.
struct Scheme {
    std::string_view name;
    size_t hash_bytes;
};
constexpr std::array<Scheme, 3> schemes{{{"sha256", 32}, {"sha256_cbor", 32}, {"blake3", 32}}};
constexpr std::string_view scheme_names = "sha256, sha256_cbor, blake3";

const Scheme& find_scheme(std::string_view name) {
    const auto* found = std::find_if(schemes.begin(), schemes.end(), [&](const Scheme& s) { return s.name == name; });
    if (found != schemes.end()) return *found;
    throw std::invalid_argument("hash scheme '" + std::string(name) +
                                "' is not known to be collision resistant; accepted: " + std::string(scheme_names));
}

void require_hash_bytes(std::string_view scheme, size_t hash_bytes) {
    const Scheme& known = find_scheme(scheme);
    if (hash_bytes != known.hash_bytes) {
        throw std::invalid_argument("a hash of scheme '" + std::string(scheme) + "' has " +
                                    std::to_string(known.hash_bytes) + " bytes, got " + std::to_string(hash_bytes));
    }
}

}  // namespace

void root_key(const uint8_t ns[32], const uint8_t scope[32], const uint32_t* tokens, size_t n, uint8_t out[32]) {
    Sha256 hash;
    hash.update(root_tag, tag_bytes);
    hash.update(ns, key_bytes);
    hash.update(scope, key_bytes);
    hash.update(tokens, n * sizeof(uint32_t));
    hash.finish(out);
}

void next_key(const uint8_t prev[32], const uint32_t* tokens, size_t n, uint8_t out[32]) {
    Sha256 hash;
    hash.update(next_tag, tag_bytes);
    hash.update(prev, key_bytes);
    hash.update(tokens, n * sizeof(uint32_t));
    hash.finish(out);
}

void chain_keys(const uint8_t ns[32], const uint8_t scope[32], const uint8_t* prev, const uint32_t* tokens,
                size_t page_size, size_t num_pages, uint8_t* out) {
    for (size_t page = 0; page < num_pages; ++page, tokens += page_size, out += key_bytes) {
        if (prev == nullptr) {
            root_key(ns, scope, tokens, page_size, out);
        } else {
            next_key(prev, tokens, page_size, out);
        }
        prev = out;
    }
}

HashWrapper::HashWrapper(std::string_view scheme, const uint8_t ns[32], const uint8_t scope[32], size_t hash_bytes)
    : hash_bytes_(hash_bytes) {
    require_hash_bytes(scheme, hash_bytes);
    const auto scheme_bytes = static_cast<uint32_t>(scheme.size());
    beginning_.update(wrap_tag, tag_bytes);
    beginning_.update(&scheme_bytes, sizeof(scheme_bytes));
    beginning_.update(scheme.data(), scheme.size());
    beginning_.update(ns, key_bytes);
    beginning_.update(scope, key_bytes);
}

void HashWrapper::wrap(const uint8_t* hashes, size_t num_hashes, uint8_t* out) const {
    beginning_.finish_each(hashes, hash_bytes_, num_hashes, out);
}

void wrap_hashes(std::string_view scheme, const uint8_t ns[32], const uint8_t scope[32], const uint8_t* hashes,
                 size_t hash_bytes, size_t num_hashes, uint8_t* out) {
    HashWrapper(scheme, ns, scope, hash_bytes).wrap(hashes, num_hashes, out);
}

std::string_view accepted_schemes() { return scheme_names; }

bool read_hex(const char digits[hex_digits], uint8_t out[key_bytes]) {
    uint8_t nibbles[hex_digits];
    uint8_t is_bad = 0;
    for (size_t i = 0; i < hex_digits; ++i) {  // without a branch, so that it is done many at a time
        const auto digit = static_cast<uint8_t>(digits[i] - '0');
        const auto letter = static_cast<uint8_t>((digits[i] | 0x20) - 'a');
        const bool is_digit = digit < 10;
        is_bad |= !is_digit & (letter >= 6);
        nibbles[i] = is_digit ? digit : letter + 10;
    }
    for (size_t i = 0; i < key_bytes; ++i) out[i] = static_cast<uint8_t>(nibbles[2 * i] << 4 | nibbles[2 * i + 1]);
    return !is_bad;
}

KeyScheme::KeyScheme(const uint8_t ns[32], size_t page_size, std::string_view wrapped)
    : page_size_(page_size), wrapped_(wrapped) {
    std::copy_n(ns, key_bytes, namespace_.begin());
    if (!wrapped_.empty()) require_hash_bytes(wrapped_, page_size_ * sizeof(uint32_t));
}

void KeyScheme::name(const uint8_t* scope, const uint8_t* prev, const uint32_t* tokens, size_t num_pages,
                     uint8_t* out) const {
    if (wrapped_.empty()) {
        chain_keys(namespace_.data(), scope, prev, tokens, page_size_, num_pages, out);
    } else {
        wrap_hashes(wrapped_, namespace_.data(), scope, reinterpret_cast<const uint8_t*>(tokens),
                    page_size_ * sizeof(uint32_t), num_pages, out);
    }
}

}  // namespace cachesvc
