#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/link_cost.h"

namespace interlace {

// One module of DistTrain's problem (section 5.1). forward[t] is the time of one sample through the whole module at the
// t-th tensor-parallel size; bytes are of the whole module, activations and output per sample.
struct OrchestratedModule {
    std::vector<double> forward;
    int64_t layers;  // 0: any pipeline size; otherwise pipeline size times vpp divides it
    double weight_bytes, optimizer_bytes, activation_bytes;
    double gradient_bytes, output_bytes;  // what replicas sum; what every stage sends on
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

// The integers DP, TP, PP of every module that minimise T_warm / vpp + T_steady + T_PP + T_DP (DistTrain 5.1, eqs. 1-5
// and the communication below them; the formulas are in python/interlace/plan/orchestration.py) with at most `gpus`
// GPUs and every GPU's memory kept; exact, where the paper rounds a convex relaxation. backbone: the position of the
// language model in modules; those before it feed it, those after it are fed by it.
//
// For given DP and TP sizes the warm-up is fixed and only the pipeline sizes remain. A limit on the slowest stage and
// one on the slowest gradient sum leave smallest sizes, since both fall with the sizes, while GPUs, memory and
// transfers ask for small ones. So it is enough to raise, from the smallest sizes that memory allows, the module of the
// slowest sum, and from each of these states the module of the slowest stage, until the GPUs run out. Choices whose
// relaxed time (equal work on all GPUs) is no better than the best found are skipped, as are those whose stages could
// be short enough only on more GPUs than there are.
Orchestration best_orchestration(const std::vector<OrchestratedModule> &modules, size_t backbone,
                                 const std::vector<int64_t> &tp, const OrchestrationLimits &limits);

}  // namespace interlace
