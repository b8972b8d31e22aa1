#include "comm/bell.h"

#include <algorithm>
#include <chrono>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace interlace {

namespace {

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#endif
}

#if defined(__linux__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

// A futex has 32 bits: the lower half of the counter. It changes whenever the counter does.
void wake(uint64_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void sleep_while(const uint64_t *word, uint64_t seen, double seconds) {
    timespec left;
    left.tv_sec = static_cast<time_t>(seconds);
    left.tv_nsec = static_cast<long>((seconds - static_cast<double>(left.tv_sec)) * 1e9);
    syscall(SYS_futex, word, FUTEX_WAIT, static_cast<uint32_t>(seen), &left, nullptr, 0);
}

#else

void wake(uint64_t *) {}

void sleep_while(const uint64_t *, uint64_t, double seconds) {
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, 100e-6)));
}

#endif

}  // namespace

uint64_t bell_count(const Bell &bell) { return __atomic_load_n(&bell.rung, __ATOMIC_SEQ_CST); }

void bell_ring(Bell &bell) {
    __atomic_add_fetch(&bell.rung, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&bell.sleeping, __ATOMIC_SEQ_CST)) wake(&bell.rung);
}

void bell_wait(Bell &bell, uint64_t seen, double seconds, uint64_t spins) {
    for (uint64_t spin = 0; spin < spins; ++spin) {
        if (bell_count(bell) != seen) return;
        relax();
    }
    __atomic_store_n(&bell.sleeping, 1, __ATOMIC_SEQ_CST);  // before the last check: a peer that rings later sees it
    if (bell_count(bell) == seen) sleep_while(&bell.rung, seen, seconds);
    __atomic_store_n(&bell.sleeping, 0, __ATOMIC_SEQ_CST);
}

}  // namespace interlace
