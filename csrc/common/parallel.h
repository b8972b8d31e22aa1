// parallel_for over items of unequal size: workers fetch the next item from a shared counter.
#pragma once

#include <cstdint>
#include <type_traits>

namespace interlace {

// Calls body(context, item) for every item in 0..items on at most `threads` threads; items start in order. What a
// body throws is thrown here, once the bodies that run have ended; no others start. Uses the OpenMP runtime that the
// process has loaded already (torch brings one), whose worker threads then serve both: a second pool would compete for
// the same cores while one of them spins. Without one, starts threads.
void parallel_for(int64_t items, int threads, void (*body)(void *context, int64_t item), void *context);

template <typename Body>
void parallel_for(int64_t items, int threads, Body &&body) {
    using Function = std::remove_reference_t<Body>;
    parallel_for(items, threads, [](void *context, int64_t item) { (*static_cast<Function *>(context))(item); }, &body);
}

}  // namespace interlace
