#include "exchange.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

namespace cachesvc {
namespace {

constexpr int most_rounds = 8;  // of one call: the caller has other things to do
constexpr int wires_per_round = 64;

int new_epoll() {
    const int fd = epoll_create1(EPOLL_CLOEXEC);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
    return fd;
}

}  // namespace

Exchange::Exchange(size_t max_keys) : epoll_(new_epoll()), max_keys_(max_keys) {}

Exchange::~Exchange() { close(); }

void Exchange::close() {
    if (epoll_ >= 0) ::close(epoll_);
    epoll_ = -1;
}

int64_t Exchange::add(std::shared_ptr<Wire> wire, std::shared_ptr<Shortcut> shortcut) {
    const int64_t number = ++last_number_;
    Line& line = lines_[number];
    line.wire = std::move(wire);
    line.shortcut = std::move(shortcut);
    try {
        watch(number, line);
    } catch (...) {
        lines_.erase(number);
        throw;
    }
    return number;
}

void Exchange::remove(int64_t number) {
    const auto found = lines_.find(number);
    if (found == lines_.end()) return;
    if (found->second.watched) epoll_ctl(epoll_, EPOLL_CTL_DEL, found->second.wire->fd(), nullptr);
    lines_.erase(found);
}

void Exchange::listen(int64_t number, bool wanted) { lines_.at(number).is_listened_to = wanted; }

std::vector<int64_t> Exchange::serve() {
    std::vector<int64_t> news;
    std::array<epoll_event, wires_per_round> events;
    for (int round = 0; round < most_rounds && news.empty(); ++round) {
        const int count = epoll_wait(epoll_, events.data(), wires_per_round, 0);
        if (count <= 0) break;
        for (int i = 0; i < count; ++i) {
            const auto number = static_cast<int64_t>(events[i].data.u64);
            Line& line = lines_.at(number);
            if (has_news(line, events[i].events)) {
                news.push_back(number);
            } else {
                watch(number, line);
            }
        }
    }
    return news;
}

bool Exchange::has_news(Line& line, uint32_t events) {
    Wire& wire = *line.wire;
    const bool was_full = wire.is_full(), had_unsent = wire.num_unsent() > 0;
    // Where the other side has shut down and left bytes unread, there is never room again: only the send tells.
    if (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) wire.flush();
    if (events & ~EPOLLOUT && is_read(line)) {
        wire.receive();
        answer(line);
    }
    return line.is_callers || wire.is_over() || wire.is_full() != was_full || (had_unsent && wire.num_unsent() == 0);
}

void Exchange::answer(Line& line) {
    Wire& wire = *line.wire;
    line.is_callers = false;
    if (wire.is_full()) return;  // until `serve` finds room, and says so: room found here would be nobody's news
    while (true) {
        const auto message = wire.front();
        if (!message) {
            line.is_callers = wire.too_long() > 0;
            break;
        }
        const Told told = line.shortcut ? line.shortcut->answer(*message, max_keys_, wire.unsent()) : Told{};
        line.is_callers = !told;
        if (line.is_callers) break;
        told_[static_cast<size_t>(line.shortcut->question)] += told;
        wire.pop();
    }
    wire.flush();
}

std::optional<std::vector<uint8_t>> Exchange::next(int64_t number) {
    Line& line = lines_.at(number);
    answer(line);
    const auto message = line.is_callers ? line.wire->front() : std::nullopt;
    if (!message) return {};
    std::vector<uint8_t> taken(message->begin(), message->end());
    line.wire->pop();
    return taken;
}

bool Exchange::is_read(const Line& line) {
    return line.is_listened_to && !line.is_callers && !line.wire->is_full() && !line.wire->is_over();
}

void Exchange::settle(int64_t number) { watch(number, lines_.at(number)); }

void Exchange::watch(int64_t number, Line& line) {
    const Wire& wire = *line.wire;
    const bool writes = wire.num_unsent() > 0 && !wire.error();
    const uint32_t wanted = (is_read(line) ? uint32_t{EPOLLIN} : 0) | (writes ? uint32_t{EPOLLOUT} : 0);
    if (wanted == line.watched) return;
    // A socket of which nothing is wanted is not watched at all: its end would be told again and again.
    const int change = !wanted ? EPOLL_CTL_DEL : line.watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    epoll_event event{};
    event.events = wanted;
    event.data.u64 = static_cast<uint64_t>(number);
    if (epoll_ctl(epoll_, change, wire.fd(), &event) != 0) {
        throw std::system_error(errno, std::generic_category(), "epoll_ctl");
    }
    line.watched = wanted;
}

}  // namespace cachesvc
