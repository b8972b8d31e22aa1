#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "simulate/events.h"

namespace interlace {

// The arrays of a StageGraph that say where stages are (schedule/graph.py), with the pipeline of each chunk of a step.
struct StagePlaces {
    std::vector<int32_t> chunk_pipeline, node_pipeline, node_stage, node_lane, pipeline_module;
};

// At which node each rank of `lists` runs each of its actions; -1 for what is neither compute nor message.
// A consumer's side of a message is the next stage of the same chunk, or the first stage of the chunk that reads it.
class OwnLanes {
  public:
    // Throws std::invalid_argument where nodes do not stand in the order of pipelines and stages.
    OwnLanes(const ActionLists &lists, const StagePlaces &places);

    // Empty if row i of `rank` names what exists and the rank is there; else what is wrong. Sets `node`.
    std::string find(int64_t i, int64_t rank, int32_t &node);

  private:
    const ActionLists &lists_;
    const StagePlaces &places_;
    std::vector<int32_t> pipeline_stage_;  // [pipelines + 1], where the stages of each begin in stage_node_
    std::vector<int32_t> stage_node_;      // [stages + 1], where the nodes of each begin
};

}  // namespace interlace
