#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Brings the loads of an assignment closer to each other by local search: any two bins exchange up to `MOST_MOVED`
// items each way, whichever brings their loads closest. Sweeps go over all pairs, those that differ most first, until
// a sweep finds nothing, all loads lie within `GOOD_ENOUGH` of their mean, or the work allowed is done (counted, so
// that every rank finds the same). The sum of the squares of loads never rises, nor does the heaviest bin.
//
// capacity: the most items of a bin.
std::vector<int32_t> even_loads(const std::vector<double> &weights, std::vector<int32_t> bin_of, int64_t bins,
                                int64_t capacity);

}  // namespace interlace
