// Wire: one end of a connection of the local channel. Frames in, frames out; only `look_up` and `contains` wait.
//
// DESIGN. The socket is the caller's; it outlives the wire's last call. Each call says itself whether it waits; to wait
// in the socket itself, and not beside it, the socket must be a blocking one. What has arrived is kept until it is
// taken, and is never more than one message and one helping of the stream; what could not be sent waits, as long as the
// caller lets it grow. After an error or the other side's end the wire is over: what had arrived can still be taken, and
// after an end what waits can still be sent.
//
// Threads: one at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "channel_messages.hpp"

namespace cachesvc {

class Wire {
public:
    static constexpr size_t helping_bytes = 64 << 10;  // of one system call

    // `high_water_bytes`: from where on the wire is full, until three quarters of that have gone.
    Wire(int fd, size_t max_message_bytes, size_t high_water_bytes)
        : fd_(fd), max_message_bytes_(max_message_bytes), high_water_bytes_(high_water_bytes) {}

    int fd() const { return fd_; }
    bool is_over() const { return is_over_; }
    int error() const { return error_; }  // why it is over; 0: the other side has closed
    bool is_full() const { return is_full_; }
    size_t num_unsent() const { return out_.size() - out_begin_; }

    // One system call. False: nothing was there, or the wire is over.
    bool receive();
    // The next whole message, where it lies; none: it has not arrived yet.
    std::optional<std::span<const uint8_t>> front() const;
    // Takes the message in front away.
    void pop();
    // Length of the message in front, if it is more than a message may have; else 0. What follows cannot be found.
    size_t too_long() const;

    // Sends, or queues behind what waits.
    void post(std::span<const uint8_t> frame);
    // What waits: frames may be added at its end, `flush` follows.
    std::vector<uint8_t>& unsent() { return out_; }
    // Sends what waits, as far as the socket takes it.
    void flush();

    static constexpr int64_t unanswered = -1, unasked = -2;
    // Asks for keys [n, 32] and waits. Pages, or unanswered: no answer within `timeout_s`, or something else came (it is
    // in front); or unasked: too much waits to be sent.
    int64_t look_up(uint64_t call, uint64_t op, std::span<const uint8_t> keys, double timeout_s);
    // The same question to node-managed memory. `outcomes` [n] are filled where the answer is what is returned: n. What a
    // newer node may say and this version does not know is a failure, which is no page.
    int64_t contains(uint64_t call, std::span<const uint8_t> keys, std::span<uint8_t> outcomes, double timeout_s);

    bool is_in_use = false;  // kept by the callers, who see each other

private:
    template <class Answered>
    int64_t ask(const FrameHead& head, std::span<const uint8_t> keys, double timeout_s, const Answered& answered);
    bool take_in(int flags);
    bool wait_in_socket(double timeout_s);
    bool wait(int64_t timeout_us);
    void failed();
    uint32_t length_in_front() const;

    const int fd_;
    const size_t max_message_bytes_, high_water_bytes_;
    std::vector<uint8_t> in_, out_;
    size_t in_begin_ = 0, out_begin_ = 0;
    bool is_full_ = false, is_over_ = false;
    int error_ = 0;
    double socket_timeout_s_ = -1;  // as the socket knows it
};

}  // namespace cachesvc
