#include "channel_messages.hpp"

#include <bit>
#include <cstring>

namespace cachesvc {
namespace {

static_assert(std::endian::native == std::endian::little, "lengths are copied as they are");

// Tags: field number and wire type. Of ToNode and ToClient, then of their bodies; of ToStore and FromStore, and theirs.
constexpr uint8_t call_tag = 1 << 3, lookup_tag = 10 << 3 | 2, answer_tag = 11 << 3 | 2;
constexpr uint8_t op_tag = 1 << 3, keys_tag = 2 << 3 | 2, num_pages_tag = 1 << 3;
constexpr uint8_t contains_tag = 14 << 3 | 2, held_tag = 13 << 3 | 2;
constexpr uint8_t asked_keys_tag = 1 << 3 | 2, outcomes_tag = 1 << 3 | 2;
constexpr size_t key_bytes = 32;
constexpr int most_varint_bytes = 9;  // 63 bits

class Reader {
public:
    explicit Reader(std::span<const uint8_t> data) : data_(data) {}

    bool tag(uint8_t wanted) {
        if (data_.empty() || data_[0] != wanted) return false;
        data_ = data_.subspan(1);
        return true;
    }
    bool varint(uint64_t& value) {
        value = 0;
        for (int i = 0; i < most_varint_bytes && static_cast<size_t>(i) < data_.size(); ++i) {
            value |= static_cast<uint64_t>(data_[i] & 0x7f) << 7 * i;
            if (data_[i] < 0x80) {
                data_ = data_.subspan(i + 1);
                return true;
            }
        }
        return false;
    }
    // The length of what is left, all of it.
    bool length_of_rest() {
        uint64_t length = 0;
        return varint(length) && length == data_.size();
    }
    std::span<const uint8_t> rest() const { return data_; }

private:
    std::span<const uint8_t> data_;
};

template <class Bytes>
void put_varint(Bytes&& put, uint64_t value) {
    for (; value >= 0x80; value >>= 7) put(static_cast<uint8_t>(value | 0x80));
    put(static_cast<uint8_t>(value));
}

size_t varint_bytes(uint64_t value) {
    size_t count = 1;
    while (value >>= 7) ++count;
    return count;
}

// What every message begins with.
bool read_call(Reader& reader, uint64_t& call) { return reader.tag(call_tag) && reader.varint(call) && call; }

bool read_keys(Reader& reader, uint8_t tag, std::span<const uint8_t>& keys) {
    if (!reader.tag(tag) || !reader.length_of_rest()) return false;
    keys = reader.rest();
    return !keys.empty() && keys.size() % key_bytes == 0;
}

// The length of a frame that begins at `begin` of the stream and is whole now.
void set_length(std::vector<uint8_t>& stream, size_t begin) {
    const auto length = static_cast<uint32_t>(stream.size() - begin - frame_length_bytes);
    std::memcpy(stream.data() + begin, &length, sizeof length);
}

// The same for one of which `bytes_to_come` are missing.
void set_length(FrameHead& head, size_t bytes_to_come) {
    const auto length = static_cast<uint32_t>(head.size - frame_length_bytes + bytes_to_come);
    std::memcpy(head.bytes.data(), &length, sizeof length);
}

}  // namespace

bool parse_lookup(std::span<const uint8_t> message, LookupAsked& out) {
    Reader reader(message);
    if (!read_call(reader, out.call) || !reader.tag(lookup_tag) || !reader.length_of_rest()) return false;
    return reader.tag(op_tag) && reader.varint(out.op) && out.op && read_keys(reader, keys_tag, out.keys);
}

bool parse_answer(std::span<const uint8_t> message, LookupAnswer& out) {
    Reader reader(message);
    if (!read_call(reader, out.call) || !reader.tag(answer_tag) || !reader.length_of_rest()) return false;
    uint64_t num_pages = 0;
    if (!reader.rest().empty() && !(reader.tag(num_pages_tag) && reader.varint(num_pages))) return false;
    out.num_pages = static_cast<uint32_t>(num_pages);
    return reader.rest().empty() && num_pages == out.num_pages;
}

bool parse_contains(std::span<const uint8_t> message, ContainsAsked& out) {
    Reader reader(message);
    if (!read_call(reader, out.call) || !reader.tag(contains_tag) || !reader.length_of_rest()) return false;
    return read_keys(reader, asked_keys_tag, out.keys);
}

bool parse_held(std::span<const uint8_t> message, Held& out) {
    Reader reader(message);
    if (!read_call(reader, out.call) || !reader.tag(held_tag) || !reader.length_of_rest()) return false;
    if (!reader.tag(outcomes_tag) || !reader.length_of_rest()) return false;
    out.outcomes = reader.rest();
    return true;
}

void write_answer(std::vector<uint8_t>& stream, const LookupAnswer& answer) {
    const size_t begin = stream.size();
    const auto put = [&stream](uint8_t byte) { stream.push_back(byte); };
    stream.resize(begin + frame_length_bytes);
    put(call_tag);
    put_varint(put, answer.call);
    put(answer_tag);
    put_varint(put, answer.num_pages ? 1 + varint_bytes(answer.num_pages) : 0);
    if (answer.num_pages) {
        put(num_pages_tag);
        put_varint(put, answer.num_pages);
    }
    set_length(stream, begin);
}

void write_held(std::vector<uint8_t>& stream, const Held& held) {
    const size_t begin = stream.size(), num_pages = held.outcomes.size();
    const auto put = [&stream](uint8_t byte) { stream.push_back(byte); };
    stream.resize(begin + frame_length_bytes);
    put(call_tag);
    put_varint(put, held.call);
    put(held_tag);
    put_varint(put, 1 + varint_bytes(num_pages) + num_pages);
    put(outcomes_tag);
    put_varint(put, num_pages);
    stream.insert(stream.end(), held.outcomes.begin(), held.outcomes.end());
    set_length(stream, begin);
}

FrameHead write_lookup_head(uint64_t call, uint64_t op, size_t keys_bytes) {
    FrameHead head;
    const auto put = [&head](uint8_t byte) { head.bytes[head.size++] = byte; };
    head.size = frame_length_bytes;
    put(call_tag);
    put_varint(put, call);
    put(lookup_tag);
    put_varint(put, 1 + varint_bytes(op) + 1 + varint_bytes(keys_bytes) + keys_bytes);
    put(op_tag);
    put_varint(put, op);
    put(keys_tag);
    put_varint(put, keys_bytes);
    set_length(head, keys_bytes);
    return head;
}

FrameHead write_contains_head(uint64_t call, size_t keys_bytes) {
    FrameHead head;
    const auto put = [&head](uint8_t byte) { head.bytes[head.size++] = byte; };
    head.size = frame_length_bytes;
    put(call_tag);
    put_varint(put, call);
    put(contains_tag);
    put_varint(put, 1 + varint_bytes(keys_bytes) + keys_bytes);
    put(asked_keys_tag);
    put_varint(put, keys_bytes);
    set_length(head, keys_bytes);
    return head;
}

}  // namespace cachesvc
