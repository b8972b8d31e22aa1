// How long calls learn that the user wants them to end. Algorithms say where they may stop, and know nothing of Python.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace interlace {

// What a call is asked for now and then while it runs. The bindings start one for each call (Interruptible, in
// interruptible.h); where there is none, as in a worker thread, nothing is asked.
class Watch {
  public:
    explicit Watch(bool (*ask)());
    ~Watch();
    Watch(const Watch &) = delete;
    Watch &operator=(const Watch &) = delete;

  private:
    friend void check_interrupt();
    bool (*ask_)();  // throws to end the call; false: not to be asked again
    std::chrono::steady_clock::time_point next_;
    Watch *outer_;  // of a call that this one interrupts: a signal handler may call in, too
};

// Asks if the last time was a while ago, else only reads the clock (some 30 ns). Throws what ends the call.
void check_interrupt();

// check_interrupt for loops whose steps are too short for it: every 16,384 of them, steps of up to a microsecond.
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

// std::sort; where that takes long, its comparisons are counted.
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
