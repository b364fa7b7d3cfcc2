#include "fault_guard.hpp"

#include <csetjmp>
#include <csignal>
#include <mutex>

namespace cachesvc {
namespace {

// initial-exec: the handler must not be the one that allocates this thread's copy.
#define CACHESVC_SIGNAL_SAFE_TLS thread_local __attribute__((tls_model("initial-exec")))
CACHESVC_SIGNAL_SAFE_TLS sigjmp_buf* armed_target = nullptr;
CACHESVC_SIGNAL_SAFE_TLS bool is_chaining = false;

struct sigaction previous_action;

void pass_on(int signal, siginfo_t* info, void* context) {
    const bool has_handler = (previous_action.sa_flags & SA_SIGINFO) != 0 ||
                             (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN);
    // A previous handler that ends by re-raising into us has had its turn.
    if (!has_handler || is_chaining) {
        std::signal(signal, SIG_DFL);  // the access repeats when we return, and ends the process
        return;
    }
    is_chaining = true;
    if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
        previous_action.sa_sigaction(signal, info, context);
    } else {
        previous_action.sa_handler(signal);
    }
    is_chaining = false;
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
    if (armed_target != nullptr) siglongjmp(*armed_target, 1);
    pass_on(signal, info, context);
}

// Asked once per batch, not once per process: whoever installs a handler later (faulthandler does) would shadow ours.
void make_ours_outermost() {
    struct sigaction current;
    sigaction(SIGBUS, nullptr, &current);
    if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_bus_error) return;
    static std::mutex installing;
    const std::lock_guard lock(installing);
    sigaction(SIGBUS, nullptr, &current);
    if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_bus_error) return;
    previous_action = current;
    struct sigaction ours {};
    ours.sa_sigaction = on_bus_error;
    // NODEFER: the jump leaves the handler without a return, which would otherwise leave SIGBUS blocked.
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

namespace detail {

size_t run_guarded(size_t begin, size_t end, GuardedBody body, const void* context) {
    make_ours_outermost();
    sigjmp_buf target;
    sigjmp_buf* const outer = armed_target;
    volatile size_t index = begin;  // volatile: read after the jump
    if (sigsetjmp(target, 0) == 0) {
        armed_target = &target;
        while (index < end) {
            body(context, index);
            index = index + 1;
        }
    }
    armed_target = outer;
    return index;
}

}  // namespace detail
}  // namespace cachesvc
