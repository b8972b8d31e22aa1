// Interruption of long calls by the user. Algorithms mark where they may stop, and do not depend on Python.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace interlace {

// A check that runs from time to time during a call. The bindings start one per call (Interruptible, in
// interruptible.h). Without one, as in a worker thread, checks are no-ops.
class Watch {
  public:
    explicit Watch(bool (*ask)());
    ~Watch();
    Watch(const Watch &) = delete;
    Watch &operator=(const Watch &) = delete;

  private:
    friend void check_interrupt();
    bool (*ask_)();  // throws to end the call; false: do not call again
    std::chrono::steady_clock::time_point next_;
    Watch *outer_;  // of an outer call that this one interrupts (a signal handler may make calls, too)
};

// Runs the check if the last one was some time ago, else only reads the clock (about 30 ns). Throws to end the call.
void check_interrupt();

// check_interrupt for loops with very short steps: called once per 16,384 steps of up to a microsecond.
class Poll {
  public:
    void operator()(int64_t steps = 1) {
        left_ -= steps;
        if (left_ > 0) return;
        left_ = EVERY;
        check_interrupt();
    }

  private:
    static constexpr int64_t EVERY = 1 << 14;
    int64_t left_ = EVERY;
};

// std::sort; for long inputs, the comparisons are counted as steps.
template <typename Iterator, typename Before>
void interruptible_sort(Iterator begin, Iterator end, Before before) {
    if (end - begin <= 1 << 18) return std::sort(begin, end, before);
    Poll poll;
    std::sort(begin, end, [&](const auto &a, const auto &b) {
        poll();
        return before(a, b);
    });
}

}  // namespace interlace
