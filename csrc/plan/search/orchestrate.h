#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/link_cost.h"

namespace interlace {

// One module of DistTrain's problem (section 5.1). forward[t] is the time of one sample through the whole module at the
// t-th tensor-parallel size. Bytes are of the whole module; activations and output are per sample.
struct OrchestratedModule {
    std::vector<double> forward;
    int64_t layers;  // 0: any pipeline size; otherwise pipeline size times vpp must divide it
    double weight_bytes, optimizer_bytes, activation_bytes;
    double gradient_bytes, output_bytes;  // summed among replicas; sent on by every stage
};

struct ModuleDegrees {
    int64_t tp = 0, dp = 0, pp = 0;
};

struct Orchestration {
    double time;                         // infinite: nothing fits
    std::vector<ModuleDegrees> degrees;  // encoder, language model, generator, as given
};

struct OrchestrationLimits {
    int64_t gpus, batch, vpp;
    double gpu_memory;
    LinkCost stage_link, data_link;
};

// The integers DP, TP, PP of every module that minimise T_warm / vpp + T_steady + T_PP + T_DP with at most `gpus` GPUs
// and within every GPU's memory. (DistTrain 5.1, eqs. 1-5 and the communication below them; the formulas are in
// python/interlace/plan/orchestration.py.) Exact, whereas the paper rounds a convex relaxation. backbone: the position
// of the language model in modules. Modules before it feed it; it feeds the modules after it.
//
// For given DP and TP sizes the warm-up is fixed and only the pipeline sizes remain. A limit on the slowest stage and
// one on the slowest gradient sum determine the smallest sizes: both times fall with the sizes, while GPUs, memory and
// transfers favour small ones. So it suffices to start from the smallest sizes that fit the memory, and to raise the
// module with the slowest sum. From each of these states the module with the slowest stage is raised, until the GPUs
// are used up. Two kinds of choices are skipped: those whose relaxed time (equal work on all GPUs) is no better than
// the best found, and those whose stages would be short enough only with more GPUs than available.
Orchestration best_orchestration(const std::vector<OrchestratedModule> &modules, size_t backbone,
                                 const std::vector<int64_t> &tp, const OrchestrationLimits &limits);

}  // namespace interlace
