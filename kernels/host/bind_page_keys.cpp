#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <optional>
#include <string>

#include "arrays.hpp"
#include "bindings.hpp"
#include "page_keys.hpp"
#include "sha256.hpp"

namespace nb = nanobind;

namespace cachesvc {
namespace {

NumpyArray<uint8_t> chain_keys_py(nb::bytes ns, nb::bytes scope, const Input<uint32_t>& tokens, int64_t page_size,
                                  std::optional<nb::bytes> previous) {
    const uint8_t* ns_bytes = input_bytes(ns, "namespace", key_bytes);
    const uint8_t* scope_bytes = input_bytes(scope, "scope", key_bytes);
    const auto token_span = input_1d(tokens, "tokens");
    if (page_size < 1) throw nb::value_error("page_size: expected at least 1 token");
    const uint8_t* previous_bytes = previous ? input_bytes(*previous, "previous", key_bytes) : nullptr;
    const size_t num_pages = token_span.size() / static_cast<size_t>(page_size);
    auto keys = new_array<uint8_t>(num_pages, key_bytes);
    nb::gil_scoped_release released;
    chain_keys(ns_bytes, scope_bytes, previous_bytes, token_span.data(), static_cast<size_t>(page_size), num_pages,
               keys.data());
    return keys;
}

NumpyArray<uint8_t> wrap_hashes_py(std::string_view scheme, nb::bytes ns, nb::bytes scope,
                                   const Input<uint8_t>& hashes) {
    const uint8_t* ns_bytes = input_bytes(ns, "namespace", key_bytes);
    const uint8_t* scope_bytes = input_bytes(scope, "scope", key_bytes);
    const auto rows = input_rows(hashes, "hashes");
    auto keys = new_array<uint8_t>(rows.num_rows, key_bytes);
    nb::gil_scoped_release released;
    wrap_hashes(scheme, ns_bytes, scope_bytes, rows.data, rows.row_length, rows.num_rows, keys.data());
    return keys;
}

// What is said to be a hash and is none, for people: the beginning of it.
[[noreturn]] void raise_no_hash(Py_ssize_t index, nb::handle text) {
    const auto ascii = nb::steal<nb::str>(PyObject_ASCII(text.ptr()));
    const std::string shown = std::string(ascii.c_str()).substr(0, 80);
    throw nb::value_error(("hashes[" + std::to_string(index) + "]: expected " + std::to_string(hex_digits) +
                           " hexadecimal digits, got " + shown)
                              .c_str());
}

// As they lie in memory, most of them in no cache any more: a few ahead are asked for.
constexpr Py_ssize_t texts_ahead = 8;

NumpyArray<uint8_t> hashes_from_hex_py(const nb::list& texts) {
    const Py_ssize_t num_texts = PyList_Size(texts.ptr());
    auto hashes = new_array<uint8_t>(static_cast<size_t>(num_texts), key_bytes);
    for (Py_ssize_t i = 0; i < num_texts; ++i) {
        if (i + texts_ahead < num_texts) {
            const auto* ahead = reinterpret_cast<const char*>(PyList_GetItem(texts.ptr(), i + texts_ahead));
            __builtin_prefetch(ahead);
            __builtin_prefetch(ahead + hex_digits);
        }
        PyObject* text = PyList_GetItem(texts.ptr(), i);
        if (!PyUnicode_Check(text)) {
            const std::string kind = nb::type_name(nb::handle(text).type()).c_str();
            throw nb::type_error(("hashes[" + std::to_string(i) + "]: expected str, got " + kind).c_str());
        }
        Py_ssize_t length = 0;
        const char* digits = PyUnicode_AsUTF8AndSize(text, &length);
        if (!digits) PyErr_Clear();  // a lone surrogate is no digit either
        uint8_t* out = hashes.data() + static_cast<size_t>(i) * key_bytes;
        if (!digits || length != hex_digits || !read_hex(digits, out)) raise_no_hash(i, text);
    }
    return hashes;
}

nb::bytes sha256_py(nb::bytes data) {
    uint8_t digest[Sha256::digest_bytes];
    Sha256 hash;
    hash.update(data.c_str(), data.size());
    hash.finish(digest);
    return nb::bytes(reinterpret_cast<const char*>(digest), sizeof(digest));
}

}  // namespace

void bind_page_keys(nb::module_& m) {
    m.def("chain_keys", &chain_keys_py, nb::arg("namespace"), nb::arg("scope"), nb::arg("tokens"), nb::arg("page_size"),
          nb::arg("previous").none());
    m.def("wrap_hashes", &wrap_hashes_py, nb::arg("scheme"), nb::arg("namespace"), nb::arg("scope"), nb::arg("hashes"));
    m.def("accepted_schemes", &accepted_schemes);
    m.def("hashes_from_hex", &hashes_from_hex_py, nb::arg("texts"),
          nb::sig("def hashes_from_hex(texts: list[str]) -> numpy.typing.NDArray[numpy.uint8]"));
    m.def("sha256", &sha256_py, nb::arg("data"));
    nb::enum_<Sha256Path>(m, "Sha256Path")
        .value("automatic", Sha256Path::automatic)
        .value("portable", Sha256Path::portable)
        .value("sha_ni", Sha256Path::sha_ni);
    m.def("sha256_path", &sha256_path);
    m.def("sha256_path_supported", &sha256_path_supported, nb::arg("path"));
    m.def("select_sha256_path", &select_sha256_path, nb::arg("path"), "For tests only: the path of every later hash.");
}

}  // namespace cachesvc
