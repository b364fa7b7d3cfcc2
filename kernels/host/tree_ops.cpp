// Write, load and backup ops of the radix tree: what is locked while they run and what their result does to residency.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "page_keys.hpp"
#include "radix_tree.hpp"
#include "tree_errors.hpp"

namespace cachesvc {
namespace {

template <class T>
void append(std::vector<T>& all, const std::vector<T>& more) {
    all.insert(all.end(), more.begin(), more.end());
}

// Length of the run of good flags at [at, at + pages).
uint32_t good_run(Flags flags, size_t at, uint32_t pages) {
    const Flags mine = flags.subspan(at, pages);
    return static_cast<uint32_t>(std::find(mine.begin(), mine.end(), false) - mine.begin());
}

}  // namespace

std::vector<Node*> RadixTree::distinct(std::span<const NodeId> ids, const char* call) {
    std::vector<Node*> nodes;
    mark_ += 1;
    for (const NodeId id : ids) {
        nodes.push_back(nodes_.get(id));
        if (std::exchange(nodes.back()->mark, mark_) == mark_)
            throw std::invalid_argument(std::string(call) + ": node " + std::to_string(id) + " is named twice");
    }
    if (nodes.empty()) throw std::invalid_argument(std::string(call) + ": no nodes");
    return nodes;
}

// The nodes that have no child among the others. Locks count over the path, so locking these locks all.
std::vector<Node*> RadixTree::ends_of(const std::vector<Node*>& nodes) {
    mark_ += 1;
    for (Node* node : nodes)
        if (node->parent) node->parent->mark = mark_;
    std::vector<Node*> ends;
    for (Node* node : nodes)
        if (node->mark != mark_) ends.push_back(node);
    return ends;
}

OpId RadixTree::begin(Op op) {
    const OpId id = next_op_++;
    for (const auto& [node, tier] : op.locked) lock(node, tier);
    ops_.emplace(id, std::move(op));
    return id;
}

RadixTree::Op& RadixTree::running(OpId id, OpKind kind) {
    const auto found = ops_.find(id);
    if (found == ops_.end() || found->second.kind != kind || found->second.acked)
        throw UnknownOp("no such op in progress: " + std::to_string(id));
    return found->second;
}

void RadixTree::end(OpId id) {
    const Op op = std::move(ops_.at(id));
    ops_.erase(id);
    for (const auto& [node, tier] : op.locked) unlock(node, tier);
}

size_t RadixTree::num_pages(const Op& op) const {
    size_t pages = 0;
    for (const Span& span : op.spans) pages += span.end->end() - span.start;
    return pages;
}

void RadixTree::require_flags(const Op& op, Flags flags) const {
    if (flags.size() != num_pages(op))
        throw std::invalid_argument("the op covers " + std::to_string(num_pages(op)) + " pages, got " +
                                    std::to_string(flags.size()) + " flags");
}

std::vector<Node*> RadixTree::pieces(const Span& span) const {
    std::vector<Node*> nodes;
    for (Node* node = span.end; !node->is_root() && node->start >= span.start; node = node->parent)
        nodes.push_back(node);
    std::reverse(nodes.begin(), nodes.end());
    return nodes;
}

void RadixTree::add_places(OpResult& result, Node* node) {
    nodes_.ensure_keys(node);
    append(result.pages, node->held[device_tier]);
    append(result.frames, node->held[host_tier]);
    append(result.keys, node->keys);
    const size_t at = result.depths.size();
    result.depths.resize(at + node->pages);
    std::iota(result.depths.begin() + static_cast<ptrdiff_t>(at), result.depths.end(), node->start);
}

OpResult RadixTree::begin_write(std::span<const NodeId> ids, Places frames) {
    const std::vector<Node*> nodes = distinct(ids, "begin_write");
    size_t pages = 0;
    for (const Node* node : nodes) pages += node->pages;
    if (pages != frames.size())
        throw std::invalid_argument("begin_write: the nodes have " + std::to_string(pages) + " pages, got " +
                                    std::to_string(frames.size()) + " frames");
    require_writable(nodes);
    Op op(OpKind::write);
    op.open_nodes = nodes.size();
    for (Node* node : nodes) op.spans.push_back({node, node->start});
    for (Node* node : ends_of(nodes)) {
        op.locked.emplace_back(node, device_tier);
        op.locked.emplace_back(node->parent, host_tier);
    }
    OpResult result;
    result.id = begin(std::move(op));
    size_t at = 0;
    for (Node* node : nodes) {
        const Places mine = frames.subspan(at, node->pages);
        node->staged.assign(mine.begin(), mine.end());
        node->write_op = result.id;
        at += node->pages;
        add_places(result, node);
    }
    staged_ += frames.size();
    result.frames.assign(frames.begin(), frames.end());
    return result;
}

void RadixTree::require_writable(const std::vector<Node*>& nodes) {
    mark_ += 1;
    for (Node* node : nodes) {
        const std::string name = "node " + std::to_string(node->id());
        if (!node->on(device_tier) || node->on(host_tier) || node->write_op)
            throw TreeError(name + " is not device-only, or has a write pending");
        const Node& parent = *node->parent;
        if (!options_.write_back && !may_hold_host_child(parent) && !parent.write_op && parent.mark != mark_)
            throw TreeError(name + ": its parent has no host copy, no write pending, and does not precede it");
        node->mark = mark_;
    }
}

WriteEndResult RadixTree::finish_write(OpId id, Flags ok) {
    Op& op = running(id, OpKind::write);
    require_flags(op, ok);
    WriteEndResult result;
    size_t at = 0;
    for (const Span& span : op.spans) {
        bool broken = false;
        for (Node* piece : pieces(span)) {
            const uint32_t pages = piece->pages;
            const uint32_t good = broken ? 0 : good_run(ok, at, pages);
            at += pages;
            broken = good < pages;
            if (good) resolve_write(upper(piece, good), true, result);
            if (broken) resolve_write(piece, false, result);
        }
    }
    op.acked = true;
    if (op.open_nodes == 0) ended_.push_back(id);
    for (const OpId done : ended_) end(done);
    ended_.clear();
    return result;
}

// Settles the copy of one node whose ack has come, and of the nodes below that waited for it.
void RadixTree::resolve_write(Node* first, bool good, WriteEndResult& result) {
    std::vector<std::pair<Node*, bool>> todo{{first, good}};
    while (!todo.empty()) {
        const auto [node, is_good] = todo.back();
        todo.pop_back();
        const bool wanted = is_good && !node->on(host_tier);  // else it failed, or a prefetched copy came first
        const bool may_hang = options_.write_back || may_hold_host_child(*node->parent);
        if (wanted && !may_hang && node->parent->write_op) {
            node->waiting = true;
            continue;
        }
        staged_ -= node->pages;
        Op& op = ops_.at(node->write_op);
        if (--op.open_nodes == 0 && op.acked) ended_.push_back(node->write_op);
        node->write_op = 0;
        node->waiting = false;
        std::vector<int32_t> frames = std::move(node->staged);
        node->staged.clear();
        if (wanted && may_hang) {
            give(node, host_tier, std::move(frames));
            result.nodes.push_back(node->id());
        } else {
            append(result.failed_frames, frames);
        }
        for (Node* child = node->first_child; child; child = child->next)
            if (child->waiting) todo.emplace_back(child, true);
    }
}

OpResult RadixTree::begin_load(NodeId id, Places pages) {
    Node* end = nodes_.get(id);
    std::vector<Node*> missing = path(end);
    std::erase_if(missing, [](const Node* node) { return node->on(device_tier); });
    for (const Node* node : missing)
        if (!node->on(host_tier)) throw TreeError("begin_load: a node of the path is on neither tier");
    if (missing.empty()) throw TreeError("begin_load: the whole path is on the device");
    const uint32_t start = missing.front()->start;
    if (pages.size() != end->end() - start)
        throw std::invalid_argument("begin_load: " + std::to_string(end->end() - start) + " pages to load, got " +
                                    std::to_string(pages.size()) + " device pages");
    OpResult result;
    Op op(OpKind::load);
    op.spans = {{end, start}};
    op.locked = {{end, device_tier}, {end, host_tier}};
    result.id = begin(std::move(op));
    for (Node* node : missing) {
        const Places mine = pages.subspan(node->start - start, node->pages);
        give(node, device_tier, {mine.begin(), mine.end()});
        node->load_op = result.id;
        add_places(result, node);
    }
    return result;
}

PagesAndFrames RadixTree::finish_load(OpId id, size_t good_pages) {
    Op& op = running(id, OpKind::load);
    if (good_pages > num_pages(op))
        throw std::invalid_argument("good_pages: the op loads " + std::to_string(num_pages(op)) + " pages, got " +
                                    std::to_string(good_pages));
    Node* bad = first_bad(op, id, op.spans[0].start + static_cast<uint32_t>(good_pages));
    PagesAndFrames failed{std::move(op.detached), {}};
    if (!bad) {
        end(id);
        return failed;
    }
    const Op ended = std::move(op);
    ops_.erase(id);
    for (const auto& [node, tier] : ended.locked) release(node, tier);  // settled with the rest of the subtree
    if (!ended.doomed) take_device_below(bad, failed.pages);
    failed.frames = drop_host(bad);
    return failed;
}

// The node that begins with page `bad_from` of the op, split off if need be; null when all pages are good. The op's nodes
// are its own no longer.
Node* RadixTree::first_bad(const Op& op, OpId id, uint32_t bad_from) {
    Node* bad = nullptr;
    for (Node* piece : pieces(op.spans[0])) {
        if (piece->load_op == id) piece->load_op = 0;
        if (bad || piece->end() <= bad_from) continue;
        if (piece->start < bad_from) split(piece, bad_from - piece->start);
        bad = piece;
    }
    return bad;
}

// Pages that another load still fills go back when that load ends.
void RadixTree::take_device_below(Node* top, std::vector<int32_t>& pages) {
    std::vector<Node*> nodes;
    subtree(top, nodes);
    for (Node* node : nodes) {
        if (!node->on(device_tier)) continue;
        std::vector<int32_t> mine = take(node, device_tier);
        if (node->load_op) {
            Op& other = ops_.at(node->load_op);
            other.doomed = true;
            append(other.detached, mine);
            node->load_op = 0;
        } else {
            append(pages, mine);
        }
    }
}

OpResult RadixTree::begin_backup(std::span<const NodeId> ids) {
    const std::vector<Node*> nodes = distinct(ids, "begin_backup");
    for (const Node* node : nodes)
        if (!node->on(host_tier))
            throw TreeError("begin_backup: node " + std::to_string(node->id()) + " is not host-resident");
    Op op(OpKind::backup);
    for (Node* node : nodes) op.spans.push_back({node, node->start});
    for (Node* node : ends_of(nodes)) op.locked.emplace_back(node, host_tier);
    OpResult result;
    result.id = begin(std::move(op));
    for (Node* node : nodes) {
        node->backups += 1;
        add_places(result, node);
    }
    return result;
}

size_t RadixTree::finish_backup(OpId id, Flags stored) {
    const Op& op = running(id, OpKind::backup);
    require_flags(op, stored);
    size_t at = 0, gained = 0;
    for (const Span& span : op.spans) {
        bool broken = false;
        for (Node* piece : pieces(span)) {
            const uint32_t good = broken ? 0 : good_run(stored, at, piece->pages);
            at += piece->pages;
            broken = good < piece->pages;
            gained += good - std::min(good, piece->stored);
            piece->stored = std::max(good, piece->stored);
            piece->backups -= 1;
        }
    }
    end(id);
    return gained;
}

}  // namespace cachesvc
