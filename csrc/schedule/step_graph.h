// Requirements of one step on a layout: the stages of each chunk, the inputs of each run, and the messages between
// lanes. It is the only code shared by generators and checker, so that the checker can prove lists from any source.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace interlace {

// The rows of a schedule. Ops and columns have the same order as in python/interlace/schedule/actions.py.
enum class ActionOp : int32_t {
    FORWARD,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    SEND,
    RECV,
    DISPATCH,
    UNSHARD,
    UNSHARD_LAYERS,
    RESHARD,
    REDUCE_GRAD,
    OPTIMIZER_STEP,
    COUNT
};
inline bool is_unshard(ActionOp op) { return op == ActionOp::UNSHARD || op == ActionOp::UNSHARD_LAYERS; }
inline bool is_compute(ActionOp op) { return op <= ActionOp::BACKWARD_WEIGHT; }

constexpr int64_t ACTION_COLUMNS = 7;
struct ActionRow {
    ActionOp op;
    int32_t module, stage, chunk, other, peer, grad;
};
static_assert(sizeof(ActionRow) == ACTION_COLUMNS * sizeof(int32_t), "rows are copied from and to int32 [n, 7]");

// A list of lists: those of i are items[first[i]] .. items[first[i + 1] - 1].
struct Ragged {
    std::vector<int32_t> first, items;

    int64_t size() const { return static_cast<int64_t>(first.size()) - 1; }
    const int32_t *begin(int64_t i) const { return items.data() + first[i]; }
    const int32_t *end(int64_t i) const { return items.data() + first[i + 1]; }
    int32_t count(int64_t i) const { return first[i + 1] - first[i]; }
    // Position in `items` of an item of list i, which must be ascending; -1: not in the list.
    int32_t find(int64_t i, int32_t item) const {
        const int32_t *const at = std::lower_bound(begin(i), end(i), item);
        return at != end(i) && *at == item ? static_cast<int32_t>(at - items.data()) : -1;
    }
    // pairs: (list, item), items in the order given.
    static Ragged of(int64_t lists, const std::vector<std::pair<int32_t, int32_t>> &pairs);
};

// StageGraph.arrays (python/interlace/schedule/graph.py).
struct StageArrays {
    std::vector<int32_t> node_pipeline, node_stage, node_lane, node_copy, node_trains;
    std::vector<int32_t> pipeline_module, pipeline_first;
    Ragged lane_ranks;
    std::vector<std::pair<int32_t, int32_t>> module_links;
    Ragged reduction_ranks;
    std::vector<int32_t> reduction_node;  // beside reduction_ranks.items
    std::vector<char> reduction_tied;
    Ragged reduction_members;  // nodes, ascending like ranks
    Ragged shard_ranks;
    std::vector<int32_t> shard_node;  // beside shard_ranks.items
    std::vector<char> shard_full;
    // True if it may be gathered layer by layer: each of its ranks has all of its layers, and only them, in one stage.
    std::vector<char> shard_by_layer;
    Ragged shard_members;
    int32_t ranks, modules;
};

// A half-open range for `for` loops.
template <typename T>
struct Range {
    T begin_, end_;
    T begin() const { return begin_; }
    T end() const { return end_; }
};

// A job is a node and a chunk of its pipeline: one FORWARD, and one BACKWARD if `backward` is set. Jobs of a chunk
// follow each other in the order of the nodes, so in a pipeline of several stages (which has no copies) job j passes
// its output to job j + 1. A link is a pair of chunks; the second reads rows of the first. Its consumer is the first
// stage of the second. Its producer is the copy of the first's last stage on the consumer's lane, or copy 0.
//
// A message is the output of one job sent to a job on another lane, or the gradient sent back: 2 * job + grad from
// stage to stage, 2 * (jobs + link) + grad over a link.
class StepGraph {
  public:
    // links: sorted, without duplicates. Throws std::invalid_argument for parts that do not fit together.
    StepGraph(StageArrays arrays, std::vector<int32_t> chunk_pipeline, std::vector<std::pair<int32_t, int32_t>> links,
              bool backward);

    StageArrays stages;
    std::vector<int32_t> chunk_pipeline, chunk_index, chunk_first;  // chunk_first: its first job
    std::vector<int32_t> job_node, job_chunk;
    std::vector<char> backward;                         // job -> true if it runs a BACKWARD
    std::vector<int32_t> link_producer, link_consumer;  // jobs
    std::vector<int32_t> topological;                   // node -> place; nodes that feed it come earlier
    std::vector<int32_t> chunk_order;                   // chunks; a chunk comes before its readers
    Ragged lane_nodes, rank_lanes;
    Ragged node_shards;  // shards that it computes with, on any rank

    // use(node) for each node that a rank computes.
    template <typename Use>
    void each_node(int32_t rank, Use use) const {
        for (const int32_t *lane = rank_lanes.begin(rank); lane < rank_lanes.end(rank); ++lane)
            for (const int32_t *node = lane_nodes.begin(*lane); node < lane_nodes.end(*lane); ++node) use(*node);
    }

    int32_t jobs() const { return static_cast<int32_t>(job_node.size()); }
    int32_t chunks() const { return static_cast<int32_t>(chunk_pipeline.size()); }
    int32_t lanes() const { return static_cast<int32_t>(stages.lane_ranks.size()); }
    int32_t nodes() const { return static_cast<int32_t>(stages.node_lane.size()); }
    int32_t messages() const { return 2 * (jobs() + static_cast<int32_t>(link_producer.size())); }
    int32_t lane(int32_t job) const { return stages.node_lane[job_node[job]]; }

    bool last_stage(int32_t job) const {
        return stages.node_stage[job_node[job]] == last_stage_[chunk_pipeline[job_chunk[job]]];
    }
    // The links out of and into a chunk.
    Range<int32_t> links_out(int32_t chunk) const { return {link_out_first_[chunk], link_out_first_[chunk + 1]}; }
    Range<const int32_t *> links_in(int32_t chunk) const { return {link_in_.begin(chunk), link_in_.end(chunk)}; }

    // use(job) for each job, producers before their readers or, in reverse, after them. poll(jobs): called per chunk.
    template <typename Poll, typename Use>
    void each_job(bool producers_first, Poll &poll, const Use &use) const {
        for (int32_t i = 0; i < chunks(); ++i) {
            const int32_t c = chunk_order[producers_first ? i : chunks() - 1 - i];
            const int32_t first = chunk_first[c], size = chunk_first[c + 1] - first;
            poll(size);
            for (int32_t j = 0; j < size; ++j) use(producers_first ? first + j : first + size - 1 - j);
        }
    }
    // use(other job, message) for each job whose output this one's FORWARD reads. For jobs on one lane the message is
    // not sent: see `travels`.
    template <typename Use>
    void each_input(int32_t job, Use use) const {
        if (stages.node_stage[job_node[job]] > 0) return use(job - 1, 2 * (job - 1));
        for (const int32_t link : links_in(job_chunk[job])) use(link_producer[link], 2 * (jobs() + link));
    }
    // The same for each job that reads this one's output.
    template <typename Use>
    void each_reader(int32_t job, Use use) const {
        if (!last_stage(job)) return use(job + 1, 2 * job);
        const Range<int32_t> links = links_out(job_chunk[job]);
        for (int32_t link = links.begin(); link < links.end(); ++link)
            if (link_producer[link] == job) use(link_consumer[link], 2 * (jobs() + link));
    }

    struct Ends {
        int32_t producer, consumer;  // jobs; named by the output, also if the gradient is sent
    };
    Ends ends(int32_t message) const {
        const int32_t i = message / 2;
        if (i < jobs()) return {i, i + 1};
        return {link_producer[i - jobs()], link_consumer[i - jobs()]};
    }
    bool travels(int32_t message) const {
        if (message / 2 < jobs() && last_stage(message / 2)) return false;
        const auto [producer, consumer] = ends(message);
        return lane(producer) != lane(consumer) && (message % 2 == 0 || backward[producer]);
    }
    int32_t sender(int32_t message) const {  // lane
        const auto [producer, consumer] = ends(message);
        return lane(message % 2 == 0 ? producer : consumer);
    }
    int32_t receiver(int32_t message) const { return sender(message ^ 1); }

    ActionRow compute_row(ActionOp op, int32_t job) const;
    ActionRow message_row(ActionOp op, int32_t message) const;
    ActionRow reduction_row(int32_t reduction, int32_t place) const;  // place: in reduction_ranks.items

    ActionRow shard_row(ActionOp op, int32_t shard, int32_t place) const;  // place: in shard_ranks.items
    ActionRow dispatch_row(int32_t rank) const;                            // named after its first stage

    // True if some member of the reduction has a BACKWARD in this step that could add to it.
    std::vector<char> active_reductions() const;
    // True if some member of the shard computes in this step.
    std::vector<char> active_shards() const;

    // Position in shard_ranks.items of a rank of a shard; -1: not in the shard.
    int32_t shard_place(int32_t shard, int32_t rank) const;
    // use(place in shard_ranks.items) for each shard that a rank needs for its compute at a node.
    template <typename Use>
    void each_shard(int32_t node, int32_t rank, Use use) const {
        for (const int32_t *shard = node_shards.begin(node); shard < node_shards.end(node); ++shard)
            if (const int32_t place = shard_place(*shard, rank); place >= 0) use(place);
    }

  private:
    void order_modules();
    void connect(const std::vector<std::pair<int32_t, int32_t>> &links);
    void find_backwards();

    std::vector<int32_t> last_stage_;      // of each pipeline
    std::vector<int32_t> link_out_first_;  // links are sorted by producer
    Ragged link_in_;
    std::vector<int32_t> module_order_;  // module -> place
};

}  // namespace interlace
