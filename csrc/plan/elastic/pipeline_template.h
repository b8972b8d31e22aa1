#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

struct PipelineTemplate {
    std::vector<int32_t> cuts;    // stages + 1 boundaries between layers
    std::vector<int32_t> widths;  // GPUs of each stage, all in one node
    double time;                  // T1 + T2 + T3
};

// The stages that minimise the dissertation's T1 + T2 + T3 (section 2.4.1.2) over all numbers of stages, cuts between
// layers and GPUs per stage. Every GPU of every node is used, with nodes in pipeline order. costs is [layers][widths],
// the time of one forward and one backward of a layer on that many GPUs; N_b = per_stage * stages microbatches.
//
// With t_k the cost of stage k and k* the first slowest stage the objective is
//     sum_k t_k  +  (N_b - S + k* - 1) t_k*  +  sum_{k >= k*} t_k,
// which, given tau = t_k*, is a sum over stages: t + (per_stage - 1) tau, plus tau before k*, t after it and 0 at it.
// So for one tau it is a shortest path over (layer, GPU) with a flag "k* has come". For an interval of tau the shortest
// path gives a lower bound. Best-first bisection of the sorted costs that stages can have ends at the exact optimum. A
// pass is O(layers GPUs widths), since from layer to layer the ends of a stage only move on. It visits only layers that
// stages within the interval can place before a GPU and after it. The paper's divide and conquer solves sub-problems by
// another objective than the one that uses them, and so can miss the optimum.
//
// Feasible only if nodes <= layers and some widths sum to gpus; otherwise time is infinite and cuts is empty.
PipelineTemplate best_pipeline_template(const std::vector<double> &costs, int64_t layers,
                                        const std::vector<int64_t> &widths, int64_t nodes, int64_t gpus,
                                        int64_t per_stage);

}  // namespace interlace
