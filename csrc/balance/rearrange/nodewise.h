#pragma once

#include <cstdint>
#include <vector>

#include "balance/rearrange/volume.h"

namespace interlace {

// OrchMLLM's Algorithm 3: assigns batch j to a rank, to minimize the largest volume that an instance sends to other
// nodes. Starts from a greedy assignment of batches to nodes by the volume that stays there. Then a tabu search
// exchanges one batch of the bottleneck's node for one of another node, until a simple bound is reached or a fixed
// amount of work is done. Within a node every batch goes to the instance that holds most of it. Never worse than batch
// j on rank j. Returns int32 [instances], a permutation.
//
// A min-cost flow, which keeps the largest total volume, is hardly a better start. On 63 volumes of 64 to 2,560
// instances the search ended in the same bottleneck from both in 59, lower from greedy in 1 and from the flow in 3. At
// 2,560 instances it never differed, and the flow alone took SciPy 130 to 730 ms.
std::vector<int32_t> nodewise_placement(const Volume &volume);

// Volume that each instance sends to other nodes under a placement.
std::vector<double> internode_volume(const Volume &volume, const std::vector<int32_t> &rank_of);

// Lower bounds of the bottleneck of any placement. O(entries log per_node). An instance sends everything except the
// per_node batches of which it holds most. All nodes but one send their parts of a batch.
double nodewise_simple_bound(const Volume &volume);

// The larger of that bound and the Lagrangian dual of the linear relaxation of Algorithm 3, maximized by projected
// subgradient steps. Any multipliers give a valid bound, so stopping early only loosens it. `sent` is internode_volume
// of some placement: its bottleneck sets the step length and ends the search once the bound reaches it.
double nodewise_bound(const Volume &volume, const std::vector<double> &sent, int64_t iterations);

// Raises a bound by the needs of single nodes in whole batches, each choosing first; found by tree searches. The
// relaxation above splits batches between nodes and so misses this. effort: 20 passes over a node's batches each.
double nodewise_single_bound(const Volume &volume, const std::vector<double> &sent, double bound, int64_t effort);

}  // namespace interlace
