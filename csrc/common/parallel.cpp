#include "common/parallel.h"

#include <algorithm>
#include <atomic>
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
};

void work(void *argument) {
    Loop &loop = *static_cast<Loop *>(argument);
    for (int64_t item; (item = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.items;)
        loop.body(loop.context, item);
}

// The entry point of GNU OpenMP, which other runtimes offer too.
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
    const int workers = static_cast<int>(std::min<int64_t>(items, threads));
    if (workers <= 1) return work(&loop);
    if (const Parallel openmp = loaded_openmp()) return openmp(work, &loop, static_cast<unsigned>(workers), 0);
    std::vector<std::thread> others;
    for (int i = 1; i < workers; ++i) others.emplace_back(work, &loop);
    work(&loop);
    for (std::thread &other : others) other.join();
}

}  // namespace interlace
