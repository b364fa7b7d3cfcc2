#include "radix_tree.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "tree_errors.hpp"

namespace cachesvc {
namespace {

void append(std::vector<int32_t>& all, std::span<const int32_t> more) {
    all.insert(all.end(), more.begin(), more.end());
}

void require_tokens(Tokens tokens, size_t pages, uint32_t page_size) {
    if (tokens.size() < pages * page_size)
        throw std::invalid_argument("tokens: " + std::to_string(pages) + " pages of " + std::to_string(page_size) +
                                    " tokens need " + std::to_string(pages * page_size) + ", got " +
                                    std::to_string(tokens.size()));
}

}  // namespace

RadixTree::RadixTree(const TreeOptions& options, const KeyScheme& key_scheme)
    : options_(options), nodes_(options.page_size, key_scheme, options.hash_bits) {}

MatchResult RadixTree::match(Tokens tokens, const Scope& scope, bool adopt) {
    const auto total = static_cast<uint32_t>(tokens.size() / options_.page_size);
    Walk walk{nodes_.root(scope), 0};
    bool at_hollow = false;
    clock_ += 1;
    walk.node->last_use = clock_;
    while (walk.at < total) {
        Node* child = nodes_.child(walk.node, page(tokens, walk.at));
        at_hollow = child && child->hollow();
        if (!child || at_hollow) break;
        const uint32_t shared = nodes_.common_pages(child, page(tokens, walk.at), total - walk.at);
        walk = {upper(child, shared), walk.at + shared};
        walk.node->last_use = clock_;
    }
    MatchResult result;
    if (adopt && !at_hollow && may_hold_host_child(*walk.node))
        result.adopted_pages = adopt_orphans(walk, tokens, total);
    collect(walk, result);
    return result;
}

// Goes on by key where the tree ends. Pages that follow become one host-resident node.
uint32_t RadixTree::adopt_orphans(Walk& walk, Tokens tokens, uint32_t total) {
    std::vector<uint8_t> keys;
    std::vector<int32_t> frames;
    if (walk.at == total || orphans_.size() == 0) return 0;
    const uint8_t* above = nodes_.ensure_keys(walk.node);
    const Scope& scope = nodes_.scope_of(walk.node);
    uint8_t key[key_bytes];
    for (uint32_t at = walk.at; at < total; ++at, above = key) {
        nodes_.key_scheme().name(scope.data(), above, page(tokens, at), 1, key);
        const auto frame = orphans_.adopt(key);
        if (!frame) break;
        frames.push_back(*frame);
        keys.insert(keys.end(), key, key + key_bytes);
    }
    const auto adopted = static_cast<uint32_t>(frames.size());
    if (adopted == 0) return 0;
    Node* node = nodes_.create(walk.node, page(tokens, walk.at), adopted);
    node->keys = std::move(keys);
    node->last_use = clock_;
    give(node, host_tier, std::move(frames));
    walk = {node, walk.at + adopted};
    return adopted;
}

void RadixTree::collect(const Walk& walk, MatchResult& result) const {
    const std::vector<Node*> nodes = path(walk.node);
    const Node* device_node = nodes.empty() ? walk.node : nodes.front()->parent;
    for (const Node* node : nodes)
        if (node->on(device_tier)) device_node = node;
    result.node = walk.node->id();
    result.device_node = device_node->id();
    result.device_pages.reserve(device_node->end());
    result.host_frames.reserve(walk.at - device_node->end());
    for (const Node* node : nodes) {
        const bool on_device = node->on(device_tier);
        append(on_device ? result.device_pages : result.host_frames, node->held[on_device ? device_tier : host_tier]);
        if (on_device && node->load_op && (result.loads.empty() || result.loads.back() != node->load_op))
            result.loads.push_back(node->load_op);
    }
}

InsertResult RadixTree::insert(Tokens tokens, Places pages, const Scope& scope, uint32_t first_new_page) {
    require_tokens(tokens, pages.size(), options_.page_size);
    const auto total = static_cast<uint32_t>(pages.size());
    Walk walk{nodes_.root(scope), 0};
    InsertResult result;
    result.device_pages.reserve(total);
    clock_ += 1;
    while (walk.at < total) {
        Node* child = nodes_.child(walk.node, page(tokens, walk.at));
        // NOTE: nothing is inserted at or below a node that a load still fills: if the load failed, pages that are good
        // would hang below pages that are not.
        if (child && child->load_op) break;
        const uint32_t rest = total - walk.at;
        const uint32_t shared = child ? nodes_.common_pages(child, page(tokens, walk.at), rest) : rest;
        Node* node = child ? upper(child, shared) : nodes_.create(walk.node, page(tokens, walk.at), shared);
        fill(node, pages.subspan(walk.at, shared), result);
        walk = {node, walk.at + shared};
    }
    touch(walk.node);
    const std::vector<Node*> nodes = path(walk.node);
    for (Node* node : nodes) node->hits += node->end() > first_new_page;
    result.node = walk.node->id();
    result.to_write = to_write(nodes);
    return result;
}

void RadixTree::fill(Node* node, Places pages, InsertResult& result) {
    if (!node->on(device_tier)) {
        give(node, device_tier, {pages.begin(), pages.end()});
    } else {
        const std::vector<int32_t>& held = node->held[device_tier];
        for (size_t i = 0; i < pages.size(); ++i)
            if (pages[i] != held[i]) result.duplicates.push_back(pages[i]);
    }
    append(result.device_pages, node->held[device_tier]);
}

// Nodes due for a host copy, with the nodes above them that lack one: a host-resident node hangs below another.
std::vector<NodeId> RadixTree::to_write(const std::vector<Node*>& path) const {
    std::vector<NodeId> chosen;
    if (options_.write_back) return chosen;
    for (auto at = path.rbegin(); at != path.rend(); ++at) {
        const Node& node = **at;
        const bool due = node.hits >= options_.write_threshold && !node.reclaimed;
        if (!node.on(host_tier) && !node.write_op && (due || !chosen.empty())) chosen.push_back(node.id());
    }
    std::reverse(chosen.begin(), chosen.end());
    return chosen;
}

HostInsertResult RadixTree::insert_host(NodeId anchor, Tokens tokens, Places frames, const uint8_t* keys, bool stored) {
    require_tokens(tokens, frames.size(), options_.page_size);
    const auto total = static_cast<uint32_t>(frames.size());
    Walk walk{nodes_.get(anchor), 0};
    if (!may_hold_host_child(*walk.node)) return {anchor, 0, {frames.begin(), frames.end()}, true};
    HostInsertResult result;
    clock_ += 1;
    while (walk.at < total) {
        Node* node = nodes_.child(walk.node, page(tokens, walk.at));
        const uint32_t rest = total - walk.at;
        const uint32_t shared = node ? nodes_.common_pages(node, page(tokens, walk.at), rest) : rest;
        node = node ? upper(node, shared) : nodes_.create(walk.node, page(tokens, walk.at), shared);
        const Places mine = frames.subspan(walk.at, shared);
        if (node->on(host_tier)) {
            append(result.duplicates, mine);
        } else {
            node->keys.assign(keys + walk.at * key_bytes, keys + (walk.at + shared) * key_bytes);
            give(node, host_tier, {mine.begin(), mine.end()});
            result.attached_pages += shared;
        }
        if (stored) node->stored = node->pages;
        walk = {node, walk.at + shared};
    }
    touch(walk.node);
    result.node = walk.node->id();
    return result;
}

std::vector<uint8_t> RadixTree::keys_after(NodeId node, Tokens tokens) {
    Node* above = nodes_.get(node);
    const size_t pages = tokens.size() / options_.page_size;
    std::vector<uint8_t> keys(pages * key_bytes);
    const uint8_t* last = nodes_.ensure_keys(above);
    nodes_.key_scheme().name(nodes_.scope_of(above).data(), last, tokens.data(), pages, keys.data());
    return keys;
}

std::vector<uint8_t> RadixTree::path_keys(NodeId id, size_t max_pages) {
    Node* last = nodes_.get(id);
    nodes_.ensure_keys(last);
    std::vector<uint8_t> keys;
    for (const Node* node : path(last)) {
        const size_t wanted = std::min(node->keys.size(), max_pages * key_bytes - keys.size());
        keys.insert(keys.end(), node->keys.begin(), node->keys.begin() + static_cast<std::ptrdiff_t>(wanted));
    }
    return keys;
}

PagesAndFrames RadixTree::clear() {
    size_t locks[2] = {0, 0};
    for (const Node& node : nodes_.slab())
        for (const Tier tier : {device_tier, host_tier}) locks[tier] += node.alive ? node.own_locks[tier] : 0;
    if (locks[0] || locks[1] || !ops_.empty()) {
        std::string message = "held: ";
        message += std::to_string(locks[0]) + " device locks, ";
        message += std::to_string(locks[1]) + " host locks, ";
        message += std::to_string(ops_.size()) + " ops:";
        for (const auto& [id, op] : ops_) message.append(1, ' ').append(std::to_string(id));
        throw Busy(message);
    }
    PagesAndFrames result;
    result.frames = orphans_.take_all();
    for (const Node& node : nodes_.slab()) {
        append(result.pages, node.held[device_tier]);
        append(result.frames, node.held[host_tier]);
    }
    nodes_.clear();
    for (EvictionQueue* queue : {&device_queue_, &reclaim_queue_, &host_queue_}) queue->clear();
    for (const Tier tier : {device_tier, host_tier}) resident_[tier] = evictable_[tier] = 0;
    return result;
}

NodeId RadixTree::split(NodeId id, uint32_t pages) {
    Node* node = nodes_.get(id);
    if (pages == 0 || pages >= node->pages)
        throw std::invalid_argument("split: pages within (0, " + std::to_string(node->pages) + "), got " +
                                    std::to_string(pages));
    return split(node, pages)->id();
}

std::vector<NodeId> RadixTree::unwritten(NodeId id) {
    std::vector<NodeId> ids;
    for (const Node* node : path(nodes_.get(id)))
        if (node->on(device_tier) && !node->on(host_tier) && !node->write_op) ids.push_back(node->id());
    return ids;
}

std::vector<NodeId> RadixTree::unstored(NodeId id) {
    std::vector<NodeId> ids;
    for (const Node* node : path(nodes_.get(id)))
        if (node->on(host_tier) && node->stored < node->pages && !node->backups) ids.push_back(node->id());
    return ids;
}

std::vector<uint32_t> RadixTree::tokens(NodeId id) {
    std::vector<uint32_t> all;
    for (const Node* node : path(nodes_.get(id))) all.insert(all.end(), node->tokens.begin(), node->tokens.end());
    return all;
}

void RadixTree::give(Node* node, Tier tier, std::vector<int32_t> places) {
    node->held[tier] = std::move(places);
    node->parent->resident_children[tier] += 1;
    resident_[tier] += node->pages;
    if (!node->locks[tier]) evictable_[tier] += node->pages;
    if (tier == host_tier) node->reclaimed = false;
    offer(node);
}

std::vector<int32_t> RadixTree::take(Node* node, Tier tier) {
    node->parent->resident_children[tier] -= 1;
    resident_[tier] -= node->pages;
    if (!node->locks[tier]) evictable_[tier] -= node->pages;
    std::vector<int32_t> places = std::move(node->held[tier]);
    node->held[tier].clear();
    offer(node);
    offer(node->parent);
    return places;
}

bool RadixTree::may_leave_device(const Node& node) const {
    return node.on(device_tier) && !node.locks[device_tier] && !node.resident_children[device_tier] && !node.leaving;
}

bool RadixTree::may_reclaim(const Node& node) const {
    return node.on(host_tier) && node.on(device_tier) && !node.locks[host_tier] && !node.resident_children[host_tier];
}

bool RadixTree::may_leave_host(const Node& node) const {
    return node.on(host_tier) && !node.on(device_tier) && !node.locks[host_tier] && !node.resident_children[host_tier];
}

bool RadixTree::may_hold_host_child(const Node& node) const {
    return node.is_root() || node.on(host_tier) || (options_.write_back && node.on(device_tier));
}

void RadixTree::offer(Node* node) {
    if (may_leave_device(*node)) device_queue_.offer(node);
    if (may_reclaim(*node)) reclaim_queue_.offer(node);
    if (may_leave_host(*node)) host_queue_.offer(node);
}

void RadixTree::lock(Node* node, Tier tier) {
    node->own_locks[tier] += 1;
    for (; node; node = node->parent)
        if (node->locks[tier]++ == 0) evictable_[tier] -= node->held[tier].size();
}

void RadixTree::release(Node* node, Tier tier) {
    if (!node->own_locks[tier])
        throw LockError("node " + std::to_string(node->id()) + " holds no " + (tier ? "host" : "device") + " lock");
    node->own_locks[tier] -= 1;
    for (; node; node = node->parent)
        if (--node->locks[tier] == 0) {
            evictable_[tier] += node->held[tier].size();
            offer(node);
        }
}

void RadixTree::unlock(Node* node, Tier tier) {
    release(node, tier);
    settle(node);
}

void RadixTree::settle(Node* node) {
    while (node->hollow() && !node->first_child && !node->locked()) {
        Node* parent = node->parent;
        nodes_.destroy(node);
        for (EvictionQueue* queue : {&device_queue_, &reclaim_queue_, &host_queue_})
            queue->forget_dead(nodes_.num_nodes());
        node = parent;
    }
}

Node* RadixTree::split(Node* node, uint32_t pages) {
    Node* upper = nodes_.split(node, pages);
    if (node->write_op) ops_.at(node->write_op).open_nodes += 1;
    return upper;
}

void RadixTree::touch(Node* node) {
    for (; node; node = node->parent) node->last_use = clock_;
}

std::vector<Node*> RadixTree::path(Node* node) const {
    std::vector<Node*> nodes;
    for (; !node->is_root(); node = node->parent) nodes.push_back(node);
    std::reverse(nodes.begin(), nodes.end());
    return nodes;
}

void RadixTree::subtree(Node* top, std::vector<Node*>& nodes) const {
    nodes.push_back(top);
    for (size_t at = nodes.size() - 1; at < nodes.size(); ++at)
        for (Node* child = nodes[at]->first_child; child; child = child->next) nodes.push_back(child);
}

}  // namespace cachesvc
