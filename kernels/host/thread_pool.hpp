// A fixed set of threads that run the items of batches.
//
// DESIGN. `each` blocks until its batch is done; the caller works along on its own batch, so a batch of one item costs
// no thread switch. Threads take items from all waiting batches in turn: a small batch is never stuck behind a large
// one. Jobs must not throw; they report through whatever they write to.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace cachesvc {

class ThreadPool {
   public:
    // Threads beside the caller of `each`; 0 is valid.
    explicit ThreadPool(size_t num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    using Job = std::function<void(size_t index)>;
    // Runs job(0) ... job(count - 1), `grain` consecutive ones at a time. Any thread may call it at any time.
    void each(size_t count, size_t grain, const Job& job);

   private:
    struct Batch {
        const Job& job;
        size_t count, grain;
        size_t next = 0;     // first item not taken yet
        size_t running = 0;  // grains taken and not finished
        std::condition_variable done;
    };

    void work();
    void run_grain(Batch& batch, std::unique_lock<std::mutex>& lock);

    std::mutex mutex_;
    std::condition_variable work_;
    std::deque<Batch*> waiting_;  // batches with items not taken yet
    std::vector<std::thread> threads_;
    bool stopping_ = false;
};

}  // namespace cachesvc
