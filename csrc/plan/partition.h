#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Cuts a row of costs into `parts` contiguous, non-empty pieces so that the costliest piece is as cheap as possible:
// the optimum of the dissertation's eq. 3.5, without its O(n^2 parts) table. A piece [i, j) costs prefix[j] - prefix[i]
// in double precision, and among such values the optimum is exact, for whole numbers and fractions alike. Of the cuts
// that reach the optimum, one with even pieces is returned (cut nearest to an equal share of what is left, towards the
// smaller earlier piece, since earlier pipeline stages keep more microbatches in flight).
//
// most: largest number of items in a piece. Needs 1 <= parts <= n and parts * most >= n.
// Returns parts + 1 boundaries from 0 to n. At most about 53 + log2(parts) probes of O(parts log n).
std::vector<int32_t> min_bottleneck_partition(const std::vector<double> &costs, int64_t parts, int64_t most);

}  // namespace interlace
