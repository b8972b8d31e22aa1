#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

struct BottleneckMatch {
    double threshold;              // infinite: there is no allowed matching
    std::vector<int32_t> partner;  // per row its column, -1 = alone
};

// Rows are paired with columns, one to one, or stay alone: row i costs cost[i * columns + j] with column j and alone[i]
// without one (infinite: not allowed; no NaN). Finds the smallest threshold that all rows can keep at once, and
// partners for the rows that cannot keep it alone; the other rows stay alone.
//
// Entrain 4.5.2, whose graph is bipartite (overloaded x underloaded microbatches). The values are searched by halving,
// each probe a Hopcroft-Karp matching over bitsets that starts from the matching of the largest infeasible threshold,
// which stays valid above it. O(log(rows columns) (rows columns + phases rows columns / 64)) steps. The partners come
// from a matching begun anew at the threshold, so that they do not depend on the way there: rows in order, lower
// columns first.
BottleneckMatch bottleneck_match(const std::vector<double> &cost, const std::vector<double> &alone, int64_t columns);

}  // namespace interlace
