// 64-bit counters in memory that several processes map: what one writes before it raises a counter, another sees once
// it has read the new value. Lock-free, so that a process that is killed leaves none locked.
#pragma once

#include <cstdint>

namespace interlace {

uint64_t flag_load(const uint64_t *flag);
void flag_store(uint64_t *flag, uint64_t value);     // and wakes who waits for this flag
uint64_t flag_add(uint64_t *flag, uint64_t amount);  // the new value; wakes too

// Whether the flag reached `value` within `seconds`. Spins for some microseconds, then sleeps: the cores that it would
// burn are those that compute. Sleeps on a futex; without one (not Linux) it looks again and again, at most 1 ms apart.
bool flag_wait_at_least(const uint64_t *flag, uint64_t value, double seconds);

}  // namespace interlace
