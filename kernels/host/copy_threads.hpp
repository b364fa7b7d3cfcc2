// The threads of this process that go through the bytes of pages: to copy them between memories, to take checksums.
//
// DESIGN. One thread does not fill the memory bus of a server, and a batch belongs to one caller, so a large one is cut
// into runs of pages for a few threads, the caller among them. When `in_runs` returns, every byte has been dealt with
// and no thread of ours refers to the caller's memory: what the caller does with it then cannot meet a copy that is
// late. Threads do not survive a fork: a child gets its own at first use.
#pragma once
#include <cstddef>
#include <functional>

namespace cachesvc {

// Calls run(begin, end) for runs that together are [0, num_pages), each once and on any thread; `run` must not throw,
// and fences its own streaming stores. Any thread may call.
void in_runs(size_t num_pages, size_t page_bytes, const std::function<void(size_t begin, size_t end)>& run);

}  // namespace cachesvc
