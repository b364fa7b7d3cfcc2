// Eviction from both tiers: leaf first, least recently used first, never anything locked.
#include "eviction.hpp"

#include <algorithm>
#include <string>
#include <unordered_set>

#include "radix_tree.hpp"
#include "tree_errors.hpp"

namespace cachesvc {
namespace {

// A victim much longer than the shortfall is split, so that one missing page does not cost a whole session. At least one
// evict_share-th of it leaves, so that many small evictions leave few fragments.
constexpr size_t evict_share = 4;

void append(std::vector<int32_t>& all, const std::vector<int32_t>& more) {
    all.insert(all.end(), more.begin(), more.end());
}

}  // namespace

void EvictionQueue::offer(Node* node) {
    if (node->queued & bit_) return;
    node->queued |= bit_;
    heap_.push_back({node->last_use, node, node->generation, node->end()});
    std::push_heap(heap_.begin(), heap_.end());
}

EvictionQueue::Entry EvictionQueue::pop_top() {
    std::pop_heap(heap_.begin(), heap_.end());
    const Entry entry = heap_.back();
    heap_.pop_back();
    return entry;
}

void EvictionQueue::forget_dead(size_t num_nodes) {
    if (heap_.size() <= bound(num_nodes)) return;
    std::erase_if(heap_, [](const Entry& entry) { return entry.node->generation != entry.generation; });
    std::make_heap(heap_.begin(), heap_.end());
}

bool EvictionQueue::is_sound(size_t num_nodes) const {
    std::unordered_set<const Node*> seen;
    for (const Entry& entry : heap_) {
        if (entry.node->generation != entry.generation) continue;
        if (!(entry.node->queued & bit_) || !seen.insert(entry.node).second) return false;
    }
    return heap_.size() <= bound(num_nodes);
}

DeviceEvictionResult RadixTree::evict_device(size_t num_pages) {
    DeviceEvictionResult result;
    std::vector<Node*> leaving;
    size_t found = 0;
    result.pages.reserve(std::min(num_pages, evictable_[device_tier]));
    while (found < num_pages) {
        Node* victim = device_queue_.pop([this](const Node& node) { return may_leave_device(node); });
        if (!victim) break;
        cut_victim(victim, num_pages - found);
        found += victim->pages;
        // Below it something waits for its copy, or it has to be copied itself: it leaves in a later round.
        if (victim->leaving_below || (!victim->on(host_tier) && worth_copying(*victim))) {
            set_leaving(victim, true);
            leaving.push_back(victim);
            continue;
        }
        if (!victim->on(host_tier)) result.dropped_pages += victim->pages;
        append(result.pages, take(victim, device_tier));
        settle(victim);
    }
    for (Node* node : leaving) set_leaving(node, false);
    std::erase_if(leaving, [](const Node* node) { return node->on(host_tier); });
    for (const Node* node : leaving) result.victims.push_back(node->id());
    result.to_copy = with_ancestors({leaving.rbegin(), leaving.rend()});
    return result;
}

// While a victim is leaving, its parent counts as a leaf: a whole path can be chosen in one round.
void RadixTree::set_leaving(Node* node, bool leaving) {
    Node* parent = node->parent;
    node->leaving = leaving;
    parent->leaving_below = leaving;
    parent->resident_children[device_tier] += leaving ? -1 : 1;
    offer(leaving ? parent : node);
}

void RadixTree::cut_victim(Node* victim, size_t shortfall) {
    const size_t pages = std::max<size_t>(shortfall, (victim->pages + evict_share - 1) / evict_share);
    if (pages < victim->pages) split(victim, static_cast<uint32_t>(victim->pages - pages));
}

bool RadixTree::worth_copying(const Node& node) const {
    return node.hits >= options_.write_threshold || node.reclaimed || node.resident_children[host_tier];
}

// A copy needs its parent's on host (not in write_back mode): nodes above that lack one join, parents first.
std::vector<NodeId> RadixTree::with_ancestors(const std::vector<Node*>& victims) {
    std::vector<NodeId> chosen;
    mark_ += 1;
    for (Node* victim : victims) {
        const size_t from = chosen.size();
        for (Node* node = victim; !node->is_root() && !node->on(host_tier) && node->mark != mark_; node = node->parent) {
            node->mark = mark_;
            if (!node->write_op) chosen.push_back(node->id());
            if (options_.write_back) break;
        }
        std::reverse(chosen.begin() + static_cast<ptrdiff_t>(from), chosen.end());
    }
    return chosen;
}

PagesAndFrames RadixTree::drop_device(NodeId id) {
    Node* node = nodes_.get(id);
    if (!node->on(device_tier) || node->resident_children[device_tier])
        throw TreeError("node " + std::to_string(id) + " is not a device-resident leaf");
    const bool takes_children = !node->on(host_tier) && node->resident_children[host_tier];
    if (node->locks[device_tier] || (takes_children && node->locks[host_tier]))
        throw LockError("node " + std::to_string(id) + " is locked");
    PagesAndFrames result{take(node, device_tier), {}};
    if (!node->on(host_tier)) result.frames = drop_host(node);
    return result;
}

// Takes the host copies of the subtree that no lock holds; nodes left with nothing vanish.
std::vector<int32_t> RadixTree::drop_host(Node* top) {
    std::vector<int32_t> frames;
    std::vector<Node*> nodes;
    subtree(top, nodes);
    for (Node* node : nodes)
        if (node->on(host_tier) && !node->locks[host_tier]) append(frames, take(node, host_tier));
    for (auto at = nodes.rbegin(); at != nodes.rend(); ++at)
        settle(*at);  // a node that went with a child of its is not hollow: it has no parent
    return frames;
}

HostEvictionResult RadixTree::evict_host(size_t num_frames) {
    HostEvictionResult result;
    result.frames.reserve(std::min(num_frames, evictable_[host_tier]));
    while (result.frames.size() < num_frames) {
        Node* victim = reclaim_queue_.pop([this](const Node& node) { return may_reclaim(node); });
        if (!victim) victim = host_queue_.pop([this](const Node& node) { return may_leave_host(node); });
        if (!victim) break;
        cut_victim(victim, num_frames - result.frames.size());
        if (victim->on(device_tier)) {
            victim->reclaimed = true;
            result.reclaimed_pages += victim->pages;
        } else {
            result.dropped_pages += victim->pages;
            result.dropped_unstored_pages += victim->pages - victim->stored;
        }
        append(result.frames, take(victim, host_tier));
        settle(victim);
    }
    return result;
}

}  // namespace cachesvc
