// The radix tree over token pages: which pages of a prompt are on the device, in host frames, known to storage.
//
// DESIGN. A node is a run of pages that share one residency: all of them on a tier or none. Device-resident nodes form a
// rooted subtree of each scope; so do host-resident ones, except in write_back mode, where device-only nodes may lie above
// host-only ones until they leave. A *hollow* node has lost both copies while something still holds a lock on it: it never
// matches, an insert may fill it again, it vanishes with its last lock. Locks count over the path to the scope root, so a
// node that is not locked has nothing locked below it, and everything unlocked can be evicted leaf by leaf.
//
// An op (write, load, backup) covers spans: [start page, end of a node). Nodes below keep their end on a split, so a span
// stays true however often its nodes are split; both halves carry the op's number. Nothing here recurses: chains get deep.
//
// Not thread-safe; the binding holds a lock around each call. Unlike the arrays of results, nodes never leave this class.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "eviction.hpp"
#include "node_store.hpp"
#include "orphans.hpp"

namespace cachesvc {

using Tokens = std::span<const uint32_t>;
using Places = std::span<const int32_t>;  // device pages or frames
using Flags = std::span<const bool>;

struct TreeOptions {
    uint32_t page_size;
    uint32_t write_threshold;
    bool write_back;
    uint32_t hash_bits;  // of the child table; fewer than 64 only to have collisions in tests
};

// Results: see cachekernels/tree_types.py, which documents the fields under the same names.
struct MatchResult {
    std::vector<int32_t> device_pages, host_frames;
    NodeId node, device_node;
    uint32_t adopted_pages = 0;
    std::vector<OpId> loads;
};
struct InsertResult {
    NodeId node;
    std::vector<int32_t> device_pages, duplicates;
    std::vector<NodeId> to_write;
};
struct HostInsertResult {
    NodeId node;
    uint32_t attached_pages = 0;
    std::vector<int32_t> duplicates;
    bool refused = false;
};
struct DeviceEvictionResult {
    std::vector<int32_t> pages;
    uint32_t dropped_pages = 0;
    std::vector<NodeId> to_copy, victims;
};
struct HostEvictionResult {
    std::vector<int32_t> frames;
    uint32_t reclaimed_pages = 0, dropped_pages = 0, dropped_unstored_pages = 0;
};
struct PagesAndFrames {
    std::vector<int32_t> pages, frames;
};
struct OpResult {  // begin_write, begin_load, begin_backup
    OpId id = 0;
    std::vector<int32_t> pages, frames;
    std::vector<uint8_t> keys;
    std::vector<uint32_t> depths;
};
struct WriteEndResult {
    std::vector<NodeId> nodes;
    std::vector<int32_t> failed_frames;
};
struct NodeReport {
    uint32_t num_pages, depth_pages;
    bool device, host;
    uint32_t stored_pages, hit_count, device_locks, host_locks, num_children, ops;
};
struct TreeReport {
    size_t nodes, scopes, device_pages, host_frames, staged_frames, detached_pages, orphans, evictable_device_pages,
        evictable_host_frames, ops;
};

class RadixTree {
  public:
    RadixTree(const TreeOptions& options, const KeyScheme& key_scheme);

    // radix_tree.cpp
    MatchResult match(Tokens tokens, const Scope& scope, bool adopt);
    InsertResult insert(Tokens tokens, Places pages, const Scope& scope, uint32_t first_new_page);
    HostInsertResult insert_host(NodeId node, Tokens tokens, Places frames, const uint8_t* keys, bool stored);
    std::vector<uint8_t> keys_after(NodeId node, Tokens tokens);
    std::vector<uint8_t> path_keys(NodeId node, size_t max_pages);  // of the first pages from the root to its end
    void lock(NodeId node, Tier tier) { lock(nodes_.get(node), tier); }
    void unlock(NodeId node, Tier tier) { unlock(nodes_.get(node), tier); }
    PagesAndFrames clear();
    NodeId split(NodeId node, uint32_t pages);        // the id of the new upper half
    std::vector<NodeId> unwritten(NodeId node);      // device-only nodes of the path without a write pending
    std::vector<NodeId> unstored(NodeId node);       // host-resident ones with pages that no backup covers or has stored
    std::vector<uint32_t> tokens(NodeId node);
    uint32_t page_size() const { return options_.page_size; }

    // eviction.cpp
    DeviceEvictionResult evict_device(size_t num_pages);
    HostEvictionResult evict_host(size_t num_frames);
    PagesAndFrames drop_device(NodeId node);

    // tree_ops.cpp
    OpResult begin_write(std::span<const NodeId> nodes, Places frames);
    WriteEndResult finish_write(OpId op, Flags ok);
    OpResult begin_load(NodeId node, Places pages);
    PagesAndFrames finish_load(OpId op, size_t good_pages);
    OpResult begin_backup(std::span<const NodeId> nodes);
    size_t finish_backup(OpId op, Flags stored);

    Orphans& orphans() { return orphans_; }

    // tree_check.cpp
    NodeReport info(NodeId node);
    TreeReport stats() const;
    void check();  // every invariant; throws BrokenInvariant with the first one that does not hold

  private:
    enum class OpKind { write, load, backup };
    struct Span {  // the pages [start, end of `end`) of one path
        Node* end;
        uint32_t start;
    };
    struct Op {
        explicit Op(OpKind op_kind) : kind(op_kind) {}
        OpKind kind;
        std::vector<Span> spans;
        std::vector<std::pair<Node*, Tier>> locked;
        size_t open_nodes = 0;          // write: nodes whose copy has not been taken or given up
        bool acked = false;             // write: its ack came; it lasts until no node waits for a parent's write
        bool doomed = false;            // load: a load above it failed and took its device pages away
        std::vector<int32_t> detached;  // load: the pages it still fills, given back when it ends
    };
    using Cover = std::unordered_map<OpId, std::unordered_set<const Node*>>;  // the nodes of each op
    struct Walk {  // a place on the way down: `at` pages of `tokens` lie behind
        Node* node;
        uint32_t at;
    };

    // Residency: every change goes through these two, which keep the totals and the candidates for eviction.
    void give(Node* node, Tier tier, std::vector<int32_t> places);
    std::vector<int32_t> take(Node* node, Tier tier);
    void offer(Node* node);
    bool may_leave_device(const Node& node) const;
    bool may_reclaim(const Node& node) const;
    bool may_leave_host(const Node& node) const;
    bool may_hold_host_child(const Node& node) const;

    void lock(Node* node, Tier tier);
    void unlock(Node* node, Tier tier);
    void release(Node* node, Tier tier);  // unlock, but a node left hollow stays: the caller settles
    void settle(Node* node);              // hollow nodes that nothing holds vanish, from this one up
    Node* split(Node* node, uint32_t pages);
    Node* upper(Node* node, uint32_t pages) { return pages == node->pages ? node : split(node, pages); }
    void touch(Node* node);
    std::vector<Node*> path(Node* node) const;  // without the scope root, root first
    void subtree(Node* top, std::vector<Node*>& nodes) const;  // parents first
    const uint32_t* page(Tokens tokens, size_t at) const { return tokens.data() + at * options_.page_size; }

    uint32_t adopt_orphans(Walk& walk, Tokens tokens, uint32_t total);
    void collect(const Walk& walk, MatchResult& result) const;
    void fill(Node* node, Places pages, InsertResult& result);
    std::vector<NodeId> to_write(const std::vector<Node*>& path) const;

    void cut_victim(Node* victim, size_t shortfall);
    bool worth_copying(const Node& node) const;
    void set_leaving(Node* node, bool leaving);
    std::vector<NodeId> with_ancestors(const std::vector<Node*>& victims);
    std::vector<int32_t> drop_host(Node* top);

    std::vector<Node*> distinct(std::span<const NodeId> ids, const char* call);
    std::vector<Node*> ends_of(const std::vector<Node*>& nodes);
    void require_writable(const std::vector<Node*>& nodes);
    OpId begin(Op op);
    Op& running(OpId id, OpKind kind);
    void end(OpId id);
    size_t num_pages(const Op& op) const;
    void require_flags(const Op& op, Flags flags) const;
    std::vector<Node*> pieces(const Span& span) const;  // root first
    void add_places(OpResult& result, Node* node);
    void resolve_write(Node* node, bool good, WriteEndResult& result);
    Node* first_bad(const Op& op, OpId id, uint32_t bad_from);
    void take_device_below(Node* top, std::vector<int32_t>& pages);

    void check_node(const Node& node) const;
    void check_links(const Node& node) const;
    Cover cover_of_ops() const;
    void check_op_marks(const Node& node, const Cover& cover) const;
    void check_totals();
    void check_owners();

    TreeOptions options_;
    NodeStore nodes_;
    Orphans orphans_;
    EvictionQueue device_queue_{0}, reclaim_queue_{1}, host_queue_{2};
    std::unordered_map<OpId, Op> ops_;
    std::vector<OpId> ended_;  // scratch of finish_write
    OpId next_op_ = 1;
    uint64_t clock_ = 0;
    uint64_t mark_ = 0;
    size_t resident_[2] = {0, 0};   // device pages, host frames
    size_t evictable_[2] = {0, 0};  // those of them that no lock holds
    size_t staged_ = 0;
};

}  // namespace cachesvc
