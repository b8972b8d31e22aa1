#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "simulate/events.h"

namespace interlace {

// The arrays of a StageGraph that locate stages (schedule/graph.py), with the pipeline of each chunk of a step.
struct StagePlaces {
    std::vector<int32_t> chunk_pipeline, node_pipeline, node_stage, node_lane, pipeline_module;
};

// The node at which each rank of `lists` runs each action; -1 for actions that are neither compute nor messages.
// A consumer's side of a message is the next stage of the same chunk, or the first stage of the chunk that reads it.
class OwnLanes {
  public:
    // Throws std::invalid_argument if nodes are not in the order of pipelines and stages.
    OwnLanes(const ActionLists &lists, const StagePlaces &places);

    // Returns "" if the names in row i of `rank` exist and the rank is there; otherwise the problem. Sets `node`.
    std::string find(int64_t i, int64_t rank, int32_t &node);

  private:
    const ActionLists &lists_;
    const StagePlaces &places_;
    std::vector<int32_t> pipeline_stage_;  // [pipelines + 1]: start of each pipeline's stages in stage_node_
    std::vector<int32_t> stage_node_;      // [stages + 1]: start of each stage's nodes
};

}  // namespace interlace
