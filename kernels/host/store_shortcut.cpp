#include "store_shortcut.hpp"

#include <algorithm>
#include <cstring>

namespace cachesvc {
namespace {

constexpr size_t group_keys = 128;  // what is missing in one is found before the next is worked through

}  // namespace

void SlabPages::find(std::span<const uint8_t> keys, int32_t* frames, uint64_t* generations, bool* is_shown) const {
    const size_t num_keys = keys.size() / key_bytes;
    std::vector<int16_t> slots(num_keys);
    index_->lookup(keys.data(), num_keys, -1, {slots.data(), frames, generations});
    for (size_t i = 0; i < num_keys; ++i) {
        is_shown[i] = slots[i] != PlaceTable::no_slot;
        if (!is_cached(slots[i], frames[i])) frames[i] = -1;
    }
}

bool SlabPages::tell(std::span<const uint8_t> keys, FoundPlaces& found, uint8_t* outcomes) const {
    if (is_stopped_) return false;
    found.look_up(*index_, keys, -1);
    for (size_t i = 0; i < found.slots.size(); ++i) {
        const bool is_there = is_cached(found.slots[i], found.frames[i]);
        const bool is_nowhere = found.slots[i] == PlaceTable::no_slot && are_all_;
        if (!is_there && !is_nowhere) return false;
        outcomes[i] = is_there ? outcome_ok : outcome_miss;
    }
    return true;
}

StoreShortcut::StoreShortcut(std::shared_ptr<const SlabPages> pages, const HashWrapper& wrapper, const uint8_t* tag,
                             size_t max_keys)
    : Shortcut(Question::contains), pages_(std::move(pages)), wrapper_(wrapper), max_keys_(max_keys) {
    std::copy_n(tag, tag_bytes, tag_.begin());
}

Told StoreShortcut::answer_open(std::span<const uint8_t> message, size_t max_keys, std::vector<uint8_t>& stream) {
    ContainsAsked asked;
    if (!parse_contains(message, asked) || asked.call <= last()) return {};
    const size_t num_pages = asked.keys.size() / key_bytes;
    if (num_pages > std::min(max_keys, max_keys_)) return {};
    outcomes_.resize(num_pages);
    // The last page first: most chains that are not there in full end early.
    if (!pages_->are_all() && !tell(asked.keys.last(key_bytes), &outcomes_.back())) return {};
    for (size_t first = 0; first < num_pages; first += group_keys) {
        const size_t count = std::min(group_keys, num_pages - first);
        if (!tell(asked.keys.subspan(first * key_bytes, count * key_bytes), &outcomes_[first])) return {};
    }
    take(asked.call);
    write_held(stream, {asked.call, outcomes_});
    const auto num_there = static_cast<uint64_t>(std::ranges::count(outcomes_, outcome_ok));
    return {.num_there = num_there, .num_missing = num_pages - num_there};
}

bool StoreShortcut::tell(std::span<const uint8_t> client_keys, uint8_t* outcomes) {
    const size_t num_keys = client_keys.size() / key_bytes;
    keys_.resize(client_keys.size());
    wrapper_.wrap(client_keys.data(), num_keys, keys_.data());
    for (size_t i = 1; i <= num_keys; ++i) std::memcpy(&keys_[i * key_bytes - tag_bytes], tag_.data(), tag_bytes);
    return pages_->tell(keys_, found_, outcomes);
}

}  // namespace cachesvc
