#pragma once

#include <cstdint>
#include <vector>

#include "balance/volume.h"

namespace interlace {

// OrchMLLM's Algorithm 3: which rank takes batch j, so that the instance that sends most to other nodes sends as little
// as possible. Starts from a greedy assignment of batches to nodes by the volume that they keep there; then a tabu
// search over exchanges of one batch of the bottleneck's node for one of another node, until a simple bound is met or a
// fixed amount of work is done. Within a node every batch goes where most of it lies already. Never worse than batch j
// on rank j. Returns int32 [instances], a permutation.
//
// A min-cost flow, which keeps most volume in all, is hardly a better start: on 63 volumes of 64 to 2,560 instances the
// search ended in the same bottleneck from both in 59, lower from greedy in 1 and from the flow in 3. At 2,560
// instances it never differed, and the flow alone took SciPy 130 to 730 ms.
std::vector<int32_t> nodewise_placement(const Volume &volume);

// What each instance sends to other nodes under a placement.
std::vector<double> internode_volume(const Volume &volume, const std::vector<int32_t> &rank_of);

// Values that no placement's bottleneck goes below. O(entries log per_node): an instance sends all but the per_node
// batches that it holds most of; all nodes but one send what they hold of a batch.
double nodewise_simple_bound(const Volume &volume);

// The larger of that and the Lagrangian dual of the linear relaxation of Algorithm 3, climbed by projected subgradient
// steps. Any multipliers give a valid bound, so stopping early only loosens it. `sent` is internode_volume of some
// placement: its bottleneck sets the step length and ends the search once the bound reaches it.
double nodewise_bound(const Volume &volume, const std::vector<double> &sent, int64_t iterations);

// Raises a bound by what single nodes need in whole batches even if they choose first, found by tree searches. The
// relaxation above splits batches between nodes, which hides this. effort: 20 passes over a node's batches each.
double nodewise_single_bound(const Volume &volume, const std::vector<double> &sent, double bound, int64_t effort);

}  // namespace interlace
