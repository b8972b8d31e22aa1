#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

struct ExactAssignment {
    std::vector<int32_t> bin_of;
    double makespan;
    double bound;  // no assignment is lighter; equals the makespan if that is proven
    bool proven;
};

// Branch and bound that minimizes the heaviest bin. Items are assigned by falling weight. Of bins with equal load and
// equal count, only one is tried. Items of equal weight go to rising bins. A node is cut if the weight that the bins
// can still take below the best known makespan is less than the weight left. The search starts from refined LPT. It
// stops at the lower bound, when the tree is done, or after `nodes` nodes: a count instead of a time, so that every
// rank gets the same result. Optimal up to rounding of the sums; exactly for whole numbers. O(bins) per node.
//
// After the given seconds in the tree it throws OutOfTime instead: the result at that time would differ between ranks.
ExactAssignment exact_assignment(const std::vector<double> &weights, int64_t bins, int64_t capacity, int64_t nodes,
                                 double seconds);

struct OutOfTime {
    int64_t nodes;  // nodes searched
    double makespan, bound;
};

}  // namespace interlace
