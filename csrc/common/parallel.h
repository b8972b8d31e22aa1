// parallel_for over items of unequal size: workers fetch the next item from a shared counter.
#pragma once

#include <cstdint>
#include <type_traits>

namespace interlace {

// Calls body(context, item) for every item in 0..items on at most `threads` threads; items start in order. If a body
// throws, no further items start, and the exception is rethrown here once the running bodies have ended. Uses the
// OpenMP runtime that the process has already loaded (torch brings one), so that its worker threads serve both. A
// second pool would compete for the same cores while one of them spins. Without a loaded runtime, starts threads.
void parallel_for(int64_t items, int threads, void (*body)(void *context, int64_t item), void *context);

template <typename Body>
void parallel_for(int64_t items, int threads, Body &&body) {
    using Function = std::remove_reference_t<Body>;
    parallel_for(items, threads, [](void *context, int64_t item) { (*static_cast<Function *>(context))(item); }, &body);
}

}  // namespace interlace
