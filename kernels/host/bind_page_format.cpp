#include "arrays.hpp"
#include "bindings.hpp"
#include "page_checksum.hpp"
#include "page_format.hpp"
#include "page_keys.hpp"

namespace nb = nanobind;

namespace cachesvc {
namespace {

PageBatch page_batch(const Input<uint8_t>& ids, const nb::bytes& ns, const Input<uint64_t>& addresses,
                     size_t payload_bytes) {
    const auto id_rows = input_rows(ids, "ids", any_length, object_id_bytes);
    return {id_rows.num_rows, id_rows.data, input_bytes(ns, "namespace", key_bytes),
            input_1d(addresses, "addresses", id_rows.num_rows).data(), payload_bytes};
}

NumpyArray<uint8_t> encode_headers_py(const Input<uint8_t>& ids, nb::bytes ns, const Input<uint64_t>& addresses,
                                      size_t payload_bytes, size_t header_bytes) {
    const PageBatch pages = page_batch(ids, ns, addresses, payload_bytes);
    if (header_bytes != 128 && header_bytes != 4096) throw nb::value_error("header_bytes: expected 128 or 4096");
    auto headers = new_array<uint8_t>(pages.num_pages, header_bytes);
    nb::gil_scoped_release released;
    encode_headers(pages, header_bytes, headers.data());
    return headers;
}

NumpyArray<uint8_t> check_pages_py(const Input<uint8_t>& headers, const Input<uint8_t>& ids, nb::bytes ns,
                                   const Input<uint64_t>& addresses, size_t payload_bytes) {
    const PageBatch pages = page_batch(ids, ns, addresses, payload_bytes);
    const auto header_rows = input_rows(headers, "headers", pages.num_pages);
    if (header_rows.row_length < page_header_bytes) throw nb::value_error("headers: expected at least 128 bytes a row");
    auto checks = new_array<uint8_t>(pages.num_pages);
    nb::gil_scoped_release released;
    check_pages(pages, header_rows.row_length, header_rows.data, reinterpret_cast<PageCheck*>(checks.data()));
    return checks;
}

NumpyArray<uint8_t> encode_encoded_headers_py(const Input<uint8_t>& ids, nb::bytes ns,
                                              const Input<uint64_t>& addresses, const Input<uint64_t>& stored_bytes,
                                              const Input<uint32_t>& codecs, size_t raw_bytes, size_t header_bytes) {
    const PageBatch pages = page_batch(ids, ns, addresses, raw_bytes);
    if (header_bytes != 128 && header_bytes != 4096) throw nb::value_error("header_bytes: expected 128 or 4096");
    const EncodedBatch batch{pages, input_1d(stored_bytes, "stored_bytes", pages.num_pages).data(),
                             input_1d(codecs, "codecs", pages.num_pages).data()};
    auto headers = new_array<uint8_t>(pages.num_pages, header_bytes);
    nb::gil_scoped_release released;
    encode_encoded_headers(batch, header_bytes, headers.data());
    return headers;
}

nb::tuple check_encoded_py(const Input<uint8_t>& headers, const Input<uint8_t>& ids, nb::bytes ns,
                           const Input<uint64_t>& addresses, const Input<uint64_t>& available_bytes,
                           size_t raw_bytes) {
    const PageBatch pages = page_batch(ids, ns, addresses, raw_bytes);
    const auto header_rows = input_rows(headers, "headers", pages.num_pages);
    if (header_rows.row_length < page_header_bytes) throw nb::value_error("headers: expected at least 128 bytes a row");
    const EncodedBatch batch{pages, input_1d(available_bytes, "available_bytes", pages.num_pages).data(), nullptr};
    auto checks = new_array<uint8_t>(pages.num_pages);
    auto codecs = new_array<uint32_t>(pages.num_pages);
    auto stored_bytes = new_array<uint64_t>(pages.num_pages);
    {
        nb::gil_scoped_release released;
        check_encoded(batch, header_rows.row_length, header_rows.data,
                      {reinterpret_cast<PageCheck*>(checks.data()), codecs.data(), stored_bytes.data()});
    }
    return nb::make_tuple(checks, codecs, stored_bytes);
}

nb::tuple header_claims_py(const Input<uint8_t>& headers) {
    const auto rows = input_rows(headers, "headers");
    if (rows.row_length < page_header_bytes) throw nb::value_error("headers: expected at least 128 bytes a row");
    auto namespaces = new_array<uint8_t>(rows.num_rows, key_bytes);
    auto raw_bytes = new_array<uint64_t>(rows.num_rows);
    header_claims(rows.data, rows.num_rows, rows.row_length, namespaces.data(), raw_bytes.data());
    return nb::make_tuple(namespaces, raw_bytes);
}

NumpyArray<uint8_t> object_ids_py(const Input<uint8_t>& keys, uint16_t pool, uint16_t rank) {
    const auto key_rows = input_rows(keys, "keys", any_length, key_bytes);
    auto ids = new_array<uint8_t>(key_rows.num_rows, object_id_bytes);
    nb::gil_scoped_release released;
    object_ids(key_rows.data, key_rows.num_rows, pool, rank, ids.data());
    return ids;
}

NumpyArray<uint8_t> xxh3_128_py(const Input<uint64_t>& addresses, const Input<uint64_t>& lengths) {
    const auto address_span = input_1d(addresses, "addresses");
    const auto length_span = input_1d(lengths, "lengths", address_span.size());
    auto checksums = new_array<uint8_t>(address_span.size(), checksum_bytes);
    nb::gil_scoped_release released;
    checksum_ranges(address_span.data(), length_span.data(), address_span.size(), checksums.data());
    return checksums;
}

uint32_t crc32c_py(nb::bytes data) { return crc32c(reinterpret_cast<const uint8_t*>(data.c_str()), data.size()); }

}  // namespace

void bind_page_format(nb::module_& m) {
    nb::enum_<PageCheck>(m, "PageCheck")
        .value("ok", PageCheck::ok)
        .value("foreign", PageCheck::foreign)
        .value("newer", PageCheck::newer)
        .value("bad_header", PageCheck::bad_header)
        .value("wrong_key", PageCheck::wrong_key)
        .value("wrong_length", PageCheck::wrong_length)
        .value("bad_checksum", PageCheck::bad_checksum);
    m.def("encode_headers", &encode_headers_py, nb::arg("ids"), nb::arg("namespace"), nb::arg("addresses"),
          nb::arg("payload_bytes"), nb::arg("header_bytes"));
    m.def("check_pages", &check_pages_py, nb::arg("headers"), nb::arg("ids"), nb::arg("namespace"),
          nb::arg("addresses"), nb::arg("payload_bytes"));
    m.def("encode_encoded_headers", &encode_encoded_headers_py, nb::arg("ids"), nb::arg("namespace"),
          nb::arg("addresses"), nb::arg("stored_bytes"), nb::arg("codecs"), nb::arg("raw_bytes"),
          nb::arg("header_bytes"));
    m.def("check_encoded", &check_encoded_py,
          nb::sig("def check_encoded(headers: numpy.typing.NDArray[numpy.uint8], ids: numpy.typing.NDArray[numpy.uint8], "
                  "namespace: bytes, addresses: numpy.typing.NDArray[numpy.uint64], "
                  "available_bytes: numpy.typing.NDArray[numpy.uint64], raw_bytes: int) -> "
                  "tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint32], "
                  "numpy.typing.NDArray[numpy.uint64]]"),
          nb::arg("headers"), nb::arg("ids"), nb::arg("namespace"), nb::arg("addresses"), nb::arg("available_bytes"),
          nb::arg("raw_bytes"));
    m.def("header_claims", &header_claims_py,
          nb::sig("def header_claims(headers: numpy.typing.NDArray[numpy.uint8]) -> "
                  "tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint64]]"),
          nb::arg("headers"));
    m.def("object_ids", &object_ids_py, nb::arg("keys"), nb::arg("pool"), nb::arg("rank"));
    m.def("xxh3_128", &xxh3_128_py, nb::arg("addresses"), nb::arg("lengths"));
    m.def("crc32c", &crc32c_py, nb::arg("data"));
    m.def("allow_avx2_checksum", &allow_avx2_checksum, nb::arg("is_allowed"), "For tests only.");
}

}  // namespace cachesvc
