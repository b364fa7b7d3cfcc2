#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "arrays.hpp"
#include "bindings.hpp"
#include "exchange.hpp"
#include "store_shortcut.hpp"

namespace nb = nanobind;

namespace cachesvc {
namespace {

std::span<const uint8_t> span_of(const nb::bytes& bytes) {
    return {static_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

nb::object bytes_of(std::optional<std::span<const uint8_t>> message) {
    if (!message) return nb::none();
    return nb::bytes(message->data(), message->size());
}

// A wire's user, one at a time: `look_up` waits without the GIL, and a second thread would tear its buffers apart.
class Use {
public:
    explicit Use(Wire& wire) : wire_(wire) {
        if (wire.is_in_use) throw std::runtime_error("this wire is in use in another thread; it is for one at a time");
        wire.is_in_use = true;
    }
    ~Use() { wire_.is_in_use = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

private:
    Wire& wire_;
};

template <class Result>
auto alone(Result (Wire::*method)()) {
    return [method](Wire& wire) {
        const Use use(wire);
        return (wire.*method)();
    };
}

void post_py(Wire& wire, const nb::bytes& frame) {
    const Use use(wire);
    wire.post(span_of(frame));
}

nb::object next_of_wire(Wire& wire) {
    const Use use(wire);
    nb::object message = bytes_of(wire.front());
    if (!message.is_none()) wire.pop();
    return message;
}

int64_t look_up_py(Wire& wire, uint64_t call, uint64_t op, const Input<uint8_t>& keys,
                   double timeout_s) {
    const auto rows = input_rows(keys, "keys", any_length, key_bytes);
    const Use use(wire);
    nb::gil_scoped_release released;
    return wire.look_up(call, op, {rows.data, rows.num_rows * key_bytes}, timeout_s);
}

std::pair<int64_t, NumpyArray<uint8_t>> contains_py(Wire& wire, uint64_t call, const Input<uint8_t>& keys,
                                                    double timeout_s) {
    const auto rows = input_rows(keys, "keys", any_length, key_bytes);
    auto outcomes = new_array<uint8_t>(rows.num_rows);
    const Use use(wire);
    int64_t said;
    {
        nb::gil_scoped_release released;
        said = wire.contains(call, {rows.data, rows.num_rows * key_bytes}, {outcomes.data(), rows.num_rows}, timeout_s);
    }
    return {said, outcomes};
}

std::shared_ptr<SlabPages> slab_pages_py(std::shared_ptr<PageIndex> index, int slot, const Input<uint8_t>& states,
                                         uint8_t cached, bool are_all) {
    const auto span = input_1d(states, "states");
    return std::make_shared<SlabPages>(std::move(index), slot, span, std::make_shared<const InputArray>(states.array),
                                       cached, are_all);
}

using FoundArrays = std::tuple<NumpyArray<int32_t>, NumpyArray<uint64_t>, NumpyArray<bool>>;

FoundArrays find_py(const SlabPages& pages, const Input<uint8_t>& keys) {
    const auto rows = input_rows(keys, "keys", any_length, key_bytes);
    auto frames = new_array<int32_t>(rows.num_rows);
    auto generations = new_array<uint64_t>(rows.num_rows);
    auto is_shown = new_array<bool>(rows.num_rows);
    {
        nb::gil_scoped_release released;
        pages.find({rows.data, rows.num_rows * key_bytes}, frames.data(), generations.data(), is_shown.data());
    }
    return {frames, generations, is_shown};
}

std::shared_ptr<StoreShortcut> store_shortcut_py(std::shared_ptr<SlabPages> pages, std::string_view scheme,
                                                 const nb::bytes& ns, const nb::bytes& scope, const nb::bytes& tag,
                                                 size_t max_keys) {
    const HashWrapper wrapper(scheme, input_bytes(ns, "namespace", key_bytes), input_bytes(scope, "scope", key_bytes),
                              key_bytes);
    return std::make_shared<StoreShortcut>(std::move(pages), wrapper, input_bytes(tag, "tag", StoreShortcut::tag_bytes),
                                           max_keys);
}

std::tuple<uint64_t, uint64_t, uint64_t> take_num_pages(Exchange& exchange) {
    const auto [looked_up, contains] = exchange.take_told();
    return {looked_up.num_there, contains.num_there, contains.num_missing};
}

std::vector<int64_t> serve_py(Exchange& exchange) {
    nb::gil_scoped_release released;
    return exchange.serve();
}

nb::object next_of_exchange(Exchange& exchange, int64_t number) {
    const auto message = exchange.next(number);
    return message ? bytes_of(std::span<const uint8_t>(*message)) : nb::none();
}

}  // namespace

void bind_exchange(nb::module_& m) {
    nb::class_<Wire>(m, "Wire")
        .def_ro_static("UNANSWERED", &Wire::unanswered)
        .def_ro_static("UNASKED", &Wire::unasked)
        .def(nb::init<int, size_t, size_t>(), nb::arg("fd"), nb::arg("max_message_bytes"), nb::arg("high_water_bytes"))
        .def_prop_ro("is_over", &Wire::is_over)
        .def_prop_ro("error", &Wire::error)
        .def_prop_ro("is_full", &Wire::is_full)
        .def_prop_ro("num_unsent", &Wire::num_unsent)
        .def_prop_ro("too_long", &Wire::too_long)
        .def("receive", alone(&Wire::receive))
        .def("next", &next_of_wire, nb::sig("def next(self) -> bytes | None"))
        .def("post", &post_py, nb::arg("frame"))
        .def("flush", alone(&Wire::flush))
        .def("look_up", &look_up_py, nb::arg("call"), nb::arg("op"), nb::arg("keys"), nb::arg("timeout_s"))
        .def("contains", &contains_py, nb::arg("call"), nb::arg("keys"), nb::arg("timeout_s"));
    nb::class_<Shortcut>(m, "Shortcut")
        .def("take", &Shortcut::take, nb::arg("number"))
        .def_prop_ro("last", &Shortcut::last)
        .def("stop", &Shortcut::stop);
    nb::class_<LookupShortcut, Shortcut>(m, "LookupShortcut")
        .def(nb::init<std::shared_ptr<PageIndex>, int>(), nb::arg("index"), nb::arg("slot"));
    nb::class_<SlabPages>(m, "SlabPages")
        .def(nb::new_(&slab_pages_py), nb::arg("index"), nb::arg("slot"), nb::arg("states"), nb::arg("cached"),
             nb::arg("are_all"))
        .def("find", &find_py, nb::arg("keys"))
        .def("stop", &SlabPages::stop);
    nb::class_<StoreShortcut, Shortcut>(m, "StoreShortcut")
        .def(nb::new_(&store_shortcut_py), nb::arg("pages"), nb::arg("scheme"), nb::arg("namespace"), nb::arg("scope"),
             nb::arg("tag"), nb::arg("max_keys"));
    nb::class_<Exchange>(m, "Exchange")
        .def(nb::init<size_t>(), nb::arg("max_keys"))
        .def("fileno", &Exchange::fd)
        .def("close", &Exchange::close)
        .def("add", &Exchange::add, nb::arg("wire"), nb::arg("shortcut").none())
        .def("remove", &Exchange::remove, nb::arg("number"))
        .def("listen", &Exchange::listen, nb::arg("number"), nb::arg("wanted"))
        .def("serve", &serve_py)
        .def("next", &next_of_exchange, nb::arg("number"), nb::sig("def next(self, number: int) -> bytes | None"))
        .def("settle", &Exchange::settle, nb::arg("number"))
        .def("take_num_pages", &take_num_pages);
}

}  // namespace cachesvc
