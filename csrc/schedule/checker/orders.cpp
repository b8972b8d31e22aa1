#include "schedule/checker/orders.h"

#include <algorithm>
#include <numeric>

#include "common/interrupt.h"

namespace interlace {

std::optional<Fault> check_lanes(const Lists &lists) {
    Poll poll;
    const Ragged &ranks = lists.graph.stages.lane_ranks;
    std::vector<std::vector<int64_t>> leading(ranks.size());  // rows of the lane's first rank
    for (int32_t rank = 0; rank < lists.ranks(); ++rank)
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i) {
            poll();
            if (!is_compute(lists.rows[i].op) || lists.meanings[i].place != 0) continue;
            const int32_t lane = lists.graph.lane(lists.meanings[i].id);
            if (ranks.count(lane) > 1) leading[lane].push_back(i);
        }
    std::vector<size_t> at(ranks.size());
    for (int32_t rank = 0; rank < lists.ranks(); ++rank) {
        const Ragged &own = lists.graph.rank_lanes;
        for (const int32_t *lane = own.begin(rank); lane < own.end(rank); ++lane) at[*lane] = 0;
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i) {
            poll();
            if (!is_compute(lists.rows[i].op) || lists.meanings[i].place == 0) continue;
            const int32_t lane = lists.graph.lane(lists.meanings[i].id), leader = *ranks.begin(lane);
            // Always found: every job is complete, so lists that agree up to here end together.
            const int64_t other = leading[lane][at[lane]++];
            if (lists.rows[other].op != lists.rows[i].op || lists.meanings[other].id != lists.meanings[i].id)
                return Fault{FaultKind::LANE_ORDER, rank, lists.rows[i], lists.rows[other], leader};
        }
    }
    return std::nullopt;
}

std::optional<Fault> check_sums(const Lists &lists) {
    Poll poll;
    const StageArrays &stages = lists.graph.stages;
    std::vector<int64_t> summed(stages.node_lane.size());  // node of this rank -> row that sums its gradients
    for (int32_t rank = 0; rank < lists.ranks(); ++rank) {
        lists.graph.each_node(rank, [&](int32_t node) { summed[node] = -1; });
        int64_t tied = -1;
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i) {
            poll();
            const ActionRow &row = lists.rows[i];
            if (row.op == ActionOp::REDUCE_GRAD) {
                if (stages.reduction_tied[row.other])
                    tied = i;
                else if (tied >= 0)
                    return Fault{FaultKind::AFTER_TIED, rank, row, lists.rows[tied]};
                lists.graph.each_node(rank, [&](int32_t node) {
                    if (stages.node_trains[node] && stages.reduction_members.find(row.other, node) >= 0)
                        summed[node] = i;
                });
            } else if (is_compute(row.op) && row.op != ActionOp::FORWARD) {
                const int64_t before = summed[lists.graph.job_node[lists.meanings[i].id]];
                if (before >= 0) return Fault{FaultKind::AFTER_REDUCTION, rank, row, lists.rows[before]};
            }
        }
    }
    return std::nullopt;
}

// The row at or after `i` with which the rank gathers the entry `place` of the shards. read_rows has found that one
// exists.
static ActionRow later_unshard(const Lists &lists, int32_t rank, int64_t i, int32_t place) {
    while (i + 1 < lists.first[rank + 1] && !(is_unshard(lists.rows[i].op) && lists.meanings[i].id == place)) ++i;
    return lists.rows[i];
}

std::optional<Fault> check_shards(const Lists &lists) {
    Poll poll;
    const StepGraph &graph = lists.graph;
    std::vector<int32_t> shard_of(graph.stages.shard_ranks.items.size());  // by entry of shard_ranks.items
    for (int32_t shard = 0; shard < graph.stages.shard_ranks.size(); ++shard)
        for (int32_t i = graph.stages.shard_ranks.first[shard]; i < graph.stages.shard_ranks.first[shard + 1]; ++i)
            shard_of[i] = shard;
    std::vector<char> whole(shard_of.size(), 0), gone = whole;
    for (int32_t rank = 0; rank < lists.ranks(); ++rank)
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i) {
            poll();
            const ActionRow &row = lists.rows[i];
            const int32_t id = lists.meanings[i].id;
            std::optional<Fault> fault;
            const auto use = [&](int32_t place) {
                const auto other = [&](ActionOp op) { return graph.shard_row(op, shard_of[place], place); };
                if (gone[place])
                    fault = Fault{FaultKind::AFTER_RESHARD, rank, row, other(ActionOp::RESHARD)};
                else if (!whole[place])
                    fault = Fault{FaultKind::NO_UNSHARD, rank, row, later_unshard(lists, rank, i, place)};
            };
            if (is_unshard(row.op)) {
                whole[id] = 1;
            } else if (row.op == ActionOp::RESHARD) {
                use(id);
                gone[id] = 1;
            } else if (is_compute(row.op)) {
                graph.each_shard(graph.job_node[id], rank, use);
            }
            if (fault) return fault;
        }
    return std::nullopt;
}

std::optional<Fault> check_ways(const Lists &lists, std::vector<char> &by_layer) {
    Poll poll;
    const Ragged &sharing = lists.graph.stages.shard_ranks;
    std::vector<int64_t> leading(sharing.size(), -1);  // its first gather
    std::vector<int32_t> leader(sharing.size(), -1);
    by_layer.assign(sharing.size(), 0);
    for (int32_t rank = 0; rank < lists.ranks(); ++rank)
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i) {
            poll();
            const ActionRow &row = lists.rows[i];
            if (!is_unshard(row.op)) continue;
            if (leading[row.other] < 0) {
                leading[row.other] = i;
                leader[row.other] = rank;
                by_layer[row.other] = row.op == ActionOp::UNSHARD_LAYERS;
            } else if (const ActionRow &other = lists.rows[leading[row.other]]; other.op != row.op) {
                return Fault{FaultKind::TWO_WAYS, rank, row, other, leader[row.other]};
            }
        }
    return std::nullopt;
}

std::optional<Fault> check_meetings(const Lists &lists, const Meetings &meetings) {
    Poll poll;
    const StageArrays &stages = lists.graph.stages;
    std::vector<std::vector<int64_t>> runs(lists.graph.nodes());  // rows of the first rank of its lane
    for (int32_t rank = 0; rank < lists.ranks(); ++rank)
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i) {
            poll();
            if (!is_compute(lists.rows[i].op) || lists.meanings[i].place != 0) continue;
            const int32_t node = lists.graph.job_node[lists.meanings[i].id];
            if (meetings.of_node[node] >= 0) runs[node].push_back(i);
        }
    const auto rank_of = [&](int32_t node) { return *stages.lane_ranks.begin(stages.node_lane[node]); };
    for (int32_t meeting = 0; meeting < meetings.nodes.size(); ++meeting) {
        const int32_t *const nodes = meetings.nodes.begin(meeting);
        for (int32_t i = 1; i < meetings.nodes.count(meeting); ++i) {
            const std::vector<int64_t> &mine = runs[nodes[0]], &other = runs[nodes[i]];
            poll(static_cast<int64_t>(mine.size()));
            for (size_t at = 0; at < std::max(mine.size(), other.size()); ++at) {
                if (at < mine.size() && at < other.size() && lists.rows[mine[at]].op == lists.rows[other[at]].op)
                    continue;
                const bool lacks = at >= other.size();
                const ActionRow &row = lists.rows[lacks ? mine[at] : other[at]];
                const bool both = at < mine.size() && at < other.size();
                return Fault{FaultKind::MEETING_ORDER, rank_of(nodes[lacks ? 0 : i]), row,
                             both ? lists.rows[mine[at]] : row, rank_of(nodes[lacks ? i : 0])};
            }
        }
    }
    return std::nullopt;
}

std::optional<Fault> check_reduction_order(const Lists &lists, const Meetings &meetings) {
    // Numbers: reductions first, then gathers, then actions of meetings, and last DISPATCH, which all ranks share.
    const Ragged &reducing = lists.graph.stages.reduction_ranks, &sharing = lists.graph.stages.shard_ranks;
    const auto reductions = static_cast<int32_t>(reducing.size());
    const auto once = reductions + static_cast<int32_t>(sharing.size());
    const auto all = once + static_cast<int32_t>(meetings.ranks.size());
    std::vector<int32_t> everyone(lists.ranks());
    std::iota(everyone.begin(), everyone.end(), 0);
    const auto begin = [&](int32_t n) {
        return n < reductions ? reducing.begin(n)
               : n < once     ? sharing.begin(n - reductions)
               : n < all      ? meetings.ranks.begin(n - once)
                              : everyone.data();
    };
    const auto end = [&](int32_t n) {
        return n < reductions ? reducing.end(n)
               : n < once     ? sharing.end(n - reductions)
               : n < all      ? meetings.ranks.end(n - once)
                              : everyone.data() + everyone.size();
    };
    // The actions of a meeting share one number, used repeatedly: its ranks run it equally often.
    const auto number_of = [&](int64_t i) {
        const ActionRow &row = lists.rows[i];
        if (row.op == ActionOp::REDUCE_GRAD) return row.other;
        if (is_unshard(row.op)) return reductions + row.other;
        if (row.op == ActionOp::DISPATCH) return all;
        const int32_t meeting = is_compute(row.op) ? meetings.of_node[lists.graph.job_node[lists.meanings[i].id]] : -1;
        return meeting < 0 ? -1 : once + meeting;
    };
    std::vector<std::vector<int64_t>> queues(lists.ranks());
    for (int32_t rank = 0; rank < lists.ranks(); ++rank)
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i)
            if (number_of(i) >= 0) queues[rank].push_back(i);
    std::vector<size_t> at(lists.ranks(), 0);
    std::vector<int32_t> arrived(all + 1, 0), todo;
    const auto arrive = [&](int32_t rank) {
        if (at[rank] == queues[rank].size()) return;
        const int32_t number = number_of(queues[rank][at[rank]]);
        if (++arrived[number] == end(number) - begin(number)) todo.push_back(number);
    };
    for (int32_t rank = 0; rank < lists.ranks(); ++rank) arrive(rank);
    Poll poll;
    while (!todo.empty()) {
        const int32_t number = todo.back();
        todo.pop_back();
        poll(end(number) - begin(number));
        arrived[number] = 0;
        for (const int32_t *rank = begin(number); rank < end(number); ++rank) {
            ++at[*rank];
            arrive(*rank);
        }
    }
    for (int32_t rank = 0; rank < lists.ranks(); ++rank) {
        if (at[rank] == queues[rank].size()) continue;
        const int64_t mine = queues[rank][at[rank]];
        const int32_t number = number_of(mine);
        for (const int32_t *other = begin(number); other < end(number); ++other) {
            const int64_t theirs = queues[*other][at[*other]];
            if (number_of(theirs) != number)
                return Fault{FaultKind::REDUCTION_ORDER, *other, lists.rows[theirs], lists.rows[mine]};
        }
    }
    return std::nullopt;
}

}  // namespace interlace
