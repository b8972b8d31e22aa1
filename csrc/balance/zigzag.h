#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// The layout that context parallelism uses for causal masks: 2 * bins chunks of equal counts (the first items mod
// (2 * bins) chunks hold one more), of which bin r takes chunk r and chunk 2 * bins - 1 - r. Weights are not looked at.
// The counts of two bins differ by at most one.
std::vector<int32_t> zigzag(int64_t items, int64_t bins);

}  // namespace interlace
