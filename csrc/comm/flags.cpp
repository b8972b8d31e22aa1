#include "comm/flags.h"

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

using Clock = std::chrono::steady_clock;

constexpr int SPINS = 100;  // some microseconds: what a peer that is about to write takes
constexpr double LONGEST_SLEEP = 3600.0;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#endif
}

#if defined(__linux__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

// A futex has 32 bits: the lower half of the counter, which changes whenever the counter does.
void wake(uint64_t *flag) { syscall(SYS_futex, flag, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void sleep_while(const uint64_t *flag, uint64_t seen, double seconds, int) {
    timespec left;
    left.tv_sec = static_cast<time_t>(seconds);
    left.tv_nsec = static_cast<long>((seconds - static_cast<double>(left.tv_sec)) * 1e9);
    syscall(SYS_futex, flag, FUTEX_WAIT, static_cast<uint32_t>(seen), &left, nullptr, 0);
}

#else

void wake(uint64_t *) {}

void sleep_while(const uint64_t *, uint64_t, double seconds, int round) {
    const double step = 20e-6 * static_cast<double>(1 << std::min(round, 6));
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min({seconds, step, 1e-3})));
}

#endif

}  // namespace

uint64_t flag_load(const uint64_t *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

void flag_store(uint64_t *flag, uint64_t value) {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
    wake(flag);
}

uint64_t flag_add(uint64_t *flag, uint64_t amount) {
    const uint64_t value = __atomic_add_fetch(flag, amount, __ATOMIC_ACQ_REL);
    wake(flag);
    return value;
}

bool flag_wait_at_least(const uint64_t *flag, uint64_t value, double seconds) {
    for (int spin = 0; spin < SPINS; ++spin) {
        if (flag_load(flag) >= value) return true;
        relax();
    }
    const auto start = Clock::now();
    for (int round = 0;; ++round) {
        const uint64_t seen = flag_load(flag);
        if (seen >= value) return true;
        const double left = seconds - std::chrono::duration<double>(Clock::now() - start).count();
        if (left <= 0) return false;
        sleep_while(flag, seen, std::min(left, LONGEST_SLEEP), round);
    }
}

}  // namespace interlace
