// An allocator for large tables that are read at random: asks for huge pages, so that a lookup does not also miss the TLB.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>

namespace cachesvc {

template <class T>
struct HugePageAllocator {
    using value_type = T;
    static constexpr size_t huge_page_bytes = size_t{2} << 20;

    HugePageAllocator() = default;
    template <class U>
    HugePageAllocator(const HugePageAllocator<U>&) {}

    // Small tables get ordinary alignment: rounding them up to a huge page would multiply their size.
    T* allocate(size_t count) {
        const size_t alignment = count * sizeof(T) < huge_page_bytes ? size_t{64} : huge_page_bytes;
        const size_t bytes = (count * sizeof(T) + alignment - 1) / alignment * alignment;
        void* memory = std::aligned_alloc(alignment, bytes);
        if (memory == nullptr) throw std::bad_alloc();
        if (alignment == huge_page_bytes) madvise(memory, bytes, MADV_HUGEPAGE);  // advice: works without
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, size_t) { std::free(memory); }

    bool operator==(const HugePageAllocator&) const = default;
};

}  // namespace cachesvc
