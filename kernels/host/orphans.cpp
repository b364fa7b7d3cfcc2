#include "orphans.hpp"

#include <algorithm>
#include <tuple>

namespace cachesvc {
namespace {

Orphans::Key named(const uint8_t* key) {
    Orphans::Key name;
    std::copy_n(key, name.size(), name.begin());
    return name;
}

}  // namespace

bool Orphans::Rank::operator<(const Rank& other) const {
    return std::tuple(other.last_use, depth, other.frame) < std::tuple(last_use, other.depth, frame);
}

bool Orphans::is_held(const Rank& rank) const {
    const auto found = held_.find(rank.key);
    return found != held_.end() && found->second.serial == rank.serial;
}

bool Orphans::add(const uint8_t* key, int32_t frame, uint32_t depth, uint64_t last_use) {
    const Key name = named(key);
    if (!held_.emplace(name, Held{frame, next_serial_}).second) return false;
    if (ranks_.size() > 2 * held_.size() + 1024)
        std::erase_if(ranks_, [this](const Rank& rank) { return !is_held(rank); });
    ranks_.push_back({last_use, depth, frame, next_serial_++, name});
    sorted_ = false;
    return true;
}

std::optional<int32_t> Orphans::adopt(const uint8_t* key) {
    const auto found = held_.find(named(key));
    if (found == held_.end()) return std::nullopt;
    const int32_t frame = found->second.frame;
    held_.erase(found);
    return frame;
}

std::vector<int32_t> Orphans::take(size_t n) {
    if (!sorted_) std::sort(ranks_.begin(), ranks_.end());
    sorted_ = true;
    std::vector<int32_t> taken;
    while (taken.size() < n && !ranks_.empty()) {
        const Rank rank = ranks_.back();
        ranks_.pop_back();
        if (!is_held(rank)) continue;  // adopted since
        taken.push_back(rank.frame);
        held_.erase(rank.key);
    }
    return taken;
}

std::vector<int32_t> Orphans::frames() const {
    std::vector<int32_t> all;
    all.reserve(held_.size());
    for (const auto& [key, held] : held_) all.push_back(held.frame);
    return all;
}

std::vector<int32_t> Orphans::take_all() {
    std::vector<int32_t> all = frames();
    held_.clear();
    ranks_.clear();
    return all;
}

}  // namespace cachesvc
