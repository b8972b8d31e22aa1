#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Cuts a row of costs into `parts` contiguous, non-empty pieces so that the cost of the costliest piece is minimal.
// This is the optimum of the dissertation's eq. 3.5, without its O(n^2 parts) table. A piece [i, j) costs prefix[j] -
// prefix[i] in double precision. Among such values the optimum is exact, for whole numbers and fractions. Of the
// optimal cuts, one with even pieces is returned. Each cut is nearest to an equal share of the rest, towards the
// smaller earlier piece, since earlier pipeline stages keep more microbatches in flight.
//
// most: largest number of items in a piece. Needs 1 <= parts <= n and parts * most >= n.
// Returns parts + 1 boundaries from 0 to n. At most about 53 + log2(parts) probes of O(parts log n).
std::vector<int32_t> min_bottleneck_partition(const std::vector<double> &costs, int64_t parts, int64_t most);

}  // namespace interlace
