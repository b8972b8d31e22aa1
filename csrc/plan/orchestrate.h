#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace interlace {

// One module of DistTrain's problem (section 5.1). forward[t] is the time of one sample through the whole module at the
// t-th tensor-parallel size; bytes are of the whole module, activations per sample.
struct OrchestratedModule {
    std::vector<double> forward;
    int64_t layers;  // 0: any pipeline size; otherwise pipeline size times vpp divides it
    double weight_bytes, optimizer_bytes, activation_bytes;
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
};

// The integers DP, TP, PP of every module that minimise T_warm / vpp + T_steady (DistTrain 5.1, eqs. 1-5) with at most
// `gpus` GPUs and every GPU's memory kept; exact, where the paper rounds a convex relaxation. backbone: the position of
// the language model in modules; those before it feed it, those after it are fed by it.
//
// For given DP and TP sizes the warm-up is fixed and only the pipeline sizes remain: from the smallest that memory
// allows, the bottleneck alone is raised until the GPUs run out, which is exact because GPUs, stage times and memory
// are all monotone in pipeline sizes. Sizes whose relaxed time (equal work on all GPUs) is no better than the best
// found are skipped.
Orchestration best_orchestration(const std::vector<OrchestratedModule> &modules, size_t backbone,
                                 const std::vector<int64_t> &tp, const OrchestrationLimits &limits);

}  // namespace interlace
