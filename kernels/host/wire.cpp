#include "wire.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>

namespace cachesvc {
namespace {

using Clock = std::chrono::steady_clock;

// Memory of a long message is not kept for the short ones after it.
void clear(std::vector<uint8_t>& buffer) {
    if (buffer.capacity() > Wire::helping_bytes) {
        std::vector<uint8_t>().swap(buffer);
    } else {
        buffer.clear();
    }
}

}  // namespace

bool Wire::receive() { return take_in(MSG_DONTWAIT); }

bool Wire::take_in(int flags) {
    uint8_t helping[helping_bytes];
    if (is_over_) return false;
    const ssize_t got = recv(fd_, helping, sizeof helping, flags);
    if (got > 0) {
        in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(in_begin_));
        in_begin_ = 0;
        in_.insert(in_.end(), helping, helping + got);
        return true;
    }
    if (got == 0) is_over_ = true;
    if (got < 0) failed();
    return false;
}

std::optional<std::span<const uint8_t>> Wire::front() const {
    const size_t available = in_.size() - in_begin_;
    if (available < frame_length_bytes) return {};
    const size_t length = length_in_front();
    if (length > max_message_bytes_ || available - frame_length_bytes < length) return {};
    return std::span(in_).subspan(in_begin_ + frame_length_bytes, length);
}

void Wire::pop() {
    in_begin_ += frame_length_bytes + length_in_front();
    if (in_begin_ == in_.size()) {
        clear(in_);
        in_begin_ = 0;
    }
}

size_t Wire::too_long() const {
    if (in_.size() - in_begin_ < frame_length_bytes) return 0;
    const size_t length = length_in_front();
    return length > max_message_bytes_ ? length : 0;
}

void Wire::post(std::span<const uint8_t> frame) {
    const bool was_empty = num_unsent() == 0;
    out_.insert(out_.end(), frame.begin(), frame.end());
    if (was_empty) flush();
    is_full_ = is_full_ || num_unsent() > high_water_bytes_;
}

void Wire::flush() {
    while (!error_ && num_unsent() > 0) {
        const ssize_t sent = send(fd_, out_.data() + out_begin_, num_unsent(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            failed();
            break;
        }
        out_begin_ += static_cast<size_t>(sent);
    }
    if (num_unsent() == 0) {
        clear(out_);
        out_begin_ = 0;
    } else if (out_begin_ > high_water_bytes_) {
        out_.erase(out_.begin(), out_.begin() + static_cast<ptrdiff_t>(out_begin_));
        out_begin_ = 0;
    }
    is_full_ = num_unsent() > (is_full_ ? high_water_bytes_ / 4 : high_water_bytes_);
}

int64_t Wire::look_up(uint64_t call, uint64_t op, std::span<const uint8_t> keys, double timeout_s) {
    return ask(write_lookup_head(call, op, keys.size()), keys, timeout_s, [&](std::span<const uint8_t> message) {
        LookupAnswer answer;
        if (!parse_answer(message, answer) || answer.call != call) return unanswered;
        return int64_t{answer.num_pages};
    });
}

int64_t Wire::contains(uint64_t call, std::span<const uint8_t> keys, std::span<uint8_t> outcomes, double timeout_s) {
    return ask(write_contains_head(call, keys.size()), keys, timeout_s, [&](std::span<const uint8_t> message) {
        Held held;
        if (!parse_held(message, held) || held.call != call || held.outcomes.size() != outcomes.size()) {
            return unanswered;
        }
        std::ranges::transform(held.outcomes, outcomes.begin(),
                               [](uint8_t outcome) { return outcome <= last_outcome ? outcome : outcome_failed; });
        return static_cast<int64_t>(outcomes.size());
    });
}

// `answered` says what a message answers; `unanswered`: it is another one.
template <class Answered>
int64_t Wire::ask(const FrameHead& head, std::span<const uint8_t> keys, double timeout_s, const Answered& answered) {
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 86400.0)));
    flush();
    if (num_unsent() + head.size + keys.size() > high_water_bytes_) return unasked;
    out_.reserve(out_.size() + head.size + keys.size());
    out_.insert(out_.end(), head.bytes.begin(), head.bytes.begin() + static_cast<ptrdiff_t>(head.size));
    out_.insert(out_.end(), keys.begin(), keys.end());
    flush();
    // The first helping is most often the answer, and costs one system call where the socket waits by itself.
    if (!front() && !is_over_ && num_unsent() == 0 && wait_in_socket(timeout_s)) {
        if (!take_in(0) && !is_over_ && errno == EINTR) return unanswered;
    }
    while (true) {
        if (const auto message = front()) {
            const int64_t answer = answered(*message);
            if (answer != unanswered) pop();
            return answer;
        }
        const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now()).count();
        if (is_over_ || too_long() || left <= 0 || !wait(left)) return unanswered;
    }
}

// False: it will not.
bool Wire::wait_in_socket(double timeout_s) {
    if (timeout_s == socket_timeout_s_) return true;
    if (timeout_s < 1e-6 || timeout_s > 1e6) return false;  // 0 would be for ever
    timeval timeout;
    timeout.tv_sec = static_cast<time_t>(timeout_s);
    timeout.tv_usec = static_cast<suseconds_t>((timeout_s - std::floor(timeout_s)) * 1e6);
    if (timeout.tv_sec == 0 && timeout.tv_usec == 0) timeout.tv_usec = 1;
    if (setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) != 0) return false;
    socket_timeout_s_ = timeout_s;
    return true;
}

// False: the time is over, or a signal came, which is for the caller to see.
bool Wire::wait(int64_t timeout_us) {
    pollfd watched{fd_, static_cast<short>(POLLIN | (num_unsent() ? POLLOUT : 0)), 0};
    if (poll(&watched, 1, static_cast<int>((timeout_us + 999) / 1000)) <= 0) return false;
    if (watched.revents & POLLOUT) flush();
    if (watched.revents & ~POLLOUT) receive();
    return true;
}

void Wire::failed() {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return;
    is_over_ = true;
    error_ = errno;
}

uint32_t Wire::length_in_front() const {
    uint32_t length;
    std::memcpy(&length, in_.data() + in_begin_, sizeof length);
    return length;
}

}  // namespace cachesvc
