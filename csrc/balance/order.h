#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Item numbers by falling weight, ties by rising number. Weights must be finite and >= 0. A radix sort of the upper
// halves of the doubles (which order like the doubles themselves) with the item number in the lower half of each key,
// then a comparison sort of the runs whose upper halves agree and whose lower halves do not. O(n) for lengths and
// block counts, O(n log n) at worst.
std::vector<int32_t> descending_order(const std::vector<double> &weights);

// Whether `order` is what descending_order(weights) returns, if it names every item once. O(n).
bool is_descending(const std::vector<double> &weights, const std::vector<int32_t> &order);

// Whether all weights are whole numbers whose sum, and so every partial sum, is exact in double precision.
bool exactly_whole(const std::vector<double> &weights);

}  // namespace interlace
