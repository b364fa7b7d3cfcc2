#include "thread_pool.hpp"

#include <algorithm>

namespace cachesvc {

ThreadPool::ThreadPool(size_t num_threads) {
    threads_.reserve(num_threads);
    for (size_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::each(size_t count, size_t grain, const Job& job) {
    if (count == 0) return;
    Batch batch{job, count, std::max<size_t>(grain, 1), 0, 0, {}};
    std::unique_lock lock(mutex_);
    if (count > batch.grain) {
        waiting_.push_back(&batch);
        const size_t others = (count - 1) / batch.grain;
        if (others >= threads_.size()) work_.notify_all();
        else
            for (size_t i = 0; i < others; ++i) work_.notify_one();
    }
    while (batch.next < batch.count) run_grain(batch, lock);
    batch.done.wait(lock, [&] { return batch.running == 0; });
}

// Takes the next grain of `batch`, which has one, and runs it without the lock.
void ThreadPool::run_grain(Batch& batch, std::unique_lock<std::mutex>& lock) {
    const size_t begin = batch.next, end = std::min(batch.count, begin + batch.grain);
    batch.next = end;
    ++batch.running;
    const auto place = std::find(waiting_.begin(), waiting_.end(), &batch);
    if (place != waiting_.end()) {
        waiting_.erase(place);
        if (end < batch.count) waiting_.push_back(&batch);  // at the end: batches take turns
    }
    lock.unlock();
    for (size_t i = begin; i < end; ++i) batch.job(i);
    lock.lock();
    // The batch lives on its caller's stack: once running is 0 and nothing is left it may be gone after the unlock.
    if (--batch.running == 0 && batch.next == batch.count) batch.done.notify_one();
}

void ThreadPool::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        work_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
        run_grain(*waiting_.front(), lock);
    }
}

}  // namespace cachesvc
