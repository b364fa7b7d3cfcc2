// One frame's record in a region's directory, and the steps of its reader and writer protocol.
//
// DESIGN. Record and bytes of a frame form a sequence lock across processes. The generation is even while they are
// stable and odd while they are written; 0 means never written; it only grows as long as the memory lives.
//   writer  W1 even -> odd, fence   W2 record and bytes   W3 (each copying thread) fence   W4 store even, release
//   reader  R1 load, acquire; odd = miss   R2 copy   R3 acquire fence   R4 load again; changed = throw the copy away
// A reader never blocks a writer and a writer that dies leaves an odd generation: a miss. All fields are read and
// written as relaxed atomics, so that only the frames' bytes race, and those are thrown away by R4. NOTE: tried on
// x86-64 only.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cachesvc {

using KeyWords = std::array<uint64_t, 4>;

inline KeyWords key_words(const uint8_t key[32]) {
    KeyWords words;
    std::memcpy(words.data(), key, sizeof(words));
    return words;
}

struct FrameRecord {
    uint64_t generation;
    uint64_t key[4];
    uint32_t depth;  // pages before this one on its path
    uint32_t flags;
    uint64_t last_use;  // the manager's logical clock; not covered by the generation
    uint64_t reserved;
};
static_assert(sizeof(FrameRecord) == 64, "a record is one cache line: regions outlive builds");
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free, "records are shared between processes");

template <class T>
T load_relaxed(const T& field) {
    return std::atomic_ref<T>(const_cast<T&>(field)).load(std::memory_order_relaxed);
}

template <class T>
void store_relaxed(T& field, T value) {
    std::atomic_ref<T>(field).store(value, std::memory_order_relaxed);
}

inline bool is_odd(uint64_t generation) { return (generation & 1) != 0; }

// W1, first half: even -> odd. False: another writer moved it since `seen` was loaded. The caller owes open_fence().
inline bool open_record(FrameRecord& record, uint64_t seen) {
    if (is_odd(seen)) return load_relaxed(record.generation) == seen;
    return std::atomic_ref(record.generation).compare_exchange_strong(seen, seen + 1, std::memory_order_seq_cst);
}

// W1, second half, once per batch: no store of W2 is seen before the generations are odd.
inline void open_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// W4: odd -> even; even stays. Everything this thread wrote before is visible to whoever sees the new generation.
inline void close_record(FrameRecord& record) {
    const uint64_t generation = load_relaxed(record.generation);
    if (is_odd(generation)) std::atomic_ref(record.generation).store(generation + 1, std::memory_order_release);
}

// R1.
inline uint64_t load_generation(const FrameRecord& record) {
    return std::atomic_ref(const_cast<uint64_t&>(record.generation)).load(std::memory_order_acquire);
}

inline bool is_readable(uint64_t generation) { return generation != 0 && !is_odd(generation); }

// R3 and R4: whether everything read since R1 belongs to generation `seen`.
inline bool is_unchanged(const FrameRecord& record, uint64_t seen) {
    std::atomic_thread_fence(std::memory_order_acquire);
    return load_relaxed(record.generation) == seen;
}

inline KeyWords load_key(const FrameRecord& record) {
    return {load_relaxed(record.key[0]), load_relaxed(record.key[1]), load_relaxed(record.key[2]),
            load_relaxed(record.key[3])};
}

// R1 with a look at the key: the generation, or 0 where the frame is not readable or `expected` is not its key. A key
// that is newer than the generation does no harm: R4 of the read that follows finds the generation gone.
inline uint64_t snapshot_record(const FrameRecord& record, const KeyWords& expected) {
    const uint64_t generation = load_generation(record);
    return is_readable(generation) && load_key(record) == expected ? generation : 0;
}

}  // namespace cachesvc
