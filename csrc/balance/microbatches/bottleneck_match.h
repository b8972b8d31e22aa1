#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

struct BottleneckMatch {
    double threshold;              // infinite: no allowed matching exists
    std::vector<int32_t> partner;  // per row its column, -1 = alone
};

// Rows are paired with columns, one to one, or stay alone. Row i costs cost[i * columns + j] with column j and alone[i]
// without one (infinite: not allowed; no NaN). Finds the smallest threshold that all rows can meet at once, and
// partners for the rows that cannot meet it alone. The other rows stay alone.
//
// Entrain 4.5.2, whose graph is bipartite (overloaded x underloaded microbatches). The threshold is found by binary
// search over the values. Each probe is a Hopcroft-Karp matching over bitsets. It starts from the matching of the
// largest infeasible threshold, which stays valid above it. O(log(rows columns) (rows columns + phases rows columns /
// 64)) steps. The partners come from a new matching at the final threshold, so that they do not depend on the probes:
// rows in order, lower columns first.
BottleneckMatch bottleneck_match(const std::vector<double> &cost, const std::vector<double> &alone, int64_t columns);

}  // namespace interlace
