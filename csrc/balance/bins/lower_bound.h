#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// A lower bound of the heaviest bin of any assignment. The largest of
//   total / bins, rounded up where all weights are whole numbers;
//   for h = 0, 1, ...: among the h * bins + 1 largest items some bin holds h + 1 of them, so at least the h + 1
//   smallest of those. With a capacity every bin holds at least m = n - capacity * (bins - 1) items, so that this bin
//   also holds m - h - 1 others, at least the smallest. (h = 0 is the largest item, h = 1 is w_k + w_{k+1}.)
// Up to rounding of the sums. O(n log n).
double assignment_lower_bound(std::vector<double> weights, int64_t bins, int64_t capacity);

}  // namespace interlace
