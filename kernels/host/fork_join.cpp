#include "fork_join.hpp"

namespace cachesvc {
namespace {

constexpr int spins_before_sleep = 2000;  // some tens of microseconds

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Returns true as soon as `changed()`; false after a moment.
template <class Changed>
bool spin_until(Changed changed) {
    for (int i = 0; i < spins_before_sleep; ++i) {
        if (changed()) return true;
        pause_briefly();
    }
    return false;
}

}  // namespace

ForkJoin::ForkJoin(size_t num_threads) {
    helpers_.reserve(num_threads - 1);
    for (size_t i = 1; i < num_threads; ++i) helpers_.emplace_back([this] { help(); });
}

ForkJoin::~ForkJoin() {
    closing_.store(true);
    loop_.fetch_add(1);
    loop_.notify_all();
    for (auto& helper : helpers_) helper.join();
}

void ForkJoin::run_all(size_t num_tasks, Call call, void* context) {
    if (num_tasks == 0) return;
    const std::lock_guard lock(one_loop_);
    const uint64_t loop = static_cast<uint32_t>(loop_.load(std::memory_order_relaxed) + 1);
    call_ = call;
    context_ = context;
    num_done_.store(0, std::memory_order_relaxed);
    limit_.store(loop << 32 | num_tasks, std::memory_order_release);
    ticket_.store(loop << 32, std::memory_order_release);
    if (num_tasks > 1 && !helpers_.empty()) {
        loop_.store(static_cast<uint32_t>(loop));
        loop_.notify_all();
    } else {
        loop_.store(static_cast<uint32_t>(loop), std::memory_order_relaxed);
    }
    take_tasks();
    const auto all = static_cast<uint32_t>(num_tasks);
    while (!spin_until([&] { return num_done_.load(std::memory_order_acquire) == all; })) {
        const uint32_t done = num_done_.load(std::memory_order_acquire);
        if (done != all) num_done_.wait(done, std::memory_order_acquire);
    }
}

void ForkJoin::take_tasks() {
    while (true) {
        const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
        const uint64_t limit = limit_.load(std::memory_order_acquire);
        const auto task = static_cast<uint32_t>(ticket), num_tasks = static_cast<uint32_t>(limit);
        if (ticket >> 32 != limit >> 32 || task >= num_tasks) return;
        call_(context_, task);
        if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_tasks) num_done_.notify_one();
    }
}

void ForkJoin::help() {
    uint32_t seen = 0;
    while (true) {
        if (!spin_until([&] { return loop_.load(std::memory_order_acquire) != seen; })) {
            loop_.wait(seen, std::memory_order_acquire);
        }
        if (closing_.load()) return;
        seen = loop_.load(std::memory_order_acquire);
        take_tasks();
    }
}

}  // namespace cachesvc
