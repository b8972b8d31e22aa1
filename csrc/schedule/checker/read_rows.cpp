#include "schedule/checker/read_rows.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr Meaning NONE{-1, -1};
constexpr int32_t COMPUTE_OPS = 4;

auto fields(const ActionRow &row) {
    return std::make_tuple(row.op, row.module, row.stage, row.chunk, row.other, row.peer, row.grad);
}
bool same(const ActionRow &a, const ActionRow &b) { return fields(a) == fields(b); }

class Reader {
  public:
    Reader(const StepGraph &graph, bool reduce_grad, bool dispatch)
        : graph_(graph), dispatch_(dispatch), active_(graph.stages.reduction_members.size(), 0),
          dispatched_(graph.stages.ranks, 0) {
        if (reduce_grad) active_ = graph.active_reductions();
        active_shards_ = graph.active_shards();
        for (int32_t job = 0; job < graph.jobs(); ++job) {
            job_first_.push_back(job_slots_);
            job_slots_ += lane_size(graph.lane(job));
        }
        for (int32_t message = 0; message < graph.messages(); ++message) {
            const bool travels = graph.travels(message);
            send_first_.push_back(send_slots_);
            receive_first_.push_back(receive_slots_);
            if (!travels) continue;
            send_slots_ += lane_size(graph.sender(message));
            receive_slots_ += lane_size(graph.receiver(message));
        }
        computed_.assign(COMPUTE_OPS * job_slots_, 0);
        sent_.assign(send_slots_, 0);
        received_.assign(receive_slots_, 0);
        reduced_.assign(graph.stages.reduction_ranks.items.size(), 0);
        unsharded_.assign(graph.stages.shard_ranks.items.size(), 0);
        resharded_ = unsharded_;
        by_layer_.assign(graph.stages.shard_ranks.size(), 0);
    }

    Meaning meaning(int32_t rank, const ActionRow &row) const {
        if (is_compute(row.op)) return compute(rank, row);
        if (row.op == ActionOp::SEND || row.op == ActionOp::RECV) return message(rank, row);
        if (row.op == ActionOp::REDUCE_GRAD) return reduction(rank, row);
        if (is_unshard(row.op) || row.op == ActionOp::RESHARD) return shard(rank, row);
        if (row.op == ActionOp::DISPATCH && dispatch_ && same(row, graph_.dispatch_row(rank))) return {rank, 0};
        return NONE;
    }

    // True if the row occurs for the first time.
    bool mark(const ActionRow &row, const Meaning &found) {
        char *seen = nullptr;
        if (row.op == ActionOp::UNSHARD_LAYERS) by_layer_[row.other] = 1;
        if (is_compute(row.op))
            seen = &computed_[COMPUTE_OPS * (job_first_[found.id] + found.place) + static_cast<int32_t>(row.op)];
        else if (row.op == ActionOp::SEND)
            seen = &sent_[send_first_[found.id] + found.place];
        else if (row.op == ActionOp::RECV)
            seen = &received_[receive_first_[found.id] + found.place];
        else if (is_unshard(row.op))
            seen = &unsharded_[found.id];
        else if (row.op == ActionOp::RESHARD)
            seen = &resharded_[found.id];
        else if (row.op == ActionOp::DISPATCH)
            seen = &dispatched_[found.id];
        else
            seen = &reduced_[found.id];
        return !std::exchange(*seen, 1);
    }

    std::optional<Fault> missing() const {
        for (int32_t rank = 0; dispatch_ && rank < graph_.stages.ranks; ++rank)
            if (!dispatched_[rank]) return Fault{FaultKind::LACKS, rank, graph_.dispatch_row(rank)};
        const Ragged &ranks = graph_.stages.lane_ranks;
        for (int32_t job = 0; job < graph_.jobs(); ++job)
            for (int32_t place = 0; place < lane_size(graph_.lane(job)); ++place)
                if (auto fault = missing_of(job, place, ranks.begin(graph_.lane(job))[place])) return fault;
        for (int32_t message = 0; message < graph_.messages(); ++message) {
            if (!graph_.travels(message)) continue;
            for (const ActionOp op : {ActionOp::SEND, ActionOp::RECV}) {
                const int32_t lane = op == ActionOp::SEND ? graph_.sender(message) : graph_.receiver(message);
                for (int32_t place = 0; place < lane_size(lane); ++place)
                    if (!(op == ActionOp::SEND ? sent_[send_first_[message] + place]
                                               : received_[receive_first_[message] + place]))
                        return Fault{FaultKind::LACKS, ranks.begin(lane)[place], graph_.message_row(op, message)};
            }
        }
        const Ragged &reducing = graph_.stages.reduction_ranks;
        for (int32_t r = 0; r < reducing.size(); ++r)
            for (int32_t i = reducing.first[r]; active_[r] && i < reducing.first[r + 1]; ++i)
                if (!reduced_[i]) return Fault{FaultKind::LACKS, reducing.items[i], graph_.reduction_row(r, i)};
        const Ragged &sharing = graph_.stages.shard_ranks;
        for (int32_t s = 0; s < sharing.size(); ++s)
            for (int32_t i = sharing.first[s]; active_shards_[s] && i < sharing.first[s + 1]; ++i)
                for (const ActionOp op : {ActionOp::UNSHARD, ActionOp::RESHARD})
                    if (op == ActionOp::UNSHARD ? !unsharded_[i] : graph_.stages.shard_full[s] && !resharded_[i])
                        return Fault{FaultKind::LACKS, sharing.items[i],
                                     graph_.shard_row(op == ActionOp::UNSHARD ? unshard_of(s) : op, s, i)};
        return std::nullopt;
    }

  private:
    int32_t lane_size(int32_t lane) const { return graph_.stages.lane_ranks.count(lane); }

    int32_t place_in(int32_t lane, int32_t rank) const {
        const Ragged &ranks = graph_.stages.lane_ranks;
        const auto *const at = std::find(ranks.begin(lane), ranks.end(lane), rank);
        return at == ranks.end(lane) ? -1 : static_cast<int32_t>(at - ranks.begin(lane));
    }

    bool is_chunk(int32_t chunk) const { return chunk >= 0 && chunk < graph_.chunks(); }

    Meaning compute(int32_t rank, const ActionRow &row) const {
        if (!is_chunk(row.chunk)) return NONE;
        for (int32_t job = graph_.chunk_first[row.chunk]; job < graph_.chunk_first[row.chunk + 1]; ++job) {
            const int32_t place = place_in(graph_.lane(job), rank);
            if (place < 0 || !same(row, graph_.compute_row(row.op, job))) continue;
            if (row.op == ActionOp::FORWARD || graph_.backward[job]) return {job, place};
        }
        return NONE;
    }

    Meaning message(int32_t rank, const ActionRow &row) const {
        if (!is_chunk(row.chunk) || !is_chunk(row.other) || row.grad < 0 || row.grad > 1) return NONE;
        int32_t found = -1;
        if (row.chunk == row.other) {
            const int64_t job = int64_t{graph_.chunk_first[row.chunk]} + row.stage;
            if (row.stage >= 0 && job < graph_.chunk_first[row.chunk + 1]) found = 2 * static_cast<int32_t>(job);
        } else {
            const Range<int32_t> links = graph_.links_out(row.chunk);
            const auto *const consumers = graph_.link_consumer.data();
            const auto *const at = std::lower_bound(consumers + links.begin(), consumers + links.end(), row.other,
                                                    [&](int32_t job, int32_t c) { return graph_.job_chunk[job] < c; });
            if (at != consumers + links.end() && graph_.job_chunk[*at] == row.other)
                found = 2 * (graph_.jobs() + static_cast<int32_t>(at - consumers));
        }
        if (found < 0 || !graph_.travels(found + row.grad) || !same(row, graph_.message_row(row.op, found + row.grad)))
            return NONE;
        found += row.grad;
        const int32_t place = place_in(row.op == ActionOp::SEND ? graph_.sender(found) : graph_.receiver(found), rank);
        return place < 0 ? NONE : Meaning{found, place};
    }

    Meaning reduction(int32_t rank, const ActionRow &row) const {
        const Ragged &ranks = graph_.stages.reduction_ranks;
        if (row.other < 0 || row.other >= ranks.size() || !active_[row.other]) return NONE;
        const int32_t i = ranks.find(row.other, rank);
        return i >= 0 && same(row, graph_.reduction_row(row.other, i)) ? Meaning{i, 0} : NONE;
    }

    Meaning shard(int32_t rank, const ActionRow &row) const {
        if (row.other < 0 || row.other >= graph_.stages.shard_ranks.size() || !active_shards_[row.other]) return NONE;
        if (row.op == ActionOp::RESHARD && !graph_.stages.shard_full[row.other]) return NONE;
        if (row.op == ActionOp::UNSHARD_LAYERS && !graph_.stages.shard_by_layer[row.other]) return NONE;
        const int32_t i = graph_.shard_place(row.other, rank);
        return i >= 0 && same(row, graph_.shard_row(row.op, row.other, i)) ? Meaning{i, 0} : NONE;
    }

    // The op that gathers the shard in these lists.
    ActionOp unshard_of(int32_t shard) const { return by_layer_[shard] ? ActionOp::UNSHARD_LAYERS : ActionOp::UNSHARD; }

    std::optional<Fault> missing_of(int32_t job, int32_t place, int32_t rank) const {
        const char *const seen = &computed_[COMPUTE_OPS * (job_first_[job] + place)];
        const auto row = [&](ActionOp op) { return graph_.compute_row(op, job); };
        const auto has = [&](ActionOp op) { return seen[static_cast<int32_t>(op)] != 0; };
        if (!has(ActionOp::FORWARD)) return Fault{FaultKind::LACKS, rank, row(ActionOp::FORWARD)};
        if (!graph_.backward[job]) return std::nullopt;
        const bool input = has(ActionOp::BACKWARD_INPUT), weight = has(ActionOp::BACKWARD_WEIGHT);
        const ActionRow half = row(input ? ActionOp::BACKWARD_INPUT : ActionOp::BACKWARD_WEIGHT);
        if (has(ActionOp::BACKWARD)) {
            if (input || weight) return Fault{FaultKind::BESIDES, rank, half, row(ActionOp::BACKWARD)};
        } else if (input != weight) {
            const ActionRow lacking = row(input ? ActionOp::BACKWARD_WEIGHT : ActionOp::BACKWARD_INPUT);
            return Fault{FaultKind::HALF, rank, lacking, half};
        } else if (!input) {
            return Fault{FaultKind::LACKS, rank, row(ActionOp::BACKWARD)};
        }
        return std::nullopt;
    }

    const StepGraph &graph_;
    const bool dispatch_;
    std::vector<char> active_;  // reductions
    std::vector<char> dispatched_;
    std::vector<char> active_shards_;
    // Slots: one for each rank of the lane. Where those of each job and message begin, and how many there are in all.
    std::vector<int64_t> job_first_, send_first_, receive_first_;
    int64_t job_slots_ = 0, send_slots_ = 0, receive_slots_ = 0;
    std::vector<char> computed_, sent_, received_, reduced_, unsharded_, resharded_;
    std::vector<char> by_layer_;  // shard -> true if a rank gathers it layer by layer
};

}  // namespace

std::optional<Fault> read_rows(const StepGraph &graph, const std::vector<ActionRow> &rows,
                               const std::vector<int64_t> &first, bool reduce_grad, bool dispatch,
                               std::vector<Meaning> &meanings) {
    Poll poll;
    Reader reader(graph, reduce_grad, dispatch);
    meanings.reserve(rows.size());
    for (int32_t rank = 0; rank < graph.stages.ranks; ++rank) {
        for (int64_t i = first[rank]; i < first[rank + 1]; ++i) {
            poll();
            const Meaning found = reader.meaning(rank, rows[i]);
            if (found.id < 0) return Fault{FaultKind::EXTRA, rank, rows[i]};
            if (!reader.mark(rows[i], found)) {
                Fault fault{FaultKind::TIMES, rank, rows[i]};
                fault.count = std::count_if(rows.begin() + first[rank], rows.begin() + first[rank + 1],
                                            [&](const ActionRow &row) { return same(row, rows[i]); });
                if (fault.count == 1) {  // the other one comes before it: a gather is of one kind
                    ActionRow other = rows[i];
                    other.op = other.op == ActionOp::UNSHARD ? ActionOp::UNSHARD_LAYERS : ActionOp::UNSHARD;
                    return Fault{FaultKind::TWO_WAYS, rank, rows[i], other, rank};
                }
                return fault;
            }
            meanings.push_back(found);
        }
    }
    return reader.missing();
}

}  // namespace interlace
