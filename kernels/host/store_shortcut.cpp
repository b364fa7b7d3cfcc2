#include "store_shortcut.hpp"

#include <algorithm>
#include <cstring>

namespace cachesvc {
namespace {

constexpr size_t group_keys = 128;  // what is missing in one is found before the next is worked through

}  // namespace

bool SlabPages::have_all(std::span<const uint8_t> keys, FoundPlaces& found) const {
    if (is_stopped_) return false;
    found.look_up(*index_, keys, -1);
    for (size_t i = 0; i < found.slots.size(); ++i) {
        const auto frame = static_cast<size_t>(found.frames[i]);
        if (found.slots[i] != slot_ || frame >= states_.size() || load_relaxed(states_[frame]) != cached_) return false;
    }
    return true;
}

StoreShortcut::StoreShortcut(std::shared_ptr<const SlabPages> pages, const HashWrapper& wrapper, const uint8_t* tag,
                             size_t max_keys)
    : Shortcut(Question::contains), pages_(std::move(pages)), wrapper_(wrapper), max_keys_(max_keys) {
    std::copy_n(tag, tag_bytes, tag_.begin());
}

size_t StoreShortcut::answer_open(std::span<const uint8_t> message, size_t max_keys, std::vector<uint8_t>& stream) {
    ContainsAsked asked;
    if (!parse_contains(message, asked) || asked.call <= last()) return 0;
    const size_t num_pages = asked.keys.size() / key_bytes;
    if (num_pages > std::min(max_keys, max_keys_)) return 0;
    // The last page first: most chains that are not there in full end early.
    if (!has_all(asked.keys.last(key_bytes))) return 0;
    for (auto left = asked.keys; !left.empty();) {
        const auto group = left.first(std::min(left.size(), group_keys * key_bytes));
        if (!has_all(group)) return 0;
        left = left.subspan(group.size());
    }
    take(asked.call);
    write_all_held(stream, asked.call, num_pages);
    return num_pages;
}

bool StoreShortcut::has_all(std::span<const uint8_t> client_keys) {
    const size_t num_keys = client_keys.size() / key_bytes;
    keys_.resize(client_keys.size());
    wrapper_.wrap(client_keys.data(), num_keys, keys_.data());
    for (size_t i = 1; i <= num_keys; ++i) std::memcpy(&keys_[i * key_bytes - tag_bytes], tag_.data(), tag_bytes);
    return pages_->have_all(keys_, found_);
}

}  // namespace cachesvc
