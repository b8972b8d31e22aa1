#include "schedule/meetings.h"

#include <numeric>
#include <utility>

namespace interlace {

Meetings::Meetings(const std::vector<int32_t> &node_lane, const Ragged &lane_ranks, const Ragged &shard_members,
                   const std::vector<char> &by_layer)
    : of_node(node_lane.size(), -1) {
    const int32_t all = static_cast<int32_t>(node_lane.size());
    std::vector<int32_t> first(all);  // another node of the same meeting, or itself
    std::iota(first.begin(), first.end(), 0);
    std::vector<char> meets(all, 0);
    const auto find = [&](int32_t node) {
        while (first[node] != node) node = first[node];
        return node;
    };
    for (int32_t shard = 0; shard < shard_members.size(); ++shard) {
        if (!by_layer[shard]) continue;
        for (const int32_t *node = shard_members.begin(shard); node < shard_members.end(shard); ++node) {
            meets[*node] = 1;
            first[find(*node)] = find(*shard_members.begin(shard));
        }
    }
    std::vector<std::pair<int32_t, int32_t>> having, present;
    int32_t count = 0;
    for (int32_t node = 0; node < all; ++node)
        if (meets[node] && find(node) == node) of_node[node] = count++;
    for (int32_t node = 0; node < all; ++node) {
        if (!meets[node]) continue;
        of_node[node] = of_node[find(node)];
        having.emplace_back(of_node[node], node);
        const int32_t lane = node_lane[node];
        for (const int32_t *rank = lane_ranks.begin(lane); rank < lane_ranks.end(lane); ++rank)
            present.emplace_back(of_node[node], *rank);
    }
    nodes = Ragged::of(count, having);
    ranks = Ragged::of(count, present);
}

}  // namespace interlace
