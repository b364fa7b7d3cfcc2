#include "node_store.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#define XXH_INLINE_ALL
#include "tree_errors.hpp"
#include "xxhash/xxhash.h"

namespace cachesvc {
namespace {

// Idle scope roots are swept when this many scopes exist, or twice those that survived the last sweep.
constexpr size_t idle_scopes = 1024;
constexpr uint32_t max_generation = 0x7fffffff;  // an id stays positive

// Cuts the first n elements off. The larger part keeps the buffer, so trimming a long node's end does not copy the node.
template <class T>
std::vector<T> cut_front(std::vector<T>& values, size_t n) {
    std::vector<T> front;
    if (values.empty()) return front;
    if (n >= values.size() - n) {
        std::vector<T> rest(values.begin() + static_cast<ptrdiff_t>(n), values.end());
        values.resize(n);
        front = std::move(values);
        values = std::move(rest);
    } else {
        front.assign(values.begin(), values.begin() + static_cast<ptrdiff_t>(n));
        values.erase(values.begin(), values.begin() + static_cast<ptrdiff_t>(n));
    }
    if (front.capacity() > 2 * front.size()) front.shrink_to_fit();
    if (values.capacity() > 2 * values.size()) values.shrink_to_fit();
    return front;
}

template <class T>
void free_memory(std::vector<T>& values) {
    std::vector<T>().swap(values);
}

void link(Node* parent, Node* child) {
    child->parent = parent;
    child->prev = nullptr;
    child->next = parent->first_child;
    if (child->next) child->next->prev = child;
    parent->first_child = child;
    parent->num_children += 1;
}

void unlink(Node* child) {
    (child->prev ? child->prev->next : child->parent->first_child) = child->next;
    if (child->next) child->next->prev = child->prev;
    child->parent->num_children -= 1;
}

// The upper half takes the node's place among its siblings; the node becomes its only child.
void put_between(Node* upper, Node* node) {
    upper->parent = node->parent;
    upper->prev = node->prev;
    upper->next = node->next;
    (upper->prev ? upper->prev->next : upper->parent->first_child) = upper;
    if (upper->next) upper->next->prev = upper;
    link(upper, node);
}

}  // namespace

ChildTable::ChildTable(size_t page_size, uint32_t hash_bits)
    : page_size_(page_size), seed_(std::random_device{}()), hash_mask_(~uint64_t{0} >> (64 - hash_bits)), entries_(64) {}

uint64_t ChildTable::hash_of(const Node* parent, const uint32_t* page) const {
    const uint64_t seed = seed_ + parent->slot * 0x9E3779B97F4A7C15ull;
    return XXH3_64bits_withSeed(page, page_size_ * sizeof(uint32_t), seed) & hash_mask_;
}

Node* ChildTable::find(const Node* parent, const uint32_t* page) const {
    const uint64_t hash = hash_of(parent, page);
    const size_t mask = entries_.size() - 1;
    for (size_t at = hash & mask; entries_[at].child; at = (at + 1) & mask) {
        Node* child = entries_[at].child;
        if (entries_[at].hash == hash && child->parent == parent &&
            std::memcmp(child->tokens.data(), page, page_size_ * sizeof(uint32_t)) == 0)
            return child;
    }
    return nullptr;
}

void ChildTable::insert(Node* child) {
    if (2 * ++used_ > entries_.size()) grow();
    child->place = hash_of(child->parent, child->tokens.data());
    const Entry entry{child->place, child};
    const size_t mask = entries_.size() - 1;
    size_t at = entry.hash & mask;
    while (entries_[at].child) at = (at + 1) & mask;
    entries_[at] = entry;
}

size_t ChildTable::index_of(const Node* child) const {
    const size_t mask = entries_.size() - 1;
    size_t at = child->place & mask;
    while (entries_[at].child != child) at = (at + 1) & mask;
    return at;
}

// Entries behind the gap move up, so that no probe needs a tombstone.
void ChildTable::erase(const Node* child) {
    const size_t mask = entries_.size() - 1;
    size_t gap = index_of(child);
    for (size_t at = (gap + 1) & mask; entries_[at].child; at = (at + 1) & mask) {
        const size_t home = entries_[at].hash & mask;
        if (((at - home) & mask) < ((at - gap) & mask)) continue;  // its home lies behind the gap
        entries_[gap] = entries_[at];
        gap = at;
    }
    entries_[gap] = Entry{};
    used_ -= 1;
}

void ChildTable::replace(const Node* old, Node* child) {
    entries_[index_of(old)].child = child;
    child->place = old->place;
}

void ChildTable::grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    const size_t mask = entries_.size() - 1;
    for (const Entry& entry : old) {
        if (!entry.child) continue;
        size_t at = entry.hash & mask;
        while (entries_[at].child) at = (at + 1) & mask;
        entries_[at] = entry;
    }
}

void ChildTable::clear() {
    entries_.assign(64, Entry{});
    used_ = 0;
}

size_t NodeStore::ScopeHash::operator()(const Scope& scope) const { return XXH3_64bits(scope.data(), scope.size()); }

NodeStore::NodeStore(size_t page_size, const KeyScheme& key_scheme, uint32_t hash_bits)
    : page_size_(page_size), key_scheme_(key_scheme), sweep_at_(idle_scopes), table_(page_size, hash_bits) {}

Node* NodeStore::get(NodeId id) {
    const auto slot = static_cast<uint32_t>(id);
    const auto generation = static_cast<uint32_t>(id >> 32);
    if (id < 0 || slot >= slab_.size() || !slab_[slot].alive || slab_[slot].generation != generation)
        throw StaleNode("node " + std::to_string(id) + " is gone");
    return &slab_[slot];
}

Node* NodeStore::root(const Scope& scope) {
    const auto known = roots_.find(scope);
    if (known != roots_.end()) return known->second;
    if (roots_.size() >= sweep_at_) sweep_idle_roots();
    Node* node = take_slot();
    node->scope = &roots_.emplace(scope, node).first->first;
    return node;
}

void NodeStore::sweep_idle_roots() {
    for (auto at = roots_.begin(); at != roots_.end();) {
        Node* node = at->second;
        if (node->first_child || node->locked()) {
            ++at;
        } else {
            release_slot(node);
            at = roots_.erase(at);
        }
    }
    sweep_at_ = std::max(idle_scopes, 2 * roots_.size());
}

Node* NodeStore::take_slot() {
    if (free_slots_.empty()) {
        const auto slot = static_cast<uint32_t>(slab_.size());
        slab_.emplace_back().slot = slot;
        free_slots_.push_back(slot);
    }
    Node* node = &slab_[free_slots_.back()];
    free_slots_.pop_back();
    node->alive = true;
    alive_ += 1;
    return node;
}

void NodeStore::release_slot(Node* node) {
    const uint32_t slot = node->slot;
    const uint32_t generation = node->generation == max_generation ? 1 : node->generation + 1;
    *node = Node{};  // gives the arrays' memory back
    node->slot = slot;
    node->generation = generation;
    free_slots_.push_back(slot);
    alive_ -= 1;
}

Node* NodeStore::create(Node* parent, const uint32_t* tokens, uint32_t pages) {
    Node* node = take_slot();
    node->start = parent->end();
    node->pages = pages;
    node->tokens.assign(tokens, tokens + pages * page_size_);
    link(parent, node);
    table_.insert(node);
    return node;
}

void NodeStore::destroy(Node* node) {
    table_.erase(node);
    unlink(node);
    release_slot(node);
}

Node* NodeStore::split(Node* node, uint32_t pages) {
    Node* upper = take_slot();
    table_.replace(node, upper);
    upper->start = node->start;
    upper->pages = pages;
    upper->stored = std::min(node->stored, pages);
    node->stored -= upper->stored;
    upper->tokens = cut_front(node->tokens, pages * page_size_);
    for (const Tier tier : {device_tier, host_tier}) {
        upper->held[tier] = cut_front(node->held[tier], pages);
        upper->resident_children[tier] = node->on(tier);
        upper->locks[tier] = node->locks[tier];
    }
    upper->staged = cut_front(node->staged, pages);
    upper->keys = cut_front(node->keys, pages * key_bytes);
    upper->last_use = node->last_use;
    upper->write_op = node->write_op;
    upper->load_op = node->load_op;
    upper->hits = node->hits;
    upper->backups = node->backups;
    upper->reclaimed = node->reclaimed;
    upper->waiting = node->waiting;
    node->start += pages;
    node->pages -= pages;
    put_between(upper, node);
    table_.insert(node);
    return upper;
}

void NodeStore::clear() {
    for (Node& node : slab_)
        if (node.alive) release_slot(&node);
    roots_.clear();
    table_.clear();
    sweep_at_ = idle_scopes;
}

uint32_t NodeStore::common_pages(const Node* node, const uint32_t* tokens, uint32_t limit) const {
    const size_t total = std::min<size_t>(limit, node->pages) * page_size_;
    const uint32_t* mine = node->tokens.data();
    if (std::memcmp(mine, tokens, total * sizeof(uint32_t)) == 0) return static_cast<uint32_t>(total / page_size_);
    size_t at = 0;
    for (const size_t block : {4096, 64, 1})  // coarse to fine: memcmp tells that, not where, they differ
        while (at + block <= total && std::memcmp(mine + at, tokens + at, block * sizeof(uint32_t)) == 0) at += block;
    return static_cast<uint32_t>(at / page_size_);
}

const uint8_t* NodeStore::ensure_keys(Node* node) {
    path_.clear();
    Node* above = node;
    for (; !above->is_root() && above->keys.empty(); above = above->parent) path_.push_back(above);
    const uint8_t* last = above->is_root() ? nullptr : above->keys.data() + (above->pages - 1) * key_bytes;
    if (path_.empty()) return last;
    const uint8_t* scope = key_scheme_.needs_scope(last) ? scope_of(above).data() : nullptr;
    for (auto at = path_.rbegin(); at != path_.rend(); ++at) {
        Node* missing = *at;
        missing->keys.resize(missing->pages * key_bytes);
        key_scheme_.name(scope, last, missing->tokens.data(), missing->pages, missing->keys.data());
        last = missing->keys.data() + (missing->pages - 1) * key_bytes;
    }
    return last;
}

const Scope& NodeStore::scope_of(const Node* node) const {
    while (!node->is_root()) node = node->parent;
    return *node->scope;
}

}  // namespace cachesvc
