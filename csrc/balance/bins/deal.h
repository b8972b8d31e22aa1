#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Layouts that ignore the weights. The counts of two bins differ by at most one.

// Contiguous runs of equal counts, the token layout of ring attention. The first (items mod bins) bins hold one more.
std::vector<int32_t> deal_ring(int64_t items, int64_t bins);

// A random permutation dealt in turn (Cornstarch 2025-03, section 5.3): Fisher-Yates over splitmix64, so that a seed
// gives the same result on every platform.
std::vector<int32_t> deal_random(int64_t items, int64_t bins, uint64_t seed);

}  // namespace interlace
