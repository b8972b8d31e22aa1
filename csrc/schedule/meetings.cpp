#include "schedule/meetings.h"

#include <numeric>
#include <utility>

namespace interlace {

Meetings::Meetings(const StepGraph &graph, const std::vector<char> &by_layer) : of_node(graph.nodes(), -1) {
    const Ragged &members = graph.stages.shard_members;
    std::vector<int32_t> first(graph.nodes());  // another node of the same meeting, or itself
    std::iota(first.begin(), first.end(), 0);
    std::vector<char> meets(graph.nodes(), 0);
    const auto find = [&](int32_t node) {
        while (first[node] != node) node = first[node];
        return node;
    };
    for (int32_t shard = 0; shard < members.size(); ++shard) {
        if (!by_layer[shard]) continue;
        for (const int32_t *node = members.begin(shard); node < members.end(shard); ++node) {
            meets[*node] = 1;
            first[find(*node)] = find(*members.begin(shard));
        }
    }
    std::vector<std::pair<int32_t, int32_t>> having, present;
    int32_t count = 0;
    for (int32_t node = 0; node < graph.nodes(); ++node)
        if (meets[node] && find(node) == node) of_node[node] = count++;
    for (int32_t node = 0; node < graph.nodes(); ++node) {
        if (!meets[node]) continue;
        of_node[node] = of_node[find(node)];
        having.emplace_back(of_node[node], node);
        const Ragged &ranks = graph.stages.lane_ranks;
        const int32_t lane = graph.stages.node_lane[node];
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank)
            present.emplace_back(of_node[node], *rank);
    }
    nodes = Ragged::of(count, having);
    ranks = Ragged::of(count, present);
}

}  // namespace interlace
