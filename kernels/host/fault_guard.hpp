// Loads from memory that another process can spoil.
//
// DESIGN. A region's pages belong to the kernel and to every process that maps them: a client may punch holes in them,
// and when the kernel then cannot find a page for the next access (control group full), the access ends in SIGBUS. All
// such accesses run through here. Each thread arms a jump target for the length of one batch; the handler jumps there
// when the faulting thread is armed and hands every other SIGBUS to the handler that was installed before ours.
//
// A fault abandons the frames between the jump target and the faulting instruction, so a guarded body must hold nothing
// that needs a destructor, take no lock, throw nothing, and hand results out only by storing them through a pointer.
#pragma once
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

namespace cachesvc {

// The memory under item `index` of a batch faulted.
class MemoryFault : public std::runtime_error {
public:
    explicit MemoryFault(size_t index)
        : std::runtime_error("memory of item " + std::to_string(index) + " of the batch is gone (SIGBUS)"),
          index(index) {}
    const size_t index;
};

namespace detail {
using GuardedBody = void (*)(const void* context, size_t index);
// Runs body(context, i) for i in [begin, end). Returns `end`, or the index whose body faulted.
size_t run_guarded(size_t begin, size_t end, GuardedBody body, const void* context);
}  // namespace detail

// Runs body(i) for i in [0, num_items) in order. Where the body of one item faults, on_fault(i) runs (outside of the
// guard, may throw) and the batch goes on with the next item. May run in any number of threads, nests.
template <class Body, class OnFault>
void guarded_each(size_t num_items, const Body& body, const OnFault& on_fault) {
    const auto call = [](const void* context, size_t index) { (*static_cast<const Body*>(context))(index); };
    for (size_t i = 0; (i = detail::run_guarded(i, num_items, call, &body)) < num_items; ++i) on_fault(i);
}

// The same where one fault spoils the whole batch: throws MemoryFault for the first item that faulted.
template <class Body>
void guarded_all(size_t num_items, const Body& body) {
    guarded_each(num_items, body, [](size_t index) { throw MemoryFault(index); });
}

// memcpy where either side may fault. False: it did, and the target holds any part of the bytes.
inline bool guarded_copy(void* target, const void* source, size_t bytes) {
    bool is_whole = true;
    guarded_each(1, [&](size_t) { std::memcpy(target, source, bytes); }, [&](size_t) { is_whole = false; });
    return is_whole;
}

// memcmp == 0 where either side may fault, which then is not equal.
inline bool guarded_equal(const void* one, const void* other, size_t bytes) {
    bool is_equal = false;
    guarded_each(1, [&](size_t) { is_equal = std::memcmp(one, other, bytes) == 0; }, [](size_t) {});
    return is_equal;
}

}  // namespace cachesvc
