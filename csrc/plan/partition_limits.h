#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Cuts a row of layers into non-empty contiguous stages so that max over stages of (cost of its layers) / speeds[s] is
// least, where the memory of a stage's layers must not exceed limits[s]. Exact: values are (prefix[j] - prefix[i]) /
// speed in double precision, and the least of those that can be met is found. Empty result: no cut keeps the limits.
//
// A limit on the bottleneck makes every stage take at most so many layers, and where stage s can end is a few
// intervals: one, unless a layer is too much for a stage by itself. Like min_bottleneck_partition this bisects the
// limit, moving either end onto a value that some stage has; each of the about 60 probes is O(stages log layers) as
// long as there are few such layers.
std::vector<int32_t> limited_partition(const std::vector<double> &costs, const std::vector<double> &memory,
                                       const std::vector<double> &limits, const std::vector<double> &speeds);

}  // namespace interlace
