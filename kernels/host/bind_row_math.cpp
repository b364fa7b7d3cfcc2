#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <string>

#include "arrays.hpp"
#include "bindings.hpp"
#include "row_batch.hpp"
#include "row_math.hpp"

namespace nb = nanobind;

namespace cachesvc {
namespace {

using Matrix = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A writable [rows, columns] of float32; a wrong dtype or layout is already refused by the type.
float* output_matrix(const Matrix& matrix, const char* name, size_t rows, size_t columns) {
    if (matrix.shape(0) != rows || matrix.shape(1) != columns) {
        const std::string text = std::string(name) + ": expected shape " + detail::shape_text({rows, columns}) + ", got " +
                                 detail::shape_text({matrix.shape(0), matrix.shape(1)});
        throw nb::value_error(text.c_str());
    }
    return matrix.data();
}

void expect(bool holds, const std::string& text) {
    if (!holds) throw nb::value_error(text.c_str());
}

void expect_multiple(size_t value, size_t of, const char* name) {
    expect(value > 0 && value % of == 0,
           std::string(name) + ": expected a multiple of " + std::to_string(of) + ", got " + std::to_string(value));
}

// One layer of a device pool. Does not own the memory.
struct PoolLayer {
    KvPool pool;
    size_t num_slots;
};

PoolLayer make_pool_layer(uint64_t keys, uint64_t values, size_t num_slots, size_t num_kv_heads, size_t head_dim,
                          KvType type) {
    expect_multiple(head_dim, 32, "head_dim");
    expect(keys != 0 && values != 0 && num_slots > 0 && num_kv_heads > 0, "a pool layer needs memory, slots and heads");
    return {{reinterpret_cast<uint8_t*>(keys), reinterpret_cast<uint8_t*>(values), type, num_kv_heads, head_dim},
            num_slots};
}

PackedMatrix pack_py(const RowMath& math, const Input<float>& weight) {
    const auto rows = input_rows(weight, "weight");
    expect(rows.num_rows > 0 && rows.row_length > 0, "weight: expected at least one row and one column");
    nb::gil_scoped_release released;
    return PackedMatrix(rows.data, rows.num_rows, rows.row_length, math.kernels().panel_columns);
}

void linear_py(RowMath& math, const Input<float>& x, const PackedMatrix& weight, const Matrix& out, bool accumulate) {
    const auto rows = input_rows(x, "x", any_length, weight.k());
    float* y = output_matrix(out, "out", rows.num_rows, weight.n());
    expect(weight.panel_columns() == math.kernels().panel_columns, "weight: packed for other instructions");
    nb::gil_scoped_release released;
    math.linear(rows.data, rows.num_rows, weight, y, accumulate);
}

void rms_norm_py(RowMath& math, const Input<float>& x, const Input<float>& weight, float epsilon, const Matrix& out) {
    const auto rows = input_rows(x, "x");
    expect_multiple(rows.row_length, 16, "width of x");
    const auto scale = input_1d(weight, "weight", rows.row_length);
    float* y = output_matrix(out, "out", rows.num_rows, rows.row_length);
    nb::gil_scoped_release released;
    math.rms_norm({rows.data, scale.data(), y, rows.row_length, epsilon}, rows.num_rows);
}

void silu_and_multiply_py(RowMath& math, const Input<float>& x, const Matrix& out) {
    const auto rows = input_rows(x, "x");
    expect_multiple(rows.row_length, 32, "width of x");
    float* y = output_matrix(out, "out", rows.num_rows, rows.row_length / 2);
    nb::gil_scoped_release released;
    math.silu_and_multiply(rows.data, y, rows.row_length / 2, rows.num_rows);
}

void expect_same_pool(const RowBatch& batch, const PoolLayer& layer) {
    expect(batch.num_slots() == layer.num_slots, "pool: it has " + std::to_string(layer.num_slots) +
                                                     " slots, the batch was made for " +
                                                     std::to_string(batch.num_slots()));
}

void rotary_and_store_py(RowMath& math, const Matrix& qkv, const RowBatch& batch, const PoolLayer& layer,
                         const Input<float>& cosines, const Input<float>& sines, size_t num_heads) {
    const KvPool& pool = layer.pool;
    float* rows = output_matrix(qkv, "qkv", batch.num_rows(), (num_heads + 2 * pool.num_kv_heads) * pool.head_dim);
    const auto cosine_rows = input_rows(cosines, "cosines", any_length, pool.head_dim / 2);
    const auto sine_rows = input_rows(sines, "sines", cosine_rows.num_rows, pool.head_dim / 2);
    expect(batch.end_position() <= static_cast<int64_t>(cosine_rows.num_rows),
           "batch: a token at position " + std::to_string(batch.end_position() - 1) + ", the rotary table ends at " +
               std::to_string(cosine_rows.num_rows));
    expect_same_pool(batch, layer);
    nb::gil_scoped_release released;
    math.rotary_and_store({rows, cosine_rows.data, sine_rows.data, batch.positions(), batch.slots(), pool, num_heads},
                          batch.num_rows());
}

void attention_py(RowMath& math, const Input<float>& qkv, const RowBatch& batch, const PoolLayer& layer,
                  size_t num_heads, float scale, const Matrix& out) {
    const KvPool& pool = layer.pool;
    const auto queries =
        input_rows(qkv, "qkv", batch.num_rows(), (num_heads + 2 * pool.num_kv_heads) * pool.head_dim);
    float* rows = output_matrix(out, "out", batch.num_rows(), num_heads * pool.head_dim);
    expect_multiple(num_heads, pool.num_kv_heads, "num_heads");
    expect(num_heads / pool.num_kv_heads <= max_attention_group, "num_heads: more than 32 for each KV head");
    expect_same_pool(batch, layer);
    nb::gil_scoped_release released;
    math.attention(batch.attention(), queries.data, queries.row_length, num_heads, pool, scale, rows);
}

NumpyArray<int64_t> copied(const int64_t* values, size_t count) {
    auto array = new_array<int64_t>(count);
    std::memcpy(array.data(), values, count * sizeof(int64_t));
    return array;
}

RowBatch make_batch(const Input<int64_t>& row_offsets, const Input<int64_t>& starts, const Input<int64_t>& table_offsets,
                    const Input<int32_t>& page_tables, int64_t page_size, int64_t num_pages) {
    const auto start_span = input_1d(starts, "starts");
    const auto rows = input_1d(row_offsets, "row_offsets", start_span.size() + 1);
    const auto tables = input_1d(table_offsets, "table_offsets", start_span.size() + 1);
    return RowBatch({rows.begin(), rows.end()}, {start_span.begin(), start_span.end()}, {tables.begin(), tables.end()},
                    input_1d(page_tables, "page_tables"), page_size, num_pages);
}

}  // namespace

void bind_row_math(nb::module_& m) {
    nb::enum_<KvType>(m, "KvType")
        .value("float32", KvType::float32)
        .value("bfloat16", KvType::bfloat16)
        .value("float16", KvType::float16);
    nb::class_<PackedMatrix>(m, "PackedMatrix").def_prop_ro("n", &PackedMatrix::n).def_prop_ro("k", &PackedMatrix::k);
    nb::class_<PoolLayer>(m, "PoolLayer")
        .def("__init__",
             [](PoolLayer* self, uint64_t keys, uint64_t values, size_t num_slots, size_t num_kv_heads, size_t head_dim,
                KvType type) {
                 new (self) PoolLayer(make_pool_layer(keys, values, num_slots, num_kv_heads, head_dim, type));
             },
             nb::arg("keys"), nb::arg("values"), nb::arg("num_slots"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
             nb::arg("type"));
    nb::class_<RowBatch>(m, "RowBatch")
        .def("__init__",
             [](RowBatch* self, const Input<int64_t>& row_offsets, const Input<int64_t>& starts,
                const Input<int64_t>& table_offsets, const Input<int32_t>& page_tables, int64_t page_size,
                int64_t num_pages) {
                 new (self) RowBatch(make_batch(row_offsets, starts, table_offsets, page_tables, page_size, num_pages));
             },
             nb::arg("row_offsets"), nb::arg("starts"), nb::arg("table_offsets"), nb::arg("page_tables"),
             nb::arg("page_size"), nb::arg("num_pages"))
        .def_prop_ro("num_rows", &RowBatch::num_rows)
        .def("positions", [](const RowBatch& batch) { return copied(batch.positions(), batch.num_rows()); })
        .def("slots", [](const RowBatch& batch) { return copied(batch.slots(), batch.num_rows()); })
        .def_prop_ro("num_sequences", &RowBatch::num_sequences)
        .def("row_counts",
             [](const RowBatch& batch) {
                 const auto counts = batch.row_counts();
                 return copied(counts.data(), counts.size());
             })
        .def("context_slots",
             [](const RowBatch& batch, size_t sequence) {
                 const auto slots = batch.context_slots(sequence);
                 return copied(slots.data(), slots.size());
             },
             nb::arg("sequence"))
        .def("last_row_numbers",
             [](const RowBatch& batch, const std::vector<size_t>& sequences) {
                 const auto rows = batch.last_row_numbers(sequences);
                 return copied(rows.data(), rows.size());
             },
             nb::arg("sequences"))
        .def("last_rows", &RowBatch::last_rows, nb::arg("sequences"));
    nb::class_<RowMath>(m, "RowMath")
        .def(nb::init<size_t, std::string_view>(), nb::arg("num_threads"), nb::arg("instructions"))
        .def_prop_ro("instructions", [](const RowMath& math) { return std::string(math.kernels().name); })
        .def_prop_ro("num_threads", &RowMath::num_threads)
        .def("pack", &pack_py, nb::arg("weight"))
        .def("linear", &linear_py, nb::arg("x"), nb::arg("weight"), nb::arg("out").noconvert(), nb::arg("accumulate"))
        .def("rms_norm", &rms_norm_py, nb::arg("x"), nb::arg("weight"), nb::arg("epsilon"), nb::arg("out").noconvert())
        .def("silu_and_multiply", &silu_and_multiply_py, nb::arg("x"), nb::arg("out").noconvert())
        .def("rotary_and_store", &rotary_and_store_py, nb::arg("qkv").noconvert(), nb::arg("batch"), nb::arg("pool"),
             nb::arg("cosines"), nb::arg("sines"), nb::arg("num_heads"))
        .def("attention", &attention_py, nb::arg("qkv"), nb::arg("batch"), nb::arg("pool"), nb::arg("num_heads"),
             nb::arg("scale"), nb::arg("out").noconvert());
    m.def("supported_row_instructions", [] { return std::string(supported_row_instructions()); });
}

}  // namespace cachesvc
