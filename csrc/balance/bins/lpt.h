#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Longest processing time first: items by falling weight (ties: lower index first), each to the lightest bin that has
// room (ties: lower bin first). Without a cap the heaviest bin is at most 4/3 - 1/(3 bins) of the optimum (Graham
// 1969). order: descending_order(weights). capacity: most items a bin may take; requires bins * capacity >=
// weights.size(). O(n log bins) time, O(n + bins) memory.
std::vector<int32_t> lpt(const std::vector<double> &weights, const std::vector<int32_t> &order, int64_t bins,
                         int64_t capacity);

// The same for items in `groups` rows of equal length. A bin takes at most `capacity` items from each row. Its load
// counts all rows. O(n bins).
std::vector<int32_t> grouped_lpt(const std::vector<double> &weights, const std::vector<int32_t> &order, int64_t bins,
                                 int64_t capacity, int64_t groups);

}  // namespace interlace
