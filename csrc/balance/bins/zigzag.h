#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// The context-parallel layout for causal masks: 2 * bins chunks of equal counts (the first items mod (2 * bins) chunks
// hold one more). Bin r takes chunks r and 2 * bins - 1 - r. Weights are ignored. The counts of two bins differ by at
// most one.
std::vector<int32_t> zigzag(int64_t items, int64_t bins);

}  // namespace interlace
