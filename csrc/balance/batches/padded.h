#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// The cost of a batch of b members: the sum of their own costs plus b times the largest padded cost of a member:
// sum(own) + b * max(padded).
double batch_cost(double own, int64_t members, double padded);

// Deals the items, sorted by padded cost, in contiguous runs that minimize the cost of the costliest run. If own is 0
// for all items (all work is padded), runs are optimal among all assignments (an exchange argument). This is OrchMLLM's
// Algorithm 2, with a valid upper bound and an answer taken from a feasible probe. Otherwise runs are a heuristic.
// Exact in double precision among the values that runs can take. Bins are numbered by rising cost. No bin stays empty
// if there are enough items. own must not fall while padded rises.
// order: descending_order(padded). O(bins log n) per probe, at most about 64 probes.
std::vector<int32_t> padded_batches(const std::vector<double> &own, const std::vector<double> &padded,
                                    const std::vector<int32_t> &order, int64_t bins);

}  // namespace interlace
