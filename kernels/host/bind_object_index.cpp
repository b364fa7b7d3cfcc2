// ObjectIndex and HeapObjects for Python; cachekernels.objects is their typed face.
#include <nanobind/stl/tuple.h>

#include <utility>

#include "bind_objects.hpp"
#include "bindings.hpp"
#include "heap_objects.hpp"
#include "object_index.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace cachesvc {
namespace {

using Flags = Input<uint8_t>;  // one per id, 0 or 1

// ---- ObjectIndex ----

// One reservation from reserve to commit.
struct Reservation {
    std::vector<ObjectId> ids;
    std::vector<uint64_t> bytes;
    std::vector<uint8_t> admission;
    std::vector<uint8_t> named;
    ObjectIndex::Plan plan;
    bool is_named = false, is_committed = false;
};

Reservation reserve(ObjectIndex& index, const Input<uint8_t>& id_rows, const Input<uint64_t>& byte_counts) {
    const Ids ids(id_rows);
    const auto bytes = input_1d(byte_counts, "bytes", ids.count);
    Reservation made{{ids.data, ids.data + ids.count}, {bytes.begin(), bytes.end()}, {}, {}, {}, false, false};
    made.admission.resize(ids.count);
    made.named.resize(ids.count);
    nb::gil_scoped_release unlocked;
    made.plan = index.reserve(made.ids.data(), made.bytes.data(), ids.count, made.admission.data());
    return made;
}

Reservation overflow(ObjectIndex& index) { return {{}, {}, {}, {}, index.overflow(), false, false}; }

Reservation withdraw(ObjectIndex& index, const Input<uint8_t>& id_rows) {
    const Ids ids(id_rows);
    nb::gil_scoped_release unlocked;
    return {{}, {}, {}, {}, index.withdraw(ids.data, ids.count), false, false};
}

void settle(ObjectIndex& index, Reservation& made, const Flags& removal) {
    const auto removed = input_1d(removal, "removal", made.plan.victims.size());
    nb::gil_scoped_release unlocked;
    index.settle(made.plan, removed.data(), made.bytes.data(), made.ids.size(), made.admission.data());
}

bool name(ObjectIndex& index, Reservation& made, const Flags& named_flags) {
    const auto named = input_1d(named_flags, "named", made.ids.size());
    if (std::exchange(made.is_named, true)) throw nb::value_error("the objects of a reservation are named once");
    made.named.assign(named.begin(), named.end());
    nb::gil_scoped_release unlocked;
    return index.name(made.bytes.data(), made.admission.data(), made.named.data(), made.ids.size());
}

void commit(ObjectIndex& index, Reservation& made, const Flags& stored_flags) {
    const auto stored = input_1d(stored_flags, "stored", made.ids.size());
    if (std::exchange(made.is_committed, true)) return;
    nb::gil_scoped_release unlocked;
    index.commit(made.ids.data(), made.bytes.data(), made.admission.data(), made.named.data(), stored.data(),
                 made.ids.size());
}

NumpyArray<uint8_t> contains(const ObjectIndex& index, const Input<uint8_t>& id_rows) {
    const Ids ids(id_rows);
    NumpyArray<uint8_t> found = new_array<uint8_t>(ids.count);
    nb::gil_scoped_release unlocked;
    index.contains(ids.data, ids.count, found.data());
    return found;
}

void touch(ObjectIndex& index, const Input<uint8_t>& id_rows, const Flags& flags) {
    const Ids ids(id_rows);
    const auto which = input_1d(flags, "which", ids.count);
    nb::gil_scoped_release unlocked;
    index.touch(ids.data, which.data(), ids.count);
}

void adopt(ObjectIndex& index, const Input<uint8_t>& id_rows, const Input<uint64_t>& byte_counts, const Flags& flags) {
    const Ids ids(id_rows);
    const auto bytes = input_1d(byte_counts, "bytes", ids.count);
    const auto which = input_1d(flags, "which", ids.count);
    nb::gil_scoped_release unlocked;
    index.adopt(ids.data, bytes.data(), which.data(), ids.count);
}

void forget(ObjectIndex& index, const Input<uint8_t>& id_rows, const Flags& flags, bool counted, uint64_t as_of) {
    const Ids ids(id_rows);
    const auto which = input_1d(flags, "which", ids.count);
    nb::gil_scoped_release unlocked;
    index.forget(ids.data, which.data(), ids.count, counted, as_of);
}

void set_aside(ObjectIndex& index, const Input<uint8_t>& id_rows, const Input<uint64_t>& byte_counts,
               const Flags& flags, uint64_t as_of) {
    const Ids ids(id_rows);
    const auto bytes = input_1d(byte_counts, "bytes", ids.count);
    const auto which = input_1d(flags, "which", ids.count);
    nb::gil_scoped_release unlocked;
    index.set_aside(ids.data, bytes.data(), which.data(), ids.count, as_of);
}

void add_scanned(ObjectIndex& index, const Input<uint8_t>& id_rows, const Input<uint64_t>& byte_counts,
                 const Input<int64_t>& modification_times, bool counted) {
    const Ids ids(id_rows);
    const auto bytes = input_1d(byte_counts, "bytes", ids.count);
    const auto modified_ns = input_1d(modification_times, "modified_ns", ids.count);
    nb::gil_scoped_release unlocked;
    index.add_scanned(ids.data, bytes.data(), modified_ns.data(), ids.count, counted);
}

void adopt_set_aside(ObjectIndex& index, const Input<uint8_t>& id_rows, const Input<uint64_t>& byte_counts,
                     bool counted) {
    const Ids ids(id_rows);
    const auto bytes = input_1d(byte_counts, "bytes", ids.count);
    nb::gil_scoped_release unlocked;
    index.adopt_set_aside(ids.data, bytes.data(), ids.count, counted);
}

auto usage(const ObjectIndex& index) {
    const ObjectIndex::Usage now = index.usage();
    return std::tuple(now.total, now.reserved, now.capacity, now.set_aside, now.objects);
}

void bind_reservation(nb::module_& m) {
    nb::class_<Reservation>(m, "ObjectReservation")
        .def_prop_ro("num_victims", [](const Reservation& made) { return made.plan.victims.size(); })
        .def("admission", [](const Reservation& made) { return to_array(made.admission); })
        .def("victim_ids",
             [](const Reservation& made) {
                 std::vector<ObjectId> ids;
                 for (const ObjectIndex::Victim& victim : made.plan.victims) ids.push_back(victim.id);
                 return to_array(ids);
             })
        .def("victims_set_aside", [](const Reservation& made) {
            std::vector<uint8_t> flags;
            for (const ObjectIndex::Victim& victim : made.plan.victims) flags.push_back(victim.set_aside);
            return to_array(flags);
        });
}

void bind_index(nb::module_& m) {
    nb::class_<ObjectIndex>(m, "ObjectIndex")
        .def(nb::init<uint64_t, uint64_t>(), "capacity_bytes"_a, "total_address"_a)
        .def("contains", &contains, "ids"_a)
        .def("touch", &touch, "ids"_a, "which"_a)
        .def("reserve", &reserve, "ids"_a, "bytes"_a)
        .def("overflow", &overflow)
        .def("withdraw", &withdraw, "ids"_a)
        .def("settle", &settle, "reservation"_a, "removal"_a)
        .def("name", &name, "reservation"_a, "named"_a)
        .def("commit", &commit, "reservation"_a, "stored"_a)
        .def("give_back", &ObjectIndex::give_back, "bytes"_a)
        .def("join_count", &ObjectIndex::join_count, "count_address"_a, "unnamed_address"_a)
        .def("adopt", &adopt, "ids"_a, "bytes"_a, "which"_a)
        .def("forget", &forget, "ids"_a, "which"_a, "counted"_a, "as_of"_a)
        .def("set_aside", &set_aside, "ids"_a, "bytes"_a, "which"_a, "as_of"_a)
        .def("moment", &ObjectIndex::moment)
        .def("adopt_set_aside", &adopt_set_aside, "ids"_a, "bytes"_a, "counted"_a)
        .def("begin_scan", &ObjectIndex::begin_scan)
        .def("add_scanned", &add_scanned, "ids"_a, "bytes"_a, "modified_ns"_a, "counted"_a)
        .def("end_scan", &ObjectIndex::end_scan, nb::call_guard<nb::gil_scoped_release>())
        .def("usage", &usage)
        .def("check", &ObjectIndex::check);
}

// ---- HeapObjects ----

// Copies on their way into HeapObjects. Move-only, which a vector of move-only blocks does not tell by itself.
struct Staged {
    explicit Staged(std::vector<HeapObjects::Block>&& taken) : blocks(std::move(taken)) {}
    Staged(Staged&&) = default;
    Staged(const Staged&) = delete;
    std::vector<HeapObjects::Block> blocks;
};

Staged stage(const Input<uint64_t>& addresses, const Input<uint64_t>& lengths, const Input<int64_t>& offsets,
             const Flags& flags) {
    const auto which = input_1d(flags, "which");
    const Segments segments = checked_segments(addresses, lengths, offsets, which.size(), 1);
    nb::gil_scoped_release unlocked;
    return Staged{HeapObjects::stage(segments, which.data())};
}

NumpyArray<uint8_t> publish(HeapObjects& objects, const Input<uint8_t>& id_rows, Staged& staged, const Flags& flags) {
    const Ids ids(id_rows);
    const auto which = input_1d(flags, "which", ids.count);
    if (staged.blocks.size() != ids.count) throw std::invalid_argument("staged: another number of objects than ids");
    NumpyArray<uint8_t> stored = new_array<uint8_t>(ids.count);
    nb::gil_scoped_release unlocked;
    objects.publish(ids.data, staged.blocks, which.data(), ids.count, stored.data());
    return stored;
}

template <auto method>
NumpyArray<uint8_t> with_segments(HeapObjects& objects, const Input<uint8_t>& id_rows, const Input<uint64_t>& addresses,
                                  const Input<uint64_t>& lengths, const Input<int64_t>& offsets) {
    const Ids ids(id_rows);
    const Segments segments = checked_segments(addresses, lengths, offsets, ids.count, 1);
    NumpyArray<uint8_t> found = new_array<uint8_t>(ids.count);
    nb::gil_scoped_release unlocked;
    (objects.*method)(ids.data, segments, reinterpret_cast<HeapObjects::Found*>(found.data()));
    return found;
}

NumpyArray<uint8_t> remove(HeapObjects& objects, const Input<uint8_t>& id_rows) {
    const Ids ids(id_rows);
    NumpyArray<uint8_t> removed = new_array<uint8_t>(ids.count);
    nb::gil_scoped_release unlocked;
    objects.remove(ids.data, ids.count, removed.data());
    return removed;
}

NumpyArray<int64_t> sizes(const HeapObjects& objects, const Input<uint8_t>& id_rows) {
    const Ids ids(id_rows);
    NumpyArray<int64_t> bytes = new_array<int64_t>(ids.count);
    nb::gil_scoped_release unlocked;
    objects.sizes(ids.data, ids.count, bytes.data());
    return bytes;
}

auto list(const HeapObjects& objects) {
    std::vector<ObjectId> ids;
    std::vector<int64_t> bytes;
    for (const auto& [id, size] : objects.list()) {
        ids.push_back(id);
        bytes.push_back(static_cast<int64_t>(size));
    }
    return std::tuple(to_array(ids), to_array(bytes));
}

void bind_heap(nb::module_& m) {
    nb::class_<Staged>(m, "StagedObjects");
    nb::class_<HeapObjects>(m, "HeapObjects")
        .def(nb::init<>())
        .def_static("stage", &stage, "addresses"_a, "lengths"_a, "offsets"_a, "which"_a)
        .def("publish", &publish, "ids"_a, "staged"_a, "which"_a)
        .def("read", &with_segments<&HeapObjects::read>, "ids"_a, "addresses"_a, "lengths"_a, "offsets"_a)
        .def("remove_if_equal", &with_segments<&HeapObjects::remove_if_equal>, "ids"_a, "addresses"_a, "lengths"_a,
             "offsets"_a)
        .def("remove", &remove, "ids"_a)
        .def("sizes", &sizes, "ids"_a)
        .def("list", &list);
}

}  // namespace

void bind_object_index(nb::module_& m) {
    bind_reservation(m);
    bind_index(m);
    bind_heap(m);
}

}  // namespace cachesvc
