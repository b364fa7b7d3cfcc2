// The nodes of a radix tree over token pages, and the table that finds a node's child by its first page.
//
// DESIGN. Nodes live in a slab that never moves them; links are plain pointers, ids are slot | generation << 32, so an id
// kept too long is recognised. All children of all nodes share one open-addressing table keyed by (parent, first page):
// a node costs no table of its own, and a step down costs one probe. Siblings are linked for walks over a subtree.
// A node's id stands for its end: on a split the node keeps the lower half and a new node takes the upper one.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "page_keys.hpp"

namespace cachesvc {

using NodeId = int64_t;
using OpId = int64_t;
using Scope = std::array<uint8_t, 32>;
enum Tier : int { device_tier = 0, host_tier = 1 };

struct Node {
    Node* parent = nullptr;  // null for a scope root
    Node* first_child = nullptr;
    Node* next = nullptr;  // siblings
    Node* prev = nullptr;
    const Scope* scope = nullptr;  // scope roots only
    uint64_t last_use = 0;
    uint64_t place = 0;  // hash of parent and first page: where the child table has the node
    uint64_t mark = 0;   // scratch of one call: equal to that call's number, or meaningless
    OpId write_op = 0;
    OpId load_op = 0;
    uint32_t slot = 0;
    uint32_t generation = 1;
    uint32_t start = 0;  // pages above the node
    uint32_t pages = 0;  // 0 for a scope root only
    uint32_t num_children = 0;
    uint32_t resident_children[2] = {0, 0};  // by tier
    uint32_t locks[2] = {0, 0};              // by tier: on this node or on anything below it
    uint32_t own_locks[2] = {0, 0};          // by tier: on this node
    uint32_t hits = 0;
    uint32_t stored = 0;  // leading pages known to be in storage
    uint32_t backups = 0;
    uint8_t queued = 0;          // a bit for each eviction queue that has an entry for the node
    bool alive = false;
    bool reclaimed = false;      // had a host copy and lost it for want of frames: copied again when it leaves the device
    bool waiting = false;        // its copy is good, its parent's write has not ended
    bool leaving = false;        // within evict_device: a victim that has to be copied first
    bool leaving_below = false;  // within evict_device: has such children
    std::vector<uint32_t> tokens;
    std::vector<int32_t> held[2];  // device pages, host frames; empty when not resident
    std::vector<int32_t> staged;   // frames of a write that has not ended
    std::vector<uint8_t> keys;     // [pages * 32], empty until needed

    uint32_t end() const { return start + pages; }
    bool is_root() const { return parent == nullptr; }
    bool on(Tier tier) const { return !held[tier].empty(); }
    bool hollow() const { return parent && held[0].empty() && held[1].empty(); }
    bool locked() const { return locks[0] || locks[1]; }
    NodeId id() const { return static_cast<NodeId>(slot) | static_cast<NodeId>(generation) << 32; }
};

// Finds children by their first page; a hash that matches is verified token by token.
class ChildTable {
  public:
    ChildTable(size_t page_size, uint32_t hash_bits);
    Node* find(const Node* parent, const uint32_t* page) const;
    void insert(Node* child);                  // under child->parent
    void erase(const Node* child);
    void replace(const Node* old, Node* child);  // same parent, same first page
    void clear();

  private:
    struct Entry {
        uint64_t hash = 0;  // child->place, so that a probe that misses does not touch the child
        Node* child = nullptr;
    };
    uint64_t hash_of(const Node* parent, const uint32_t* page) const;
    size_t index_of(const Node* child) const;
    void grow();

    size_t page_size_;
    uint64_t seed_;
    uint64_t hash_mask_;
    size_t used_ = 0;
    std::vector<Entry> entries_;
};

class NodeStore {
  public:
    NodeStore(size_t page_size, const KeyScheme& key_scheme, uint32_t hash_bits);

    Node* get(NodeId id);                     // throws StaleNode
    Node* root(const Scope& scope);           // made on first use; idle ones are swept when there are many
    Node* child(const Node* parent, const uint32_t* page) const { return table_.find(parent, page); }
    Node* create(Node* parent, const uint32_t* tokens, uint32_t pages);
    void destroy(Node* node);                 // must have no children
    Node* split(Node* node, uint32_t pages);  // the first `pages` pages become a new node, which is returned
    void clear();

    // Whole pages that the node shares with `tokens`, at most `limit`.
    uint32_t common_pages(const Node* node, const uint32_t* tokens, uint32_t limit) const;
    // The node's keys are there afterwards, computed from the nearest keys above. Returns its last one, null for a root.
    const uint8_t* ensure_keys(Node* node);
    const Scope& scope_of(const Node* node) const;

    size_t page_size() const { return page_size_; }
    const KeyScheme& key_scheme() const { return key_scheme_; }
    size_t num_nodes() const { return alive_ - roots_.size(); }
    size_t num_scopes() const { return roots_.size(); }
    std::deque<Node>& slab() { return slab_; }  // dead nodes included: ask alive

  private:
    struct ScopeHash {
        size_t operator()(const Scope& scope) const;
    };
    Node* take_slot();
    void release_slot(Node* node);
    void sweep_idle_roots();

    size_t page_size_;
    KeyScheme key_scheme_;
    std::deque<Node> slab_;  // never moves a node
    std::vector<uint32_t> free_slots_;
    size_t alive_ = 0;
    size_t sweep_at_;
    ChildTable table_;
    std::unordered_map<Scope, Node*, ScopeHash> roots_;
    std::vector<Node*> path_;  // scratch
};

}  // namespace cachesvc
