#include "row_batch.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace cachesvc {
namespace {

void expect(bool holds, size_t sequence, const std::string& text) {
    if (!holds) throw std::invalid_argument("sequence " + std::to_string(sequence) + ": " + text);
}

}  // namespace

RowBatch::RowBatch(std::vector<int64_t> row_offsets, std::vector<int64_t> starts, std::vector<int64_t> table_offsets,
                   std::span<const int32_t> page_tables, int64_t page_size, int64_t num_pages)
    : row_offsets_(std::move(row_offsets)),
      starts_(std::move(starts)),
      table_offsets_(std::move(table_offsets)),
      page_tables_(page_tables.begin(), page_tables.end()),
      page_size_(page_size) {
    if (page_size < 1 || num_pages < 1) throw std::invalid_argument("page_size and num_pages must be positive");
    num_slots_ = static_cast<size_t>(page_size * num_pages);
    if (row_offsets_.front() != 0 || table_offsets_.front() != 0 ||
        table_offsets_.back() != static_cast<int64_t>(page_tables_.size())) {
        throw std::invalid_argument("offsets: expected to begin at 0 and to end at the length of page_tables");
    }
    for (size_t s = 0; s < starts_.size(); ++s) check_sequence(s, num_pages);
    place_rows();
}

void RowBatch::check_sequence(size_t s, int64_t num_pages) const {
    const int64_t rows = row_offsets_[s + 1] - row_offsets_[s];
    const int64_t pages = table_offsets_[s + 1] - table_offsets_[s];
    expect(rows > 0, s, "no tokens");
    expect(pages >= 0 && table_offsets_[s + 1] <= table_offsets_.back(), s, "page table offsets must ascend");
    expect(starts_[s] >= 0, s, "start " + std::to_string(starts_[s]) + " is negative");
    const int64_t needed = (starts_[s] + rows + page_size_ - 1) / page_size_;
    expect(pages >= needed, s,
           "its tokens end in page " + std::to_string(needed) + " of a table of " + std::to_string(pages));
    for (int64_t i = table_offsets_[s]; i < table_offsets_[s] + needed; ++i) {
        const int32_t page = page_tables_[static_cast<size_t>(i)];
        expect(page >= 0 && page < num_pages, s,
               "page " + std::to_string(page) + " is outside the pool of " + std::to_string(num_pages));
    }
}

void RowBatch::place_rows() {
    const size_t rows = static_cast<size_t>(row_offsets_.back());
    positions_.reserve(rows);
    slots_.reserve(rows);
    for (size_t s = 0; s < starts_.size(); ++s) {
        const int32_t* table = page_tables_.data() + table_offsets_[s];
        const int64_t end = starts_[s] + row_offsets_[s + 1] - row_offsets_[s];
        for (int64_t position = starts_[s]; position < end; ++position) {
            positions_.push_back(position);
            slots_.push_back(table[position / page_size_] * page_size_ + position % page_size_);
        }
        end_position_ = std::max(end_position_, end);
    }
}

AttentionBatch RowBatch::attention() const {
    return {row_offsets_.data(), starts_.data(),  table_offsets_.data(), page_tables_.data(),
            starts_.size(),      static_cast<size_t>(page_size_)};
}

void RowBatch::expect_sequence(size_t s) const {
    if (s >= starts_.size()) throw std::out_of_range("sequence " + std::to_string(s) + " is not in the batch");
}

std::vector<int64_t> RowBatch::row_counts() const {
    std::vector<int64_t> counts;
    for (size_t s = 0; s < starts_.size(); ++s) counts.push_back(row_offsets_[s + 1] - row_offsets_[s]);
    return counts;
}

std::vector<int64_t> RowBatch::context_slots(size_t sequence) const {
    expect_sequence(sequence);
    const int32_t* table = page_tables_.data() + table_offsets_[sequence];
    const int64_t end = starts_[sequence] + row_offsets_[sequence + 1] - row_offsets_[sequence];
    std::vector<int64_t> slots(static_cast<size_t>(end));
    for (int64_t p = 0; p < end; ++p) slots[static_cast<size_t>(p)] = table[p / page_size_] * page_size_ + p % page_size_;
    return slots;
}

std::vector<int64_t> RowBatch::last_row_numbers(const std::vector<size_t>& sequences) const {
    std::vector<int64_t> rows;
    rows.reserve(sequences.size());
    for (size_t s : sequences) {
        expect_sequence(s);
        rows.push_back(row_offsets_[s + 1] - 1);
    }
    return rows;
}

RowBatch RowBatch::last_rows(const std::vector<size_t>& sequences) const {
    std::vector<int64_t> rows{0}, starts, tables{0};
    std::vector<int32_t> pages;
    const auto numbers = last_row_numbers(sequences);
    for (size_t i = 0; i < sequences.size(); ++i) {
        const size_t s = sequences[i];
        rows.push_back(static_cast<int64_t>(i) + 1);
        starts.push_back(positions_[static_cast<size_t>(numbers[i])]);
        pages.insert(pages.end(), page_tables_.begin() + table_offsets_[s], page_tables_.begin() + table_offsets_[s + 1]);
        tables.push_back(static_cast<int64_t>(pages.size()));
    }
    return RowBatch(std::move(rows), std::move(starts), std::move(tables), pages, page_size_,
                    static_cast<int64_t>(num_slots_) / page_size_);
}

}  // namespace cachesvc
