#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Where local search ends: this many times a lower bound is near enough.
constexpr double GOOD_ENOUGH = 1 + 1e-4;

// Lowers the heaviest bin of an assignment by local search: the heaviest bin gives one item, or exchanges one item,
// with one of the lightest bins, whichever brings the two loads closest; again until no such step with any of the
// `PARTNERS` lightest bins lowers the heaviest, or it is within `GOOD_ENOUGH` of a lower bound. The result is never
// heavier than the input.
//
// order: descending_order(weights). groups, capacity: as in grouped_lpt (1 and the cap of a bin for plain items); only
// items of one group are exchanged, so counts per group stay within the cap. O(items per bin) for each step, of which
// there are at most 8 bins + 1000.
std::vector<int32_t> refine(const std::vector<double> &weights, const std::vector<int32_t> &order,
                            std::vector<int32_t> bin_of, int64_t bins, int64_t capacity, int64_t groups = 1);

// The heaviest of the bins, each summed in the order of its items.
double makespan(const std::vector<double> &weights, const std::vector<int32_t> &bin_of, int64_t bins);

}  // namespace interlace
