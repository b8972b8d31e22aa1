#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

struct ExactAssignment {
    std::vector<int32_t> bin_of;
    double makespan;
    double bound;  // no assignment is lighter; equals the makespan where that is proven
    bool proven;
};

// Branch and bound for the lightest heaviest bin. Items by falling weight; bins that hold equally much (and equally
// many) are tried once, items of equal weight go to rising bins, and a node is cut when what the bins can still take
// below the best known makespan is less than what is left. Starts from the best of refined LPT, differencing and
// MULTIFIT and stops at the lower bound, when the tree is done, or after `nodes` nodes: a count, not a time, so that
// every rank agrees. Optimal up to rounding of the sums; exactly for whole numbers. O(bins) per node.
//
// After so many seconds in the tree it throws OutOfTime instead: what it had found by then would not be the same
// everywhere.
ExactAssignment exact_assignment(const std::vector<double> &weights, int64_t bins, int64_t capacity, int64_t nodes,
                                 double seconds);

struct OutOfTime {
    int64_t nodes;  // looked at
    double makespan, bound;
};

}  // namespace interlace
