// Bell of a rank: a counter in memory shared by several processes, on which its rank sleeps until a peer rings.
// Lock-free: a killed process leaves no lock behind.
#pragma once

#include <cstdint>

namespace interlace {

struct Bell {
    uint64_t rung;
    uint64_t sleeping;  // 1 while its rank may be asleep: only then a ringing peer makes a system call
    char rest_of_line[48];
};

uint64_t bell_count(const Bell &bell);
void bell_ring(Bell &bell);

constexpr uint64_t SPINS = 100;  // some microseconds: typical delay of a peer that is about to ring

// Returns when the bell has been rung since it showed `seen`, at the latest after `seconds`, perhaps earlier. Checks
// `spins` times, then sleeps: longer spinning would take cores from the computation.
void bell_wait(Bell &bell, uint64_t seen, double seconds, uint64_t spins);

}  // namespace interlace
