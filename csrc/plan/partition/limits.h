#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Cuts a row of layers into non-empty contiguous stages. Minimizes the maximum over stages of (cost of its layers) /
// speeds[s], where the memory of a stage's layers must not exceed limits[s]. Exact: values are (prefix[j] - prefix[i])
// / speed in double precision, and the least feasible one is found. Empty result: no cut is within the limits.
//
// A limit on the bottleneck gives every stage a maximum number of layers. The possible ends of stage s are a few
// intervals: one, unless a layer exceeds a stage's limit by itself. Like min_bottleneck_partition this bisects the
// limit and moves either end onto a value that some stage has. Each of the about 60 probes is O(stages log layers) as
// long as there are few such layers.
std::vector<int32_t> limited_partition(const std::vector<double> &costs, const std::vector<double> &memory,
                                       const std::vector<double> &limits, const std::vector<double> &speeds);

}  // namespace interlace
