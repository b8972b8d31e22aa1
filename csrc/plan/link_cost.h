#pragma once

#include <cstdint>

namespace interlace {

// Seconds for a message over one kind of link.
struct LinkCost {
    double latency = 0.0, per_byte = 0.0;

    double transfer(double bytes) const { return bytes > 0 ? latency + bytes * per_byte : 0.0; }
    // A ring: 2 (n - 1) steps of bytes / n.
    double all_reduce(double bytes, int64_t ranks) const {
        if (ranks == 1) return 0.0;
        return 2.0 * static_cast<double>(ranks - 1) * transfer(bytes / static_cast<double>(ranks));
    }
};

}  // namespace interlace
