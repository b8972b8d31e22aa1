#include "common/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace interlace {

namespace {

struct Loop {
    std::atomic<int64_t> next{0};
    int64_t items;
    void (*body)(void *, int64_t);
    void *context;
    std::atomic<bool> failed{false};
    std::exception_ptr error;
};

void work(void *argument) {
    Loop &loop = *static_cast<Loop *>(argument);
    try {
        for (int64_t item; (item = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.items;)
            loop.body(loop.context, item);
    } catch (...) {
        if (!loop.failed.exchange(true)) loop.error = std::current_exception();
        loop.next = loop.items;
    }
}

// The entry point of GNU OpenMP, which other runtimes provide too.
using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

Parallel loaded_openmp() {
#if defined(__linux__)
    return reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#else
    return nullptr;
#endif
}

}  // namespace

void parallel_for(int64_t items, int threads, void (*body)(void *, int64_t), void *context) {
    Loop loop;
    loop.items = items;
    loop.body = body;
    loop.context = context;
    if (threads <= 1 || items <= 1) {
        work(&loop);
    } else if (const Parallel openmp = loaded_openmp()) {
        // Uses all threads, even if some have no work: a smaller team would end the unused ones.
        openmp(work, &loop, static_cast<unsigned>(threads), 0);
    } else {
        std::vector<std::thread> others;
        try {
            for (int64_t i = 1; i < std::min<int64_t>(items, threads); ++i) others.emplace_back(work, &loop);
        } catch (const std::system_error &) {  // no more threads available: continue with the running ones
        }
        work(&loop);
        for (std::thread &other : others) other.join();
    }
    if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace interlace
