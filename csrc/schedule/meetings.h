// Groups of ranks that compute together because the weights that they share are gathered layer by layer.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/step_graph.h"

namespace interlace {

// The nodes of a shard gather inside their compute actions, so all ranks of their lanes must run these at the same
// time: the first of each node's forwards and backwards together, then the second, and so on. A node in several shards
// connects them, so a meeting is a connected component of nodes. Each of its ranks is in one of its nodes: see
// StageArrays::shard_by_layer.
struct Meetings {
    // node_lane, lane_ranks, shard_members: as in StageArrays. by_layer: of each shard.
    Meetings(const std::vector<int32_t> &node_lane, const Ragged &lane_ranks, const Ragged &shard_members,
             const std::vector<char> &by_layer);

    std::vector<int32_t> of_node;  // its meeting; -1: it computes with its own lane only
    Ragged nodes, ranks;
};

}  // namespace interlace
