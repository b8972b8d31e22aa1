#include "simulate/own_lanes.h"

#include <stdexcept>

namespace interlace {

OwnLanes::OwnLanes(const ActionLists &lists, const StagePlaces &places) : lists_(lists), places_(places) {
    const int64_t nodes = static_cast<int64_t>(places.node_pipeline.size());
    const int64_t pipelines = static_cast<int64_t>(places.pipeline_module.size());
    for (int64_t node = 0; node < nodes; ++node) {
        const int32_t pipeline = places.node_pipeline[node], stage = places.node_stage[node];
        const int32_t open = static_cast<int32_t>(pipeline_stage_.size()) - 1;  // the pipeline begun last
        if (pipeline == open + 1 && stage == 0) {
            pipeline_stage_.push_back(static_cast<int32_t>(stage_node_.size()));
            stage_node_.push_back(static_cast<int32_t>(node));
        } else if (pipeline == open && stage == places.node_stage[node - 1] + 1) {
            stage_node_.push_back(static_cast<int32_t>(node));
        } else if (pipeline != open || stage != places.node_stage[node - 1]) {
            throw std::invalid_argument("node " + std::to_string(node) +
                                        " stands out of order: give nodes by pipeline, then by stage, each from 0");
        }
    }
    if (static_cast<int64_t>(pipeline_stage_.size()) != pipelines)
        throw std::invalid_argument("the nodes are of " + std::to_string(pipeline_stage_.size()) +
                                    " pipelines, pipeline_module names " + std::to_string(pipelines));
    pipeline_stage_.push_back(static_cast<int32_t>(stage_node_.size()));
    stage_node_.push_back(static_cast<int32_t>(nodes));
}

std::string OwnLanes::find(int64_t i, int64_t rank, int32_t &node) {
    node = -1;
    const ActionRow &row = lists_.row(i);
    const ActionOp op = lists_.op(i);
    const bool message = op == ActionOp::SEND || op == ActionOp::RECV;
    if (!is_compute(op) && !message) return "";
    const int64_t chunks = static_cast<int64_t>(places_.chunk_pipeline.size());
    if (row.chunk < 0 || row.chunk >= chunks) return "names chunk " + std::to_string(row.chunk) + ", which is none";
    int32_t pipeline = places_.chunk_pipeline[row.chunk], stage = row.stage;
    if (places_.pipeline_module[pipeline] != row.module)
        return "names chunk " + std::to_string(row.chunk) + ", which is of another module";
    const auto stages = [&] { return pipeline_stage_[pipeline + 1] - pipeline_stage_[pipeline]; };
    if (stage < 0 || stage >= stages()) return "names stage " + std::to_string(stage) + ", which is none";
    if (message) {
        if (row.peer < 0 || row.peer >= lists_.lanes)
            return "names lane " + std::to_string(row.peer) + ", which is none";
        if ((op == ActionOp::SEND) == (row.grad != 0)) {  // on the side of the consumer
            if (row.other == row.chunk) {
                ++stage;
            } else {
                if (row.other < 0 || row.other >= chunks)
                    return "is read by chunk " + std::to_string(row.other) + ", which is none";
                pipeline = places_.chunk_pipeline[row.other];
                stage = 0;
            }
            if (stage >= stages()) return "is read by the stage after the last one";
        }
    }
    const int64_t at = static_cast<int64_t>(pipeline_stage_[pipeline]) + stage;
    for (int32_t each = stage_node_[at]; each < stage_node_[at + 1]; ++each)
        if (lists_.place(places_.node_lane[each], rank) >= 0) {
            node = each;
            return "";
        }
    return "is for lane " + std::to_string(places_.node_lane[stage_node_[at]]) + ", of which this rank is no member";
}

}  // namespace interlace
