#include "schedule/step_graph.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "common/interrupt.h"

namespace interlace {

namespace {

[[noreturn]] void fail(const std::string &message) { throw std::invalid_argument(message); }

// The pipelines and lanes must be laid out as by StageGraph: nodes pipeline by pipeline, stage by stage, copy by copy.
void check_arrays(const StageArrays &stages) {
    const auto nodes = static_cast<int32_t>(stages.node_lane.size());
    const auto pipelines = static_cast<int32_t>(stages.pipeline_module.size());
    for (int32_t p = 0; p < pipelines; ++p) {
        const int32_t first = stages.pipeline_first[p], last = stages.pipeline_first[p + 1];
        if (first >= last) fail("pipeline " + std::to_string(p) + " has no nodes");
        const bool copies = stages.node_stage[last - 1] == 0;
        for (int32_t n = first; n < last; ++n) {
            if (stages.node_pipeline[n] != p || stages.node_stage[n] != (copies ? 0 : n - first) ||
                stages.node_copy[n] != (copies ? n - first : 0))
                fail("node " + std::to_string(n) + " is out of order: give StageGraph.arrays as they are");
        }
    }
    if (pipelines == 0 || stages.pipeline_first[0] != 0 || stages.pipeline_first[pipelines] != nodes)
        fail("pipeline_first must run from 0 to the number of nodes");
    const auto rises = [](const Ragged &lists) {
        for (int64_t i = 0; i < lists.size(); ++i)
            if (!std::is_sorted(lists.begin(i), lists.end(i))) return false;
        return true;
    };
    for (const Ragged *lists :
         {&stages.reduction_ranks, &stages.reduction_members, &stages.shard_ranks, &stages.shard_members})
        if (!rises(*lists)) fail("the ranks and nodes of reductions and shards must rise");
}

}  // namespace

Ragged Ragged::of(int64_t lists, const std::vector<std::pair<int32_t, int32_t>> &pairs) {
    Ragged made;
    made.first.assign(lists + 1, 0);
    for (const auto &[list, item] : pairs) ++made.first[list + 1];
    std::partial_sum(made.first.begin(), made.first.end(), made.first.begin());
    made.items.resize(pairs.size());
    std::vector<int32_t> at(made.first.begin(), made.first.end() - 1);
    for (const auto &[list, item] : pairs) made.items[at[list]++] = item;
    return made;
}

StepGraph::StepGraph(StageArrays arrays, std::vector<int32_t> chunk_pipeline_,
                     std::vector<std::pair<int32_t, int32_t>> links, bool wanted)
    : stages(std::move(arrays)), chunk_pipeline(std::move(chunk_pipeline_)) {
    check_arrays(stages);
    const auto pipelines = static_cast<int32_t>(stages.pipeline_module.size());
    for (int32_t p = 0; p < pipelines; ++p) last_stage_.push_back(stages.node_stage[stages.pipeline_first[p + 1] - 1]);
    std::vector<std::pair<int32_t, int32_t>> pairs;
    for (int32_t n = 0; n < nodes(); ++n) pairs.emplace_back(stages.node_lane[n], n);
    lane_nodes = Ragged::of(lanes(), pairs);
    pairs.clear();
    for (int32_t lane = 0; lane < lanes(); ++lane)
        for (const int32_t *rank = stages.lane_ranks.begin(lane); rank < stages.lane_ranks.end(lane); ++rank)
            pairs.emplace_back(*rank, lane);
    rank_lanes = Ragged::of(stages.ranks, pairs);
    pairs.clear();
    for (int32_t shard = 0; shard < stages.shard_members.size(); ++shard)
        for (const int32_t *node = stages.shard_members.begin(shard); node < stages.shard_members.end(shard); ++node)
            pairs.emplace_back(*node, shard);
    node_shards = Ragged::of(nodes(), pairs);

    Poll poll;
    std::vector<int32_t> following(pipelines, 0);
    chunk_first.push_back(0);
    for (int32_t c = 0; c < chunks(); ++c) {
        const int32_t p = chunk_pipeline[c], first = stages.pipeline_first[p], last = stages.pipeline_first[p + 1];
        poll(last - first);
        chunk_index.push_back(following[p]++);
        if (job_node.size() + (last - first) > INT32_MAX / 4) fail("the step has more jobs than int32 can count");
        for (int32_t n = first; n < last; ++n) {
            job_node.push_back(n);
            job_chunk.push_back(c);
        }
        chunk_first.push_back(jobs());
    }
    order_modules();
    connect(links);
    backward.assign(jobs(), 0);
    if (wanted) find_backwards();
}

void StepGraph::order_modules() {
    // Always the first of the modules that no remaining module feeds, as in StageGraph.module_order.
    module_order_.assign(stages.modules, -1);
    for (int32_t place = 0; place < stages.modules; ++place) {
        int32_t free = -1;
        for (int32_t m = 0; m < stages.modules && free < 0; ++m) {
            const auto fed = [&](const auto &link) { return link.second == m && module_order_[link.first] < 0; };
            if (module_order_[m] < 0 && std::none_of(stages.module_links.begin(), stages.module_links.end(), fed))
                free = m;
        }
        if (free < 0) fail("the modules feed each other in a cycle");
        module_order_[free] = place;
    }
    const auto place_of = [&](int32_t node) {
        return module_order_[stages.pipeline_module[stages.node_pipeline[node]]];
    };
    std::vector<int32_t> order(nodes());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return place_of(a) < place_of(b); });
    topological.resize(nodes());
    for (int32_t place = 0; place < nodes(); ++place) topological[order[place]] = place;

    std::vector<std::pair<int32_t, int32_t>> pairs;
    for (int32_t c = 0; c < chunks(); ++c)
        pairs.emplace_back(module_order_[stages.pipeline_module[chunk_pipeline[c]]], c);
    chunk_order = Ragged::of(stages.modules, pairs).items;
}

void StepGraph::connect(const std::vector<std::pair<int32_t, int32_t>> &links) {
    Poll poll;
    std::vector<std::pair<int32_t, int32_t>> into;
    if (links.size() + job_node.size() > INT32_MAX / 4) fail("the step has more messages than int32 can count");
    link_out_first_.assign(chunks() + 1, 0);
    for (size_t i = 0; i < links.size(); ++i) {
        poll();
        const auto [producer, consumer] = links[i];
        if (i > 0 && !(links[i - 1] < links[i])) fail("links must be sorted and name each pair once");
        const std::pair<int32_t, int32_t> modules(stages.pipeline_module[chunk_pipeline[producer]],
                                                  stages.pipeline_module[chunk_pipeline[consumer]]);
        if (std::find(stages.module_links.begin(), stages.module_links.end(), modules) == stages.module_links.end())
            fail("chunk " + std::to_string(consumer) + " reads chunk " + std::to_string(producer) +
                 ", but the graph has no link between their modules");
        const int32_t reader = chunk_first[consumer];
        if (last_stage_[chunk_pipeline[consumer]] == 0 && chunk_first[consumer + 1] > reader + 1)
            fail("chunk " + std::to_string(consumer) + " reads another, but its module has copies");
        int32_t read = chunk_first[producer + 1] - 1;
        if (last_stage_[chunk_pipeline[producer]] == 0) {  // copies, if there are any
            read = chunk_first[producer];
            for (int32_t job = read; job < chunk_first[producer + 1]; ++job)
                if (lane(job) == lane(reader)) read = job;
        }
        link_producer.push_back(read);
        link_consumer.push_back(reader);
        ++link_out_first_[producer + 1];
        into.emplace_back(consumer, static_cast<int32_t>(i));
    }
    std::partial_sum(link_out_first_.begin(), link_out_first_.end(), link_out_first_.begin());
    link_in_ = Ragged::of(chunks(), into);
}

void StepGraph::find_backwards() {
    std::vector<char> wants(chunks(), 0);  // at its last stage
    for (const int32_t c : chunk_order) {
        bool passed = false;
        for (const int32_t link : links_in(c)) passed |= wants[job_chunk[link_producer[link]]] != 0;
        const bool copies = last_stage_[chunk_pipeline[c]] == 0;
        for (int32_t job = chunk_first[c]; job < chunk_first[c + 1]; ++job) {
            passed |= stages.node_trains[job_node[job]] != 0;
            backward[job] = passed && !copies;
        }
        wants[c] = passed;
        if (!passed || !copies) continue;
        const Range<int32_t> links = links_out(c);
        for (int32_t link = links.begin(); link < links.end(); ++link) backward[link_producer[link]] = 1;
        if (links.begin() == links.end()) backward[chunk_first[c]] = 1;  // it ends in its own loss
    }
}

ActionRow StepGraph::compute_row(ActionOp op, int32_t job) const {
    const int32_t c = job_chunk[job];
    return {op, stages.pipeline_module[chunk_pipeline[c]], stages.node_stage[job_node[job]], c, -1, -1, 0};
}

ActionRow StepGraph::message_row(ActionOp op, int32_t message) const {
    const auto [producer, consumer] = ends(message);
    const int32_t peer = op == ActionOp::SEND ? receiver(message) : sender(message);
    ActionRow row = compute_row(op, producer);
    row.other = job_chunk[consumer];
    row.peer = peer;
    row.grad = message % 2;
    return row;
}

ActionRow StepGraph::reduction_row(int32_t reduction, int32_t place) const {
    const int32_t node = stages.reduction_node[place];
    return {ActionOp::REDUCE_GRAD,
            stages.pipeline_module[stages.node_pipeline[node]],
            stages.node_stage[node],
            -1,
            reduction,
            -1,
            0};
}

ActionRow StepGraph::shard_row(ActionOp op, int32_t shard, int32_t place) const {
    const int32_t node = stages.shard_node[place];
    return {op, stages.pipeline_module[stages.node_pipeline[node]], stages.node_stage[node], -1, shard, -1, 0};
}

ActionRow StepGraph::dispatch_row(int32_t rank) const {
    int32_t first = -1;
    each_node(rank, [&](int32_t node) { first = first < 0 ? node : first; });
    if (first < 0) fail("rank " + std::to_string(rank) + " has no stage");
    return {ActionOp::DISPATCH,
            stages.pipeline_module[stages.node_pipeline[first]],
            stages.node_stage[first],
            -1,
            -1,
            -1,
            0};
}

int32_t StepGraph::shard_place(int32_t shard, int32_t rank) const { return stages.shard_ranks.find(shard, rank); }

std::vector<char> StepGraph::active_shards() const {
    std::vector<char> active(stages.shard_members.size(), 0);
    for (const int32_t node : job_node)
        for (const int32_t *shard = node_shards.begin(node); shard < node_shards.end(node); ++shard) active[*shard] = 1;
    return active;
}

std::vector<char> StepGraph::active_reductions() const {
    std::vector<char> adds(nodes(), 0);
    for (int32_t job = 0; job < jobs(); ++job)
        if (backward[job] && stages.node_trains[job_node[job]]) adds[job_node[job]] = 1;
    std::vector<char> active;
    for (int64_t r = 0; r < stages.reduction_members.size(); ++r)
        active.push_back(std::any_of(stages.reduction_members.begin(r), stages.reduction_members.end(r),
                                     [&](int32_t node) { return adds[node] != 0; }));
    return active;
}

}  // namespace interlace
