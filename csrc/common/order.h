#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Item numbers by falling weight, ties by rising number. Weights must be finite and >= 0. A radix sort of the upper
// halves of the doubles (which order like the doubles themselves) with the item number in the lower half of each key.
// Then a comparison sort of the runs with equal upper and different lower halves. O(n) for lengths and block counts,
// O(n log n) at worst.
std::vector<int32_t> descending_order(const std::vector<double> &weights);

// True if `order` equals descending_order(weights), provided that it contains every item once. O(n).
bool is_descending(const std::vector<double> &weights, const std::vector<int32_t> &order);

// True if all weights are whole numbers whose sum (and so every partial sum) is exact in double precision.
bool exactly_whole(const std::vector<double> &weights);

}  // namespace interlace
