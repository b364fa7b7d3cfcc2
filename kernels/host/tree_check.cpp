// The checker: every invariant of the radix tree, found by walking all nodes. Also the reports.
#include <algorithm>
#include <string>
#include <unordered_set>

#include "page_keys.hpp"
#include "radix_tree.hpp"
#include "tree_errors.hpp"

namespace cachesvc {
namespace {

void require(bool holds, const Node& node, const char* broken) {
    if (!holds) throw BrokenInvariant("node " + std::to_string(node.id()) + ": " + broken);
}

void require(bool holds, const char* broken) {
    if (!holds) throw BrokenInvariant(broken);
}

class Owned {  // places seen so far: none may come twice
  public:
    explicit Owned(const char* what) : what_(what) {}
    void add(std::span<const int32_t> places) {
        for (const int32_t place : places)
            if (!seen_.insert(place).second)
                throw BrokenInvariant(std::string(what_) + " " + std::to_string(place) + " is owned twice");
    }

  private:
    const char* what_;
    std::unordered_set<int32_t> seen_;
};

}  // namespace

NodeReport RadixTree::info(NodeId id) {
    const Node& node = *nodes_.get(id);
    return {node.pages,
            node.end(),
            node.on(device_tier),
            node.on(host_tier),
            node.stored,
            node.hits,
            node.locks[device_tier],
            node.locks[host_tier],
            node.num_children,
            (node.write_op != 0) + (node.load_op != 0) + node.backups};
}

TreeReport RadixTree::stats() const {
    size_t detached = 0;
    for (const auto& [id, op] : ops_) detached += op.detached.size();
    return {nodes_.num_nodes(),
            nodes_.num_scopes(),
            resident_[device_tier],
            resident_[host_tier],
            staged_,
            detached,
            orphans_.size(),
            evictable_[device_tier],
            evictable_[host_tier],
            ops_.size()};
}

void RadixTree::check() {
    const Cover cover = cover_of_ops();
    for (const Node& node : nodes_.slab()) {
        if (!node.alive) continue;
        check_links(node);
        if (node.is_root()) continue;
        check_node(node);
        check_op_marks(node, cover);
    }
    check_totals();
    check_owners();
}

RadixTree::Cover RadixTree::cover_of_ops() const {
    Cover cover;
    for (const auto& [id, op] : ops_)
        for (const Span& span : op.spans)
            for (const Node* node : pieces(span)) cover[id].insert(node);
    return cover;
}

void RadixTree::check_links(const Node& node) const {
    uint32_t children = 0, resident[2] = {0, 0}, locks[2] = {node.own_locks[0], node.own_locks[1]};
    for (const Node* child = node.first_child; child; child = child->next) {
        require(child->alive && child->parent == &node, *child, "is linked below a node that is not its parent");
        children += 1;
        for (const Tier tier : {device_tier, host_tier}) {
            resident[tier] += child->on(tier);
            locks[tier] += child->locks[tier];
        }
    }
    require(children == node.num_children, node, "counts its children wrongly");
    for (const Tier tier : {device_tier, host_tier}) {
        require(resident[tier] == node.resident_children[tier], node, "counts its resident children wrongly");
        require(locks[tier] == node.locks[tier], node, "its locks are not its own and its children's");
    }
    require(!node.leaving && !node.leaving_below, node, "is still marked as leaving");
}

void RadixTree::check_node(const Node& node) const {
    const Node& parent = *node.parent;
    require(node.pages > 0, node, "has no pages");
    require(node.tokens.size() == size_t{node.pages} * options_.page_size, node, "has not page_size tokens a page");
    require(node.start == parent.end(), node, "does not begin where its parent ends");
    require(nodes_.child(&parent, node.tokens.data()) == &node, node, "is not found by its first page");
    require(parent.last_use >= node.last_use, node, "was used later than its parent");
    require(!node.on(device_tier) || parent.is_root() || parent.on(device_tier), node,
            "is on the device, its parent is not");
    require(!node.on(host_tier) || may_hold_host_child(parent), node, "is on host, its parent is not");
    require(!node.hollow() || node.locked() || node.first_child, node, "is hollow and nothing holds it");
    for (const auto* held : {&node.held[device_tier], &node.held[host_tier], &node.staged})
        require(held->empty() || held->size() == node.pages, node, "holds not one place a page");
    require(node.keys.empty() || node.keys.size() == node.pages * key_bytes, node, "holds not one key a page");
    require(node.stored <= node.pages, node, "has more pages stored than pages");
    require(!may_leave_device(node) || node.queued & 1, node, "may leave the device and is not queued");
    require(!may_reclaim(node) || node.queued & 2, node, "may be reclaimed and is not queued");
    require(!may_leave_host(node) || node.queued & 4, node, "may leave host and is not queued");
}

void RadixTree::check_op_marks(const Node& node, const Cover& cover) const {
    require((node.write_op != 0) == !node.staged.empty(), node, "has frames staged without a write, or the reverse");
    require(!node.waiting || (node.write_op && node.parent->write_op), node, "waits for nothing");
    for (const OpId id : {node.write_op, node.load_op}) {
        if (id == 0) continue;
        require(ops_.contains(id), node, "names an op that has ended");
        require(cover.at(id).contains(&node), node, "names an op that does not cover it");
        require(node.locks[device_tier] > 0, node, "is in an op and not locked");
    }
}

void RadixTree::check_totals() {
    size_t resident[2] = {0, 0}, evictable[2] = {0, 0}, staged = 0;
    std::unordered_map<OpId, size_t> open;
    for (const Node& node : nodes_.slab()) {
        if (!node.alive) continue;
        for (const Tier tier : {device_tier, host_tier}) {
            resident[tier] += node.held[tier].size();
            evictable[tier] += node.locks[tier] ? 0 : node.held[tier].size();
        }
        staged += node.staged.size();
        if (node.write_op) open[node.write_op] += 1;
    }
    require(std::equal(resident, resident + 2, resident_), "the count of resident pages is wrong");
    require(std::equal(evictable, evictable + 2, evictable_), "the count of evictable pages is wrong");
    require(staged == staged_, "the count of staged frames is wrong");
    for (const EvictionQueue* queue : {&device_queue_, &reclaim_queue_, &host_queue_})
        require(queue->is_sound(nodes_.num_nodes()), "an eviction queue has stale or double entries");
    for (const auto& [id, op] : ops_)
        if (op.kind == OpKind::write) require(op.open_nodes == open[id], "an op counts its open nodes wrongly");
}

void RadixTree::check_owners() {
    Owned pages("device page"), frames("frame");
    for (const Node& node : nodes_.slab()) {
        pages.add(node.held[device_tier]);
        frames.add(node.held[host_tier]);
        frames.add(node.staged);
    }
    for (const auto& [id, op] : ops_) pages.add(op.detached);
    frames.add(orphans_.frames());
}

}  // namespace cachesvc
