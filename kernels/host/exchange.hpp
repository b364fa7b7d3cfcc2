// Exchange: all wires of one door, watched by one descriptor and served in one call.
//
// DESIGN. A wire's messages are obeyed in order. As long as those in front are questions that its shortcut answers, they
// are answered here; the first other one makes the wire the caller's, who takes messages until there is none. A wire is
// read only while the caller listens to it, has no message of it in hand, and its client reads what it is sent.
//
// Threads: one at a time.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shortcut.hpp"
#include "wire.hpp"

namespace cachesvc {

class Exchange {
public:
    // Questions about more than `max_keys` are the caller's. Throws std::system_error.
    explicit Exchange(size_t max_keys);
    ~Exchange();
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    int fd() const { return epoll_; }  // readable while `serve` has something to do

    // Watches nothing any more. Idempotent.
    void close();

    // Watches a wire; `shortcut` may be null. Returns its number, which is never given again.
    int64_t add(std::shared_ptr<Wire> wire, std::shared_ptr<Shortcut> shortcut);
    // Before its socket is closed.
    void remove(int64_t number);
    void listen(int64_t number, bool wanted);

    // Receives, answers and sends, wherever there is something to. Returns the wires of which the caller must know: with
    // a message in hand, over, full or no longer full, or with nothing unsent any more. To each, `settle` follows.
    std::vector<int64_t> serve();
    // Takes the next message that is the caller's, after answering those in front of it; none: the wire is ours again.
    std::optional<std::vector<uint8_t>> next(int64_t number);
    // Watches for what is wanted now: after anything that the caller did with the wire.
    void settle(int64_t number);

    // What the answers since the last call have told, by `Question`.
    std::array<Told, num_questions> take_told() { return std::exchange(told_, {}); }

private:
    struct Line {
        std::shared_ptr<Wire> wire;
        std::shared_ptr<Shortcut> shortcut;
        bool is_listened_to = true;
        bool is_callers = false;  // a message is in hand, or the stream is broken
        uint32_t watched = 0;     // as epoll knows it
    };

    static bool is_read(const Line& line);
    bool has_news(Line& line, uint32_t events);
    void answer(Line& line);
    void watch(int64_t number, Line& line);

    int epoll_;
    const size_t max_keys_;
    std::unordered_map<int64_t, Line> lines_;
    int64_t last_number_ = 0;
    std::array<Told, num_questions> told_{};
};

}  // namespace cachesvc
