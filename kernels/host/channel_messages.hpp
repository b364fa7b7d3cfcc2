// The messages of the local channel that are sent so often that Python would be most of their price, as frames of the
// stream: an engine's lookup and its answer (proto/cachesvc/v1/channel.proto), and the question of a client of
// node-managed memory which pages are there, and its answer (managed.proto).
//
// Reading accepts the one form in which protobuf writes them, and nothing else: fields in order, each once, numbers below
// 2^63. What is written otherwise, or wrong, is not refused here; it is another message, for the full parser to judge.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cachesvc {

constexpr size_t frame_length_bytes = 4;  // u32 little-endian, in front of each message

struct LookupAsked {
    uint64_t call = 0, op = 0;  // neither is 0
    std::span<const uint8_t> keys;  // n times 32 bytes, n at least 1; part of the message
};

struct LookupAnswer {
    uint64_t call = 0;  // not 0
    uint32_t num_pages = 0;
};  // and no op is pending

// Of `storage_backends.base.Outcome`, as they are sent.
constexpr uint8_t outcome_ok = 0, outcome_miss = 2, outcome_failed = 11, last_outcome = 13;

struct ContainsAsked {
    uint64_t call = 0;  // not 0
    std::span<const uint8_t> keys;  // n times 32 bytes, n at least 1; part of the message
};

struct Held {
    uint64_t call = 0;  // not 0
    std::span<const uint8_t> outcomes;  // of each key; part of the message
};

// False: it is another message.
bool parse_lookup(std::span<const uint8_t> message, LookupAsked& out);
bool parse_answer(std::span<const uint8_t> message, LookupAnswer& out);
bool parse_contains(std::span<const uint8_t> message, ContainsAsked& out);
bool parse_held(std::span<const uint8_t> message, Held& out);

// Appends a whole frame.
void write_answer(std::vector<uint8_t>& stream, const LookupAnswer& answer);
// The same, of at least 1 page.
void write_held(std::vector<uint8_t>& stream, const Held& held);

// A frame's bytes up to its keys, which follow as they are.
struct FrameHead {
    std::array<uint8_t, 64> bytes;
    size_t size = 0;
};
FrameHead write_lookup_head(uint64_t call, uint64_t op, size_t keys_bytes);
FrameHead write_contains_head(uint64_t call, size_t keys_bytes);

}  // namespace cachesvc
