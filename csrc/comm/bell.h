// Bell of a rank: a counter in memory that several processes map, on which its rank sleeps until a peer rings.
// Lock-free: a process that is killed leaves nothing locked.
#pragma once

#include <cstdint>

namespace interlace {

struct Bell {
    uint64_t rung;
    uint64_t sleeping;  // 1 while its rank may be asleep: who rings pays for a system call only then
    char rest_of_line[48];
};

uint64_t bell_count(const Bell &bell);
void bell_ring(Bell &bell);

constexpr uint64_t SPINS = 100;  // some microseconds: what a peer that is about to ring takes

// Returns when the bell was rung since it showed `seen`, at the latest after `seconds`, perhaps earlier. Looks `spins`
// times, then sleeps: the cores that it would burn are those that compute.
void bell_wait(Bell &bell, uint64_t seen, double seconds, uint64_t spins);

}  // namespace interlace
