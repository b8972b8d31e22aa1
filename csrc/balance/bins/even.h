#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Brings the loads of an assignment closer to each other by local search. Two bins exchange up to `MOST_MOVED` items
// each way, with the choice that brings their loads closest. Sweeps visit all pairs, largest difference first. The
// search ends when a sweep finds nothing, all loads are within `GOOD_ENOUGH` of their mean, or the work limit is
// reached (a count, so that every rank gets the same result). Neither the sum of squared loads nor the heaviest bin
// ever rises.
//
// capacity: the most items of a bin.
std::vector<int32_t> even_loads(const std::vector<double> &weights, std::vector<int32_t> bin_of, int64_t bins,
                                int64_t capacity);

}  // namespace interlace
