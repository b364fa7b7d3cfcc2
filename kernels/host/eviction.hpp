// Least-recently-used order over the nodes that may leave a tier.
//
// DESIGN. A node's last use changes on every match of its path, so the order is kept lazily: one heap entry a node and
// queue, with the last use it had when it was put in. Uses only get later, so an entry that comes up with an old one goes
// back with the new one, and an entry whose node has died or may not leave any more is forgotten. Touching, locking and
// unlocking a path thereby cost nothing here, and a node is offered again when it becomes a candidate.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "node_store.hpp"

namespace cachesvc {

class EvictionQueue {
  public:
    // `bit` of Node::queued is this queue's.
    explicit EvictionQueue(int bit) : bit_(static_cast<uint8_t>(1u << bit)) {}

    void offer(Node* node);
    // The least recently used node for which may_leave(node) holds, the deepest of those used at once, taken out; null when
    // there is none.
    template <class MayLeave>
    Node* pop(MayLeave may_leave) {
        while (!heap_.empty()) {
            const Entry entry = pop_top();
            Node* node = entry.node;
            if (node->generation != entry.generation) continue;
            node->queued &= static_cast<uint8_t>(~bit_);
            if (!may_leave(*node)) continue;
            if (node->last_use == entry.last_use) return node;
            offer(node);
        }
        return nullptr;
    }
    void forget_dead(size_t num_nodes);     // bounds the heap; cheap unless most entries are of dead nodes
    void clear() { heap_.clear(); }
    bool is_sound(size_t num_nodes) const;  // for the checker: one entry a node, marked on the node, and bounded

  private:
    struct Entry {
        uint64_t last_use;
        Node* node;
        uint32_t generation;
        uint32_t end;
        bool operator<(const Entry& other) const {  // std heaps have the largest on top
            return last_use != other.last_use ? other.last_use < last_use : end < other.end;
        }
    };
    Entry pop_top();
    static size_t bound(size_t num_nodes) { return 2 * num_nodes + 1024; }

    uint8_t bit_;
    std::vector<Entry> heap_;
};

}  // namespace cachesvc
