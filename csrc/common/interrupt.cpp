#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr std::chrono::milliseconds between{50};  // a check needs the GIL, which another thread may hold for 5 ms

thread_local Watch *current = nullptr;

}  // namespace

Watch::Watch(bool (*ask)()) : ask_(ask), next_(std::chrono::steady_clock::now() + between), outer_(current) {
    current = this;
}

Watch::~Watch() { current = outer_; }

void check_interrupt() {
    Watch *const watch = current;
    if (watch == nullptr || watch->ask_ == nullptr) return;
    const auto now = std::chrono::steady_clock::now();
    if (now < watch->next_) return;
    watch->next_ = now + between;
    if (!watch->ask_()) watch->ask_ = nullptr;
}

}  // namespace interlace
