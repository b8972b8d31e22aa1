#pragma once

#include <cstdint>
#include <vector>

#include "common/limits.h"
#include "plan/link_cost.h"

namespace interlace {

// Costs of one microbatch through one module.
struct SearchedModule {
    std::vector<int64_t> tp, cp;            // the allowed degrees
    std::vector<double> forward, backward;  // [degrees, layers]: seconds
    // [layers]: bytes, and the number of all-reduces of the layer's input per forward among tensor-parallel ranks.
    std::vector<double> weights, gradients, optimizer, activations, input, reduces;

    int64_t layers() const { return static_cast<int64_t>(weights.size()); }
};

struct SearchLimits {
    int64_t gpus, batch, microbatch;
    double gpu_memory;
    LinkCost stage_link, tensor_link, data_link;
    std::vector<int64_t> dp;
    std::vector<char> recompute;
    // GPUs of every group for each dp (-1: any number; an empty row: dp not allowed). No rows: placement not allowed.
    std::vector<std::vector<int64_t>> parallel, colocated;
};

// Configuration of a group: one module in its own group, or all encoders in one.
struct GroupConfiguration {
    int64_t tp = 1, cp = 1, pp = 1;
    bool recompute = false;
    std::vector<std::vector<int32_t>> cuts;  // per module: pp + 1 boundaries
    double peak = 0.0;                       // bytes of its fullest GPU
};

struct SearchResult {
    double time = INF;  // INF: nothing fits
    int64_t dp = 0;
    bool colocated = false;
    std::vector<GroupConfiguration> groups;  // encoders, then the language model
};

// The configuration of least iteration time (Entrain's algorithm 3, dissertation 4.4.3; Cornstarch's algorithm 1,
// cornstarch-2025-11 section 4.1), over all data-parallel degrees, placements, degrees of every group, pipeline sizes
// and recomputation. A module is cut at its exact bottleneck (min_bottleneck_partition). The formulas are in
// python/interlace/plan/search.py. modules: encoders, then the language model. Throws std::invalid_argument (ValueError
// in Python) if the total time of a module's layers overflows a double.
//
// Exact: the language model's options are visited by a lower bound on their time. For each, an encoder's options are
// reduced to those that no other one equals or beats in GPUs, fill, slowest stage and all-reduce. Branch and bound
// combines the encoders.
SearchResult best_configuration(const std::vector<SearchedModule> &modules, const SearchLimits &limits);

}  // namespace interlace
