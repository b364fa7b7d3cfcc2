#include "paged_copy.hpp"

#include "stream_copy.hpp"

namespace cachesvc {
namespace {

// Visits the chunks page by page, so that the frame is walked in address order; visit(in_pool, in_frame, next_in_pool,
// next_in_frame), the latter two being null at the end.
template <class Visit>
void each_chunk(const PagedPool& pool, const Frames& place, LayerRange layers, const int32_t* pages,
                const int32_t* frames, size_t count, Visit visit) {
    const size_t chunk = pool.chunk_bytes;
    const size_t first = layers.begin * pool.num_runs, last = layers.end * pool.num_runs;
    if (first == last) return;
    auto in_pool = [&](size_t page, size_t part) {
        return reinterpret_cast<uint8_t*>(pool.bases[part]) + static_cast<size_t>(pages[page]) * chunk;
    };
    auto in_frame = [&](size_t page, size_t part) {
        return reinterpret_cast<uint8_t*>(place.data_address) + static_cast<size_t>(frames[page]) * place.stride_bytes +
               part * chunk;
    };
    for (size_t page = 0; page < count; ++page) {
        for (size_t part = first; part < last; ++part) {
            const bool page_ends = part + 1 == last;
            const size_t next_page = page + page_ends, next_part = page_ends ? first : part + 1;
            const bool more = next_page < count;
            visit(in_pool(page, part), in_frame(page, part), more ? in_pool(next_page, next_part) : nullptr,
                  more ? in_frame(next_page, next_part) : nullptr);
        }
    }
}

}  // namespace

void pool_to_frames(const PagedPool& pool, const Frames& place, LayerRange layers, const int32_t* pages,
                    const int32_t* frames, size_t count) {
    const StreamCopy copy = stream_copy();
    const size_t chunk = pool.chunk_bytes;
    each_chunk(pool, place, layers, pages, frames, count,
               [=](uint8_t* in_pool, uint8_t* in_frame, const uint8_t* next_in_pool, const uint8_t*) {
                   copy(in_frame, in_pool, chunk, next_in_pool);
               });
    stream_fence();
}

void frames_to_pool(const PagedPool& pool, const Frames& place, LayerRange layers, const int32_t* pages,
                    const int32_t* frames, size_t count) {
    const StreamCopy copy = stream_copy();
    const size_t chunk = pool.chunk_bytes;
    each_chunk(pool, place, layers, pages, frames, count,
               [=](uint8_t* in_pool, uint8_t* in_frame, const uint8_t*, const uint8_t* next_in_frame) {
                   copy(in_pool, in_frame, chunk, next_in_frame);
               });
    stream_fence();
}

}  // namespace cachesvc
