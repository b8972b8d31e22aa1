#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Longest processing time first: items by falling weight (ties: lower index first), each to the lightest bin that has
// room (ties: lower bin first). Without a cap the heaviest bin is at most 4/3 - 1/(3 bins) of the optimum (Graham 1969).
// capacity: most items a bin may take; needs bins * capacity >= weights.size(). O(n log n) time, O(n + bins) memory.
std::vector<int32_t> lpt(const std::vector<double> &weights, int64_t bins, int64_t capacity);

}  // namespace interlace
