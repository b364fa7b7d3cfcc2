// Python's side of the radix tree and the slot states. Calls whose work grows with their input run without the GIL; a lock
// of one path, a report or a count is over sooner than the GIL would come back.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <mutex>

#include "arrays.hpp"
#include "bindings.hpp"
#include "page_keys.hpp"
#include "radix_tree.hpp"
#include "slot_states.hpp"
#include "tree_errors.hpp"

namespace nb = nanobind;

namespace cachesvc {
namespace {

// The fields of the NamedTuple in cachekernels.tree_types that the face makes of it, in their order.
using Fields = nb::typed<nb::tuple, nb::any, nb::ellipsis>;

Tier tier_of(int tier) {
    if (tier != device_tier && tier != host_tier) throw std::invalid_argument("tier: expected DEVICE (0) or HOST (1)");
    return static_cast<Tier>(tier);
}

Scope scope_of(const nb::bytes& bytes) {
    Scope scope;
    std::copy_n(input_bytes(bytes, "scope", scope.size()), scope.size(), scope.begin());
    return scope;
}

Fields op_tuple(OpResult op) {
    return nb::make_tuple(op.id, array_of(std::move(op.pages)), array_of(std::move(op.frames)),
                          array_of(std::move(op.keys), key_bytes), array_of(std::move(op.depths)));
}

Fields places_tuple(PagesAndFrames places) {
    return nb::make_tuple(array_of(std::move(places.pages)), array_of(std::move(places.frames)));
}

// The tree behind a lock: a caller's threads may overlap once the GIL is gone.
class PyRadixTree {
    template <class Call>
    auto alone(Call call) {
        nb::gil_scoped_release released;
        const std::lock_guard guard(mutex_);
        return call();
    }

    RadixTree tree_;
    std::mutex mutex_;

  public:
    PyRadixTree(uint32_t page_size, const nb::bytes& ns, uint32_t write_threshold, bool write_back, uint32_t hash_bits,
                std::string_view wrapped)
        : tree_({page_size, write_threshold, write_back, hash_bits},
                KeyScheme(input_bytes(ns, "namespace", key_bytes), page_size, wrapped)) {}

    Fields match(const Input<uint32_t>& tokens, const nb::bytes& scope, bool adopt) {
        const auto given = input_1d(tokens, "tokens");
        const Scope where = scope_of(scope);
        MatchResult found = alone([&] { return tree_.match(given, where, adopt); });
        return nb::make_tuple(array_of(std::move(found.device_pages)), array_of(std::move(found.host_frames)), found.node,
                              found.device_node, found.adopted_pages, array_of(std::move(found.loads)));
    }

    Fields insert(const Input<uint32_t>& tokens, const Input<int32_t>& pages, const nb::bytes& scope,
                     uint32_t first_new_page) {
        const auto given = input_1d(tokens, "tokens");
        const auto places = input_1d(pages, "pages");
        const Scope where = scope_of(scope);
        InsertResult done = alone([&] { return tree_.insert(given, places, where, first_new_page); });
        return nb::make_tuple(done.node, array_of(std::move(done.device_pages)), array_of(std::move(done.duplicates)),
                              array_of(std::move(done.to_write)));
    }

    Fields insert_host(NodeId node, const Input<uint32_t>& tokens, const Input<int32_t>& frames,
                          const Input<uint8_t>& keys, bool stored) {
        const auto given = input_1d(tokens, "tokens");
        const auto places = input_1d(frames, "frames");
        const auto names = input_rows(keys, "keys", places.size(), key_bytes);
        HostInsertResult done = alone([&] { return tree_.insert_host(node, given, places, names.data, stored); });
        return nb::make_tuple(done.node, done.attached_pages, array_of(std::move(done.duplicates)), done.refused);
    }

    NumpyArray<uint8_t> keys_after(NodeId node, const Input<uint32_t>& tokens) {
        const auto given = input_1d(tokens, "tokens");
        return array_of(alone([&] { return tree_.keys_after(node, given); }), key_bytes);
    }

    NumpyArray<uint8_t> path_keys(NodeId node, size_t max_pages) {
        return array_of(alone([&] { return tree_.path_keys(node, max_pages); }), key_bytes);
    }

    void lock(NodeId node, int tier) {
        const std::lock_guard guard(mutex_);
        tree_.lock(node, tier_of(tier));
    }

    void unlock(NodeId node, int tier) {
        const std::lock_guard guard(mutex_);
        tree_.unlock(node, tier_of(tier));
    }

    Fields evict_device(size_t num_pages) {
        DeviceEvictionResult out = alone([&] { return tree_.evict_device(num_pages); });
        return nb::make_tuple(array_of(std::move(out.pages)), out.dropped_pages, array_of(std::move(out.to_copy)),
                              array_of(std::move(out.victims)));
    }

    Fields drop_device(NodeId node) {
        return places_tuple(alone([&] { return tree_.drop_device(node); }));
    }

    Fields evict_host(size_t num_frames) {
        HostEvictionResult out = alone([&] { return tree_.evict_host(num_frames); });
        return nb::make_tuple(array_of(std::move(out.frames)), out.reclaimed_pages, out.dropped_pages,
                              out.dropped_unstored_pages);
    }

    Fields begin_write(const Input<NodeId>& nodes, const Input<int32_t>& frames) {
        const auto ids = input_1d(nodes, "nodes");
        const auto places = input_1d(frames, "frames");
        return op_tuple(alone([&] { return tree_.begin_write(ids, places); }));
    }

    Fields finish_write(OpId op, const Input<bool>& ok) {
        const auto flags = input_1d(ok, "ok");
        WriteEndResult end = alone([&] { return tree_.finish_write(op, flags); });
        return nb::make_tuple(array_of(std::move(end.nodes)), array_of(std::move(end.failed_frames)));
    }

    Fields begin_load(NodeId node, const Input<int32_t>& pages) {
        const auto places = input_1d(pages, "pages");
        return op_tuple(alone([&] { return tree_.begin_load(node, places); }));
    }

    Fields finish_load(OpId op, size_t good_pages) {
        return places_tuple(alone([&] { return tree_.finish_load(op, good_pages); }));
    }

    Fields begin_backup(const Input<NodeId>& nodes) {
        const auto ids = input_1d(nodes, "nodes");
        return op_tuple(alone([&] { return tree_.begin_backup(ids); }));
    }

    size_t finish_backup(OpId op, const Input<bool>& stored) {
        const auto flags = input_1d(stored, "stored");
        return alone([&] { return tree_.finish_backup(op, flags); });
    }

    NumpyArray<int32_t> add_orphans(const Input<uint8_t>& keys, const Input<int32_t>& frames,
                                    const Input<uint32_t>& depths, const Input<uint64_t>& last_use) {
        const auto places = input_1d(frames, "frames");
        const auto names = input_rows(keys, "keys", places.size(), key_bytes);
        const auto deep = input_1d(depths, "depths", places.size());
        const auto used = input_1d(last_use, "last_use", places.size());
        return array_of(alone([&] {
            std::vector<int32_t> refused;
            for (size_t i = 0; i < places.size(); ++i)
                if (!tree_.orphans().add(names[i], places[i], deep[i], used[i])) refused.push_back(places[i]);
            return refused;
        }));
    }

    NumpyArray<int32_t> take_orphans(size_t n) {
        return array_of(alone([&] { return tree_.orphans().take(n); }));
    }

    Fields clear() {
        return places_tuple(alone([&] { return tree_.clear(); }));
    }

    NodeId split(NodeId node, uint32_t pages) {
        return alone([&] { return tree_.split(node, pages); });
    }
    NumpyArray<NodeId> unwritten(NodeId node) {
        return array_of(alone([&] { return tree_.unwritten(node); }));
    }
    NumpyArray<NodeId> unstored(NodeId node) {
        return array_of(alone([&] { return tree_.unstored(node); }));
    }
    NumpyArray<uint32_t> tokens(NodeId node) {
        return array_of(alone([&] { return tree_.tokens(node); }));
    }

    Fields info(NodeId id) {
        const std::lock_guard guard(mutex_);
        const NodeReport node = tree_.info(id);
        return nb::make_tuple(node.num_pages, node.depth_pages, node.device, node.host, node.stored_pages, node.hit_count,
                              node.device_locks, node.host_locks, node.num_children, node.ops);
    }

    Fields stats() {
        const std::lock_guard guard(mutex_);
        const TreeReport all = tree_.stats();
        return nb::make_tuple(all.nodes, all.scopes, all.device_pages, all.host_frames, all.staged_frames, all.detached_pages,
                              all.orphans, all.evictable_device_pages, all.evictable_host_frames, all.ops);
    }

    void check() {
        alone([&] { tree_.check(); });
    }
};

SlotState state_of(int state) {
    if (state < 0 || state >= num_slot_states) throw std::invalid_argument("state: expected 0 to 3");
    return static_cast<SlotState>(state);
}

std::optional<NumpyArray<int32_t>> alloc_slots(SlotStates& slots, size_t n, int state) {
    auto taken = slots.alloc(n, state_of(state));
    if (!taken) return std::nullopt;
    return array_of(std::move(*taken));
}

// C++ errors become the classes that cachekernels.tree_types documents, looked up when one is thrown.
void raise_as(const char* name, const char* message) {
    const nb::object error = nb::module_::import_("cachekernels.tree_types").attr(name);
    PyErr_SetString(error.ptr(), message);
}

void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const StaleNode& error) {
        raise_as("StaleNode", error.what());
    } catch (const LockError& error) {
        raise_as("LockError", error.what());
    } catch (const Busy& error) {
        raise_as("Busy", error.what());
    } catch (const UnknownOp& error) {
        raise_as("UnknownOp", error.what());
    } catch (const TreeError& error) {
        raise_as("TreeError", error.what());
    } catch (const DoubleFree& error) {
        raise_as("DoubleFree", error.what());
    } catch (const StateError& error) {
        raise_as("StateError", error.what());
    } catch (const BrokenInvariant& error) {
        PyErr_SetString(PyExc_AssertionError, error.what());
    }
}

void bind_tree(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<PyRadixTree>(m, "RadixTree", "See cachekernels.tree.RadixTree.")
        .def(nb::init<uint32_t, nb::bytes, uint32_t, bool, uint32_t, std::string_view>(), "page_size"_a, "namespace"_a,
             "write_threshold"_a, "write_back"_a, "hash_bits"_a, "wrapped"_a)
        .def("match", &PyRadixTree::match, "tokens"_a, "scope"_a, "adopt"_a)
        .def("insert", &PyRadixTree::insert, "tokens"_a, "pages"_a, "scope"_a, "first_new_page"_a)
        .def("insert_host", &PyRadixTree::insert_host, "node"_a, "tokens"_a, "frames"_a, "keys"_a, "stored"_a)
        .def("keys_after", &PyRadixTree::keys_after, "node"_a, "tokens"_a)
        .def("path_keys", &PyRadixTree::path_keys, "node"_a, "max_pages"_a)
        .def("lock", &PyRadixTree::lock, "node"_a, "tier"_a)
        .def("unlock", &PyRadixTree::unlock, "node"_a, "tier"_a)
        .def("evict_device", &PyRadixTree::evict_device, "num_pages"_a)
        .def("drop_device", &PyRadixTree::drop_device, "node"_a)
        .def("evict_host", &PyRadixTree::evict_host, "num_frames"_a)
        .def("begin_write", &PyRadixTree::begin_write, "nodes"_a, "frames"_a)
        .def("finish_write", &PyRadixTree::finish_write, "op"_a, "ok"_a)
        .def("begin_load", &PyRadixTree::begin_load, "node"_a, "pages"_a)
        .def("finish_load", &PyRadixTree::finish_load, "op"_a, "good_pages"_a)
        .def("begin_backup", &PyRadixTree::begin_backup, "nodes"_a)
        .def("finish_backup", &PyRadixTree::finish_backup, "op"_a, "stored"_a)
        .def("add_orphans", &PyRadixTree::add_orphans, "keys"_a, "frames"_a, "depths"_a, "last_use"_a)
        .def("take_orphans", &PyRadixTree::take_orphans, "n"_a)
        .def("clear", &PyRadixTree::clear)
        .def("split", &PyRadixTree::split, "node"_a, "pages"_a)
        .def("unwritten", &PyRadixTree::unwritten, "node"_a)
        .def("unstored", &PyRadixTree::unstored, "node"_a)
        .def("tokens", &PyRadixTree::tokens, "node"_a)
        .def("info", &PyRadixTree::info, "node"_a)
        .def("stats", &PyRadixTree::stats)
        .def("check", &PyRadixTree::check);
}

void bind_slots(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<SlotStates>(m, "SlotStates", "See cachekernels.slots.SlotStates.")
        .def(nb::init<size_t>(), "num_slots"_a)
        .def("alloc", &alloc_slots, "n"_a, "state"_a)
        .def(
            "move",
            [](SlotStates& slots, const Input<int32_t>& which, int source, int target) {
                slots.move(input_1d(which, "slots"), state_of(source), state_of(target));
            },
            "slots"_a, "source"_a, "target"_a)
        .def("count", [](const SlotStates& slots, int state) { return slots.count(state_of(state)); }, "state"_a)
        .def("states", [](const SlotStates& slots) { return array_of(std::vector<uint8_t>(slots.states())); });
}

}  // namespace

void bind_radix_tree(nb::module_& m) {
    nb::register_exception_translator(translate);
    bind_tree(m);
    bind_slots(m);
}
}  // namespace cachesvc
