#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// The layout that context parallelism uses for causal masks: 2 * bins chunks of as equal counts as possible, of which
// bin r takes chunk r and chunk 2 * bins - 1 - r. Weights are not looked at. Bins may differ by two items.
std::vector<int32_t> zigzag(int64_t items, int64_t bins);

}  // namespace interlace
