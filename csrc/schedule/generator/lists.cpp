#include "schedule/generator/lists.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "common/interrupt.h"
#include "schedule/checker/check.h"

namespace interlace {

namespace {

class Writer {
  public:
    explicit Writer(const StepGraph &graph)
        : graph_(graph), wire_(graph.messages(), -1), place_(graph.messages(), -1), lists(graph.stages.ranks) {}

    void write(Step step) {
        const int32_t job = job_of(step);
        if (op_of(step) == ActionOp::BACKWARD_WEIGHT)
            return put(graph_.lane(job), graph_.compute_row(op_of(step), job));
        const bool back = hands_back(step);
        const auto receive_all = [&](int32_t, int32_t message) { receive(message + back); };
        const auto send_all = [&](int32_t, int32_t message) { send(message + back); };
        if (back)
            graph_.each_reader(job, receive_all);
        else
            graph_.each_input(job, receive_all);
        put(graph_.lane(job), graph_.compute_row(op_of(step), job));
        if (back)
            graph_.each_input(job, send_all);
        else
            graph_.each_reader(job, send_all);
    }

  private:
    struct Wire {
        std::vector<int32_t> sent;
        size_t received = 0;
    };

    void put(int32_t lane, const ActionRow &row) {
        const Ragged &ranks = graph_.stages.lane_ranks;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank) lists[*rank].push_back(row);
    }

    void send(int32_t message) {
        if (!graph_.travels(message)) return;
        const int32_t from = graph_.sender(message), to = graph_.receiver(message);
        const int64_t key = int64_t{from} * graph_.lanes() + to;
        const auto found = numbers_.emplace(key, static_cast<int32_t>(wires_.size())).first;
        if (found->second == static_cast<int32_t>(wires_.size())) wires_.emplace_back();
        wire_[message] = found->second;
        Wire &wire = wires_[found->second];
        place_[message] = static_cast<int32_t>(wire.sent.size());
        wire.sent.push_back(message);
        put(from, graph_.message_row(ActionOp::SEND, message));
    }

    void receive(int32_t message) {
        if (wire_[message] < 0) return;  // not sent: in the sequence the producer already precedes the step
        Wire &wire = wires_[wire_[message]];
        const int32_t to = graph_.receiver(message);
        while (wire.received <= static_cast<size_t>(place_[message]))
            put(to, graph_.message_row(ActionOp::RECV, wire.sent[wire.received++]));
    }

    const StepGraph &graph_;
    std::unordered_map<int64_t, int32_t> numbers_;  // sending lane * lanes + receiving lane -> wire
    std::vector<Wire> wires_;
    std::vector<int32_t> wire_, place_;  // of each message that is sent: its wire, its place on it

  public:
    std::vector<std::vector<ActionRow>> lists;
};

// Active reductions in the common order; latest: node -> place in the sequence of its last backward, -1 if none.
std::vector<int32_t> order_reductions(const StepGraph &graph, const std::vector<int64_t> &latest) {
    const StageArrays &stages = graph.stages;
    const std::vector<char> active = graph.active_reductions();
    std::vector<std::tuple<bool, int64_t, int32_t>> keys;
    for (int32_t r = 0; r < stages.reduction_members.size(); ++r) {
        if (!active[r]) continue;
        int64_t last = -1;
        for (const int32_t *node = stages.reduction_members.begin(r); node < stages.reduction_members.end(r); ++node)
            last = std::max(last, latest[*node]);
        keys.emplace_back(stages.reduction_tied[r] != 0, last, r);
    }
    std::sort(keys.begin(), keys.end());
    std::vector<int32_t> order;
    for (const auto &key : keys) order.push_back(std::get<2>(key));
    return order;
}

// Per shard: true if all its nodes run equally many actions of each kind, in one order.
std::vector<char> alike(const StepGraph &graph, const std::vector<Step> &order) {
    Poll poll;
    const StageArrays &stages = graph.stages;
    std::vector<std::vector<ActionOp>> runs(graph.nodes());
    for (const Step step : order) {
        poll();
        runs[graph.job_node[job_of(step)]].push_back(op_of(step));
    }
    std::vector<char> found(stages.shard_by_layer);
    for (int32_t shard = 0; shard < stages.shard_members.size(); ++shard) {
        const int32_t *const nodes = stages.shard_members.begin(shard);
        for (int32_t i = 0; found[shard] && i < stages.shard_members.count(shard); ++i)
            found[shard] = runs[nodes[i]] == runs[nodes[0]];
    }
    return found;
}

// by_layer: shards that are gathered layer by layer.
RankLists lists_of(const StepGraph &graph, const std::vector<Step> &order, bool reduce_grad, bool dispatch,
                   const std::vector<char> &by_layer) {
    Poll poll;
    const StageArrays &stages = graph.stages;
    Writer writer(graph);
    std::vector<int64_t> latest(graph.nodes(), -1);
    // The row of each rank of its lane after which a node's last backward, or all its compute actions, are done.
    std::vector<std::vector<size_t>> behind(graph.nodes()), over(graph.nodes());
    for (size_t i = 0; i < order.size(); ++i) {
        poll();
        writer.write(order[i]);
        const int32_t node = graph.job_node[job_of(order[i])], lane = stages.node_lane[node];
        over[node].clear();
        for (const int32_t *rank = stages.lane_ranks.begin(lane); rank < stages.lane_ranks.end(lane); ++rank)
            over[node].push_back(writer.lists[*rank].size());
        if (op_of(order[i]) == ActionOp::FORWARD) continue;
        latest[node] = static_cast<int64_t>(i);
        behind[node] = over[node];
    }
    const auto place_in = [&](int32_t node, int32_t rank) {
        const Ragged &ranks = stages.lane_ranks;
        const int32_t lane = stages.node_lane[node];
        return std::find(ranks.begin(lane), ranks.end(lane), rank) - ranks.begin(lane);
    };

    struct Placed {
        size_t after;  // number of rows of the rank before it
        ActionRow row;
    };
    std::vector<std::vector<Placed>> shards(stages.ranks), reduces(stages.ranks);
    const std::vector<char> active = graph.active_shards();
    for (const ActionOp op : {ActionOp::UNSHARD, ActionOp::RESHARD})
        for (int32_t shard = 0; shard < stages.shard_ranks.size(); ++shard) {
            if (!active[shard] || (op == ActionOp::RESHARD && !stages.shard_full[shard])) continue;
            for (int32_t i = stages.shard_ranks.first[shard]; i < stages.shard_ranks.first[shard + 1]; ++i) {
                const int32_t rank = stages.shard_ranks.items[i];
                size_t after = 0;
                graph.each_node(rank, [&](int32_t node) {
                    if (op == ActionOp::RESHARD && !over[node].empty() && stages.shard_members.find(shard, node) >= 0)
                        after = std::max(after, over[node][place_in(node, rank)]);
                });
                const bool layers = op == ActionOp::UNSHARD && by_layer[shard];
                shards[rank].push_back({after, graph.shard_row(layers ? ActionOp::UNSHARD_LAYERS : op, shard, i)});
            }
        }
    if (reduce_grad) {
        for (const int32_t r : order_reductions(graph, latest)) {
            for (int32_t i = stages.reduction_ranks.first[r]; i < stages.reduction_ranks.first[r + 1]; ++i) {
                const int32_t rank = stages.reduction_ranks.items[i];
                std::vector<Placed> &mine = reduces[rank];
                size_t after = mine.empty() ? 0 : mine.back().after;
                graph.each_node(rank, [&](int32_t node) {
                    const bool adds = stages.node_trains[node] && stages.reduction_members.find(r, node) >= 0;
                    if (adds && !behind[node].empty()) after = std::max(after, behind[node][place_in(node, rank)]);
                });
                mine.push_back({after, graph.reduction_row(r, i)});
            }
        }
    }

    RankLists made;
    made.first.push_back(0);
    for (int32_t rank = 0; rank < stages.ranks; ++rank) {
        const std::vector<ActionRow> &rows = writer.lists[rank];
        poll(static_cast<int64_t>(rows.size()));
        if (dispatch) made.rows.push_back(graph.dispatch_row(rank));
        std::vector<Placed> &all = shards[rank];
        all.insert(all.end(), reduces[rank].begin(), reduces[rank].end());
        std::stable_sort(all.begin(), all.end(), [](const Placed &a, const Placed &b) { return a.after < b.after; });
        size_t done = 0;
        for (const Placed &placed : all) {
            made.rows.insert(made.rows.end(), rows.begin() + done, rows.begin() + placed.after);
            made.rows.push_back(placed.row);
            done = placed.after;
        }
        made.rows.insert(made.rows.end(), rows.begin() + done, rows.end());
        made.first.push_back(static_cast<int64_t>(made.rows.size()));
    }
    return made;
}

}  // namespace

RankLists make_lists(const StepGraph &graph, const std::vector<Step> &order, bool reduce_grad, bool dispatch) {
    const StageArrays &stages = graph.stages;
    const std::vector<char> candidates = alike(graph, order), none(candidates.size(), 0);
    RankLists made = lists_of(graph, order, reduce_grad, dispatch, candidates);
    const auto runs = [&](const RankLists &lists) {
        return !check_lists(graph, lists.rows, lists.first, reduce_grad, dispatch, {}, {}).fault;
    };
    if (candidates == none || runs(made)) return made;
    std::vector<char> found = none;
    made = lists_of(graph, order, reduce_grad, dispatch, found);
    for (int32_t module = 0; module < stages.modules; ++module) {
        std::vector<char> more = found;
        for (size_t shard = 0; shard < more.size(); ++shard) {
            const int32_t node = candidates[shard] ? *stages.shard_members.begin(static_cast<int64_t>(shard)) : -1;
            if (node >= 0 && stages.pipeline_module[stages.node_pipeline[node]] == module) more[shard] = 1;
        }
        if (more == found) continue;
        RankLists lists = lists_of(graph, order, reduce_grad, dispatch, more);
        if (!runs(lists)) continue;
        made = std::move(lists);
        found = std::move(more);
    }
    return made;
}

}  // namespace interlace
