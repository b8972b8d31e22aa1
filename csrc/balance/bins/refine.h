#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Local search ends within this factor of a lower bound.
constexpr double GOOD_ENOUGH = 1 + 1e-4;

// Lowers the heaviest bin of an assignment by local search. In each step the heaviest bin gives one item to one of the
// lightest bins, or exchanges one, with the choice that brings the two loads closest. The search ends when no step with
// any of the `PARTNERS` lightest bins lowers the heaviest, or when it is within `GOOD_ENOUGH` of a lower bound. The
// result is never heavier than the input.
//
// order: descending_order(weights). groups, capacity: as in grouped_lpt (1 and the cap of a bin for plain items). Only
// items of one group are exchanged, so counts per group stay within the cap. O(items per bin) per step, with at most
// 8 bins + 1000 steps.
std::vector<int32_t> refine(const std::vector<double> &weights, const std::vector<int32_t> &order,
                            std::vector<int32_t> bin_of, int64_t bins, int64_t capacity, int64_t groups = 1);

// The load of the heaviest bin; each bin is summed in the order of its items.
double makespan(const std::vector<double> &weights, const std::vector<int32_t> &bin_of, int64_t bins);

}  // namespace interlace
