#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// The cost of a batch of b members: the sum of what each costs by itself plus b times what padding to the costliest
// member makes of each: sum(own) + b * max(padded).
double batch_cost(double own, int64_t members, double padded);

// Deals the items, sorted by padded cost, in contiguous runs whose costliest is as cheap as possible. Where own is 0
// throughout, i.e. all work is padded, runs are optimal among all ways to deal (an exchange argument): OrchMLLM's
// Algorithm 2, with an upper bound that holds and an answer taken from a probe that was feasible. Where it is not, runs
// are a heuristic. Exact in double precision among the values that runs can take. Bins are numbered by rising cost; no
// bin stays empty where there are enough items. own must not fall along with rising padded.
// order: descending_order(padded). O(bins log n) per probe, at most about 64 probes.
std::vector<int32_t> padded_batches(const std::vector<double> &own, const std::vector<double> &padded,
                                    const std::vector<int32_t> &order, int64_t bins);

}  // namespace interlace
