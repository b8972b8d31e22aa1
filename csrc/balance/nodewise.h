#pragma once

#include <cstdint>
#include <vector>

#include "balance/volume.h"

namespace interlace {

// OrchMLLM's Algorithm 3: which rank takes batch j, so that the instance that sends most to other nodes sends as little
// as possible. Starts from greedy assignments of batches to nodes by the volume that they would keep there, instances
// weighted alike or by how much they hold; then exchanges one batch of the bottleneck's node with one of another node,
// the pair that leaves the largest of the two nodes' instances smallest, while that lowers the bottleneck. Within a
// node every batch goes where most of it lies already. Returns int32 [instances], a permutation.
std::vector<int32_t> nodewise_placement(const Volume &volume);

// What each instance sends to other nodes under a placement.
std::vector<double> internode_volume(const Volume &volume, const std::vector<int32_t> &rank_of);

// A value that no placement's bottleneck goes below: the Lagrangian dual of the linear relaxation of Algorithm 3,
// climbed by projected subgradient steps. Any multipliers give a valid bound, so stopping early only loosens it. `sent`
// is internode_volume of some placement: its bottleneck sets the step length and ends the search once the bound reaches
// it.
double nodewise_bound(const Volume &volume, const std::vector<double> &sent, int64_t iterations);

// Raises a bound by what single nodes need in whole batches even if they choose first, found by a tree search of at
// most `budget` tree nodes each. The relaxation above splits batches between nodes, which hides this.
double nodewise_single_bound(const Volume &volume, const std::vector<double> &sent, double bound, int64_t budget);

}  // namespace interlace
