// Which tokens one forward pass computes and where their KV lies: the checked, flattened form of a batch.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "row_math.hpp"

namespace cachesvc {

class RowBatch {
public:
    // Sequence s has rows [row_offsets[s], row_offsets[s + 1]) at consecutive positions from starts[s] on, and pages
    // page_tables[table_offsets[s] .. table_offsets[s + 1]). Throws std::invalid_argument when a sequence has no row,
    // a negative start, too few pages, or a page outside [0, num_pages).
    RowBatch(std::vector<int64_t> row_offsets, std::vector<int64_t> starts, std::vector<int64_t> table_offsets,
             std::span<const int32_t> page_tables, int64_t page_size, int64_t num_pages);

    size_t num_rows() const { return positions_.size(); }
    size_t num_slots() const { return num_slots_; }
    int64_t end_position() const { return end_position_; }
    const int64_t* positions() const { return positions_.data(); }
    const int64_t* slots() const { return slots_.data(); }
    AttentionBatch attention() const;

    size_t num_sequences() const { return starts_.size(); }
    std::vector<int64_t> row_counts() const;
    // Slots of positions [0, end) of a sequence, its rows' own at the end. Throws std::out_of_range.
    std::vector<int64_t> context_slots(size_t sequence) const;

    // Where the last row of each of the named sequences stands. Throws std::out_of_range for a sequence not in the batch.
    std::vector<int64_t> last_row_numbers(const std::vector<size_t>& sequences) const;
    // The batch of the last row of each of the named sequences, in that order.
    RowBatch last_rows(const std::vector<size_t>& sequences) const;

private:
    void expect_sequence(size_t s) const;
    void check_sequence(size_t s, int64_t num_pages) const;
    void place_rows();

    std::vector<int64_t> row_offsets_, starts_, table_offsets_;
    std::vector<int32_t> page_tables_;
    int64_t page_size_;
    size_t num_slots_;
    int64_t end_position_ = 0;
    std::vector<int64_t> positions_, slots_;  // [num_rows]
};

}  // namespace cachesvc
