// Runs the tasks of one loop on a few threads, the caller among them, and returns when all are done.
//
// DESIGN. Made for many loops of some tens of microseconds on cores that other processes may hold. Tasks are handed out
// one at a time by an atomic ticket, so a helper that is not scheduled delays nobody: the caller takes the rest. A
// helper looks for the next loop for a moment before it sleeps. The ticket and the limit carry the loop's number in
// their high half. The limit is written first, so a ticket below the limit of its own number is a task of a loop that
// cannot end before that task has: whoever drew it, however late it woke, runs it. Any other ticket means nothing.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace cachesvc {

class ForkJoin {
public:
    // `num_threads` counts the caller; 1 starts no thread.
    explicit ForkJoin(size_t num_threads);
    ~ForkJoin();
    ForkJoin(const ForkJoin&) = delete;
    ForkJoin& operator=(const ForkJoin&) = delete;

    size_t num_threads() const { return helpers_.size() + 1; }

    // Calls task(i) once for each i in [0, num_tasks), in any order, on any of the threads; `task` must not throw.
    // Callers on several threads take turns.
    template <class Task>
    void run(size_t num_tasks, Task&& task) {
        using Plain = std::remove_reference_t<Task>;
        run_all(num_tasks, [](void* context, size_t i) { (*static_cast<Plain*>(context))(i); },
                const_cast<std::remove_const_t<Plain>*>(&task));
    }

private:
    using Call = void (*)(void* context, size_t task);

    void run_all(size_t num_tasks, Call call, void* context);
    void take_tasks();
    void help();

    std::mutex one_loop_;
    std::vector<std::thread> helpers_;
    Call call_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint64_t> ticket_{0};  // loop number << 32 | next task
    alignas(64) std::atomic<uint64_t> limit_{0};   // loop number << 32 | number of tasks
    alignas(64) std::atomic<uint32_t> num_done_{0};
    alignas(64) std::atomic<uint32_t> loop_{0};  // what sleeping helpers wait on
    std::atomic<bool> closing_{false};
};

}  // namespace cachesvc
