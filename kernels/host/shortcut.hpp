// Shortcut: what of one session's messages needs nobody's thought, and is answered natively.
//
// Threads: `stop` may come from any at any time; the rest is for one.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "channel_messages.hpp"
#include "page_index.hpp"
#include "page_keys.hpp"

namespace cachesvc {

enum class Question : uint8_t { lookup, contains };
constexpr size_t num_questions = 2;

// Pages that an answer speaks of; none: there is no answer.
struct Told {
    uint64_t num_there = 0, num_missing = 0;
    explicit operator bool() const { return num_there + num_missing > 0; }
    Told& operator+=(const Told& other) {
        num_there += other.num_there, num_missing += other.num_missing;
        return *this;
    }
};

class Shortcut {
public:
    explicit Shortcut(Question question) : question(question) {}
    virtual ~Shortcut() = default;
    Shortcut(const Shortcut&) = delete;
    Shortcut& operator=(const Shortcut&) = delete;

    const Question question;  // the one that is answered here

    // A client's numbers, of its ops or its calls, only grow. False: this one does not, and is not taken.
    bool take(uint64_t number) {
        if (number <= last_) return false;
        last_ = number;
        return true;
    }
    uint64_t last() const { return last_; }

    // Adds the answer's frame to `stream` and takes the message's number. What it tells; nothing: nothing is said about
    // the message, and nothing was done.
    Told answer(std::span<const uint8_t> message, size_t max_keys, std::vector<uint8_t>& stream) {
        return is_stopped_ ? Told{} : answer_open(message, max_keys, stream);
    }

    // The session has ended: nothing is answered from now on.
    void stop() { is_stopped_ = true; }

private:
    virtual Told answer_open(std::span<const uint8_t> message, size_t max_keys, std::vector<uint8_t>& stream) = 0;

    uint64_t last_ = 0;
    std::atomic<bool> is_stopped_ = false;
};

// Where the keys of one question are. Kept, so that a question takes no memory.
struct FoundPlaces {
    std::vector<int16_t> slots;
    std::vector<int32_t> frames;
    std::vector<uint64_t> generations;

    void look_up(const PageIndex& index, std::span<const uint8_t> keys, int exclude_slot) {
        const size_t num_keys = keys.size() / key_bytes;
        slots.resize(num_keys), frames.resize(num_keys), generations.resize(num_keys);
        index.lookup(keys.data(), num_keys, exclude_slot, {slots.data(), frames.data(), generations.data()});
    }
};

// The lookups of an engine, where every page is in frames of others. Numbers are those of its ops.
class LookupShortcut final : public Shortcut {
public:
    // `slot`: the session's own, which does not count.
    LookupShortcut(std::shared_ptr<PageIndex> index, int slot)
        : Shortcut(Question::lookup), index_(std::move(index)), slot_(slot) {}

private:
    Told answer_open(std::span<const uint8_t> message, size_t max_keys, std::vector<uint8_t>& stream) override {
        LookupAsked asked;
        if (!parse_lookup(message, asked) || asked.op <= last()) return {};
        const size_t num_pages = asked.keys.size() / key_bytes;
        // The last page first: most chains that are not there in full end early.
        if (num_pages > max_keys || !has_all(asked.keys.last(key_bytes)) || !has_all(asked.keys)) return {};
        take(asked.op);
        write_answer(stream, {asked.call, static_cast<uint32_t>(num_pages)});
        return {.num_there = num_pages};
    }

    bool has_all(std::span<const uint8_t> keys) {
        found_.look_up(*index_, keys, slot_);
        return std::ranges::all_of(found_.slots, [](int16_t slot) { return slot >= 0; });
    }

    const std::shared_ptr<PageIndex> index_;
    const int slot_;
    FoundPlaces found_;
};

}  // namespace cachesvc
