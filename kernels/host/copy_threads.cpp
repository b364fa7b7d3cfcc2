#include "copy_threads.hpp"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <thread>

#include "thread_pool.hpp"

namespace cachesvc {
namespace {

constexpr size_t run_bytes = size_t{1} << 20;  // some tens of microseconds: worth a wake-up, small enough to share
constexpr size_t max_threads = 4;              // more gain nothing once the memory bus is full

std::mutex making;
ThreadPool* pool = nullptr;  // never destroyed: a thread may still wait in it when the process ends

void forget_pool() {
    pool = nullptr;
    making.unlock();
}

ThreadPool& copy_pool() {
    static const int at_fork = pthread_atfork([] { making.lock(); }, [] { making.unlock(); }, forget_pool);
    (void)at_fork;
    const std::lock_guard lock(making);
    if (pool == nullptr) {
        const size_t cores = std::max(1u, std::thread::hardware_concurrency());
        pool = new ThreadPool(std::min(cores, max_threads) - 1);
    }
    return *pool;
}

}  // namespace

void in_runs(size_t num_pages, size_t page_bytes, const std::function<void(size_t, size_t)>& run) {
    const size_t length = std::max<size_t>(1, run_bytes / std::max<size_t>(page_bytes, 1));
    if (num_pages <= length) {
        if (num_pages > 0) run(0, num_pages);
        return;
    }
    const size_t num_runs = (num_pages + length - 1) / length;
    copy_pool().each(num_runs, 1, [&](size_t i) { run(i * length, std::min(num_pages, (i + 1) * length)); });
}

}  // namespace cachesvc
