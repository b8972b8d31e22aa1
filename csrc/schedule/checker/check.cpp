#include "schedule/checker/check.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "common/interrupt.h"
#include "schedule/checker/orders.h"

namespace interlace {

namespace {

class Runner {
  public:
    Runner(const Lists &lists, const Meetings &meetings)
        : lists_(lists), graph_(lists.graph), meetings_(meetings), met_(meetings.ranks.size(), 0) {
        wire_.assign(graph_.messages(), -1);
        got_first_.assign(graph_.messages(), -1);
        std::unordered_map<int64_t, int32_t> numbers;
        int64_t slots = 0;
        for (int32_t message = 0; message < graph_.messages(); ++message) {
            if (!graph_.travels(message)) continue;
            const int32_t from = graph_.sender(message), to = graph_.receiver(message);
            const auto added =
                numbers.emplace(int64_t{from} * graph_.lanes() + to, static_cast<int32_t>(wires_.size()));
            if (added.second) wires_.push_back({from, std::vector<std::vector<int32_t>>(size(from)), {}});
            wires_[added.first->second].received.resize(size(to), 0);
            wire_[message] = added.first->second;
            got_first_[message] = slots;
            slots += size(to);
        }
        got_.assign(slots, 0);
        done_.assign(OPS * static_cast<size_t>(graph_.jobs()), 0);
        arrived_.assign(done_.size(), 0);
        unsharded_.assign(graph_.stages.shard_ranks.size(), 0);
        at_.assign(lists.first.begin(), lists.first.end() - 1);
        waiting_.assign(lists.ranks(), 0);
    }

    std::optional<Fault> run() {
        for (int32_t rank = lists_.ranks(); rank-- > 0;) todo_.push_back(rank);
        while (!todo_.empty() && !fault_) {
            const int32_t rank = todo_.back();
            todo_.pop_back();
            while (at_[rank] < lists_.first[rank + 1] && !fault_ && advance(rank)) poll_();
        }
        if (!fault_) find_deadlock();
        return std::move(fault_);
    }

  private:
    static constexpr int32_t OPS = 4;
    struct Wire {
        int32_t from;                            // lane
        std::vector<std::vector<int32_t>> sent;  // by each rank of the sending lane
        std::vector<size_t> received;            // by each rank of the receiving lane
    };

    int32_t size(int32_t lane) const { return graph_.stages.lane_ranks.count(lane); }
    bool done(ActionOp op, int32_t job) const {
        return done_[OPS * static_cast<size_t>(job) + static_cast<size_t>(op)];
    }
    bool gradient_done(int32_t job) const {
        return done(ActionOp::BACKWARD, job) || done(ActionOp::BACKWARD_INPUT, job);
    }
    void wake(int32_t lane, int32_t but) {
        const Ragged &ranks = graph_.stages.lane_ranks;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank)
            if (*rank != but) todo_.push_back(*rank);
    }
    bool refuse(FaultKind kind, int32_t rank, const ActionRow &row, const ActionRow &other = {}) {
        if (!fault_) fault_ = Fault{kind, rank, row, other};
        return false;
    }

    // Runs the rank's next action if it need not wait. Returns true if it ran.
    bool advance(int32_t rank) {
        const ActionRow &row = lists_.rows[at_[rank]];
        const Meaning meaning = lists_.meanings[at_[rank]];
        if (is_compute(row.op)) return compute(rank, row, meaning);
        if (row.op == ActionOp::RECV) {
            if (!receive(rank, row, meaning)) return false;
        } else if (row.op == ActionOp::SEND) {
            if (!send(rank, row, meaning)) return false;
        } else if (is_unshard(row.op)) {
            unshard(rank, row.other);
        } else if (row.op == ActionOp::RESHARD) {
            if (!whole(row.other)) return false;
        }
        ++at_[rank];
        return true;
    }

    void unshard(int32_t rank, int32_t shard) {
        ++unsharded_[shard];
        if (!whole(shard)) return;
        const Ragged &ranks = graph_.stages.shard_ranks;
        for (const int32_t *other = ranks.begin(shard); other < ranks.end(shard); ++other)
            if (*other != rank) todo_.push_back(*other);
    }
    bool whole(int32_t shard) const { return unsharded_[shard] == graph_.stages.shard_ranks.count(shard); }

    // The shard for which the rank's next row waits; -1: none.
    int32_t missing_shard(int32_t rank) const {
        const ActionRow &row = lists_.rows[at_[rank]];
        if (row.op == ActionOp::RESHARD) return whole(row.other) ? -1 : row.other;
        if (!is_compute(row.op)) return -1;
        const int32_t node = graph_.job_node[lists_.meanings[at_[rank]].id];
        const Ragged &shards = graph_.node_shards;
        for (const int32_t *shard = shards.begin(node); shard < shards.end(node); ++shard)
            if (graph_.shard_place(*shard, rank) >= 0 && !whole(*shard)) return *shard;
        return -1;
    }

    bool send(int32_t rank, const ActionRow &row, const Meaning &meaning) {
        const auto [producer, consumer] = graph_.ends(meaning.id);
        if (row.grad == 0 && !done(ActionOp::FORWARD, producer)) return refuse(FaultKind::SEND_FORWARD, rank, row);
        if (row.grad != 0 && !gradient_done(consumer))
            return refuse(FaultKind::SEND_BACKWARD, rank, row, graph_.compute_row(ActionOp::BACKWARD, consumer));
        wires_[wire_[meaning.id]].sent[meaning.place].push_back(meaning.id);
        wake(graph_.receiver(meaning.id), rank);
        return true;
    }

    bool receive(int32_t rank, const ActionRow &row, const Meaning &meaning) {
        Wire &wire = wires_[wire_[meaning.id]];
        const size_t next = wire.received[meaning.place];
        for (const std::vector<int32_t> &sent : wire.sent)
            if (sent.size() <= next) return false;
        for (const std::vector<int32_t> &sent : wire.sent)
            if (sent[next] != meaning.id)
                return refuse(FaultKind::MESSAGE_ORDER, rank, row, graph_.message_row(ActionOp::SEND, sent[next]));
        ++wire.received[meaning.place];
        got_[got_first_[meaning.id] + meaning.place] = 1;
        return true;
    }

    bool compute(int32_t rank, const ActionRow &row, const Meaning &meaning) {
        if (waiting_[rank]) return false;
        if (!has_what_it_needs(rank, row, meaning) || missing_shard(rank) >= 0) return false;
        if (const int32_t meeting = meeting_of(rank); meeting >= 0) return meet(rank, meeting);
        const size_t slot = OPS * static_cast<size_t>(meaning.id) + static_cast<size_t>(row.op);
        const int32_t lane = graph_.lane(meaning.id);
        if (++arrived_[slot] < size(lane)) {
            waiting_[rank] = 1;
            return false;
        }
        done_[slot] = 1;
        const Ragged &ranks = graph_.stages.lane_ranks;
        for (const int32_t *other = ranks.begin(lane); other < ranks.end(lane); ++other) {
            waiting_[*other] = 0;
            ++at_[*other];
        }
        wake(lane, rank);
        return true;
    }

    // The meeting of the rank's next compute action; -1: none.
    int32_t meeting_of(int32_t rank) const { return meetings_.of_node[graph_.job_node[lists_.meanings[at_[rank]].id]]; }

    bool meet(int32_t rank, int32_t meeting) {
        const Ragged &ranks = meetings_.ranks;
        waiting_[rank] = 1;
        if (++met_[meeting] < ranks.count(meeting)) return false;
        met_[meeting] = 0;
        for (const int32_t *other = ranks.begin(meeting); other < ranks.end(meeting); ++other) {
            const auto op = static_cast<size_t>(lists_.rows[at_[*other]].op);
            done_[OPS * static_cast<size_t>(lists_.meanings[at_[*other]].id) + op] = 1;
            waiting_[*other] = 0;
            ++at_[*other];
            if (*other != rank) todo_.push_back(*other);
        }
        return true;
    }

    // An action cannot wait for a later row of the rank's own list: that row is never reached in time.
    bool has_what_it_needs(int32_t rank, const ActionRow &row, const Meaning &meaning) {
        const int32_t job = meaning.id;
        const auto has = [&](int32_t other, int32_t message, bool back) {
            if (graph_.lane(other) == graph_.lane(job))
                return back ? gradient_done(other) : done(ActionOp::FORWARD, other);
            return got_[got_first_[message] + meaning.place] != 0;
        };
        if (row.op == ActionOp::FORWARD) {
            graph_.each_input(job, [&](int32_t producer, int32_t message) {
                if (!has(producer, message, false))
                    refuse(FaultKind::NO_OUTPUT, rank, row, graph_.compute_row(ActionOp::FORWARD, producer));
            });
            return !fault_;
        }
        if (!done(ActionOp::FORWARD, job)) return refuse(FaultKind::NO_FORWARD, rank, row);
        if (row.op == ActionOp::BACKWARD_WEIGHT) {
            if (!done(ActionOp::BACKWARD_INPUT, job)) return refuse(FaultKind::NO_INPUT_HALF, rank, row);
            return true;
        }
        graph_.each_reader(job, [&](int32_t reader, int32_t message) {
            if (!has(reader, message + 1, true))
                refuse(FaultKind::NO_GRADIENT, rank, row, graph_.compute_row(ActionOp::BACKWARD, reader));
        });
        return !fault_;
    }

    void find_deadlock() {
        Fault fault{FaultKind::DEADLOCK, -1, {}};
        for (int32_t rank = 0; rank < lists_.ranks(); ++rank) {
            fault.at.push_back(at_[rank] - lists_.first[rank]);
            if (at_[rank] < lists_.first[rank + 1]) fault.stuck.push_back({rank, waits_for(rank)});
        }
        if (fault.stuck.empty()) return;
        fault.rank = fault.stuck.front().rank;
        fault.row = lists_.rows[at_[fault.rank]];
        fault_ = std::move(fault);
    }

    int32_t waits_for(int32_t rank) const {
        const Meaning &meaning = lists_.meanings[at_[rank]];
        if (lists_.rows[at_[rank]].op == ActionOp::RECV) {
            const Wire &wire = wires_[wire_[meaning.id]];
            size_t place = 0;
            while (wire.sent[place].size() > wire.received[meaning.place]) ++place;
            return graph_.stages.lane_ranks.begin(wire.from)[place];
        }
        if (const int32_t shard = missing_shard(rank); shard >= 0) {
            // All gathers have one order: a rank that has not started this one still has it ahead in its list.
            const auto starts = [&](int64_t i) {
                return is_unshard(lists_.rows[i].op) && lists_.rows[i].other == shard;
            };
            const Ragged &sharing = graph_.stages.shard_ranks;
            return first_of(sharing, shard, rank, [&](int32_t other) {
                for (int64_t i = at_[other]; i < lists_.first[other + 1]; ++i)
                    if (starts(i)) return true;
                return false;
            });
        }
        if (const int32_t meeting = meeting_of(rank); meeting >= 0)
            return first_of(meetings_.ranks, meeting, rank,
                            [&](int32_t other) { return !waiting_[other] || meeting_of(other) != meeting; });
        // All ranks of a lane have its actions in one order: a rank that waits elsewhere has not reached this one.
        return first_of(graph_.stages.lane_ranks, graph_.lane(meaning.id), rank, [&](int32_t other) {
            return !waiting_[other] || lists_.meanings[at_[other]].id != meaning.id;
        });
    }

    // The first rank of a group for which `missing` is true; otherwise the waiting rank itself.
    template <typename Missing>
    static int32_t first_of(const Ragged &ranks, int32_t group, int32_t rank, Missing missing) {
        const auto *const found = std::find_if(ranks.begin(group), ranks.end(group), missing);
        return found == ranks.end(group) ? rank : *found;
    }

    const Lists &lists_;
    const StepGraph &graph_;
    const Meetings &meetings_;
    std::vector<int32_t> met_;  // meeting -> ranks that wait there
    Poll poll_;
    std::vector<Wire> wires_;
    std::vector<int32_t> wire_;       // message -> wire
    std::vector<int64_t> got_first_;  // message -> its first place in got_, one for each receiving rank
    std::vector<char> got_;
    std::vector<int32_t> unsharded_;  // shard -> ranks that have started its gather
    std::vector<char> done_;          // OPS * job + op
    std::vector<int32_t> arrived_;    // likewise: ranks of the lane that wait there
    std::vector<int64_t> at_;         // rank -> its next row
    std::vector<char> waiting_;       // rank -> it waits for the others of its lane
    std::vector<int32_t> todo_;
    std::optional<Fault> fault_;
};

// Peak memory of every rank, and the first place that exceeds its limit.
void find_peaks(const Lists &lists, const std::vector<double> &bytes, const std::vector<double> &limit,
                CheckResult &result) {
    Poll poll;
    for (int32_t rank = 0; rank < lists.ranks(); ++rank) {
        int32_t held = 0, most = 0;
        double size = 0.0, largest = 0.0;
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i) {
            poll();
            const ActionOp op = lists.rows[i].op;
            const int32_t job = lists.meanings[i].id;
            double now = size;
            if (op == ActionOp::FORWARD) {
                const double own = bytes.empty() ? 0.0 : bytes[job];
                now = size + own;
                if (lists.graph.backward[job]) {
                    ++held;
                    size = now;
                }
            } else if (op == ActionOp::BACKWARD || op == ActionOp::BACKWARD_WEIGHT) {
                --held;
                size -= bytes.empty() ? 0.0 : bytes[job];
            }
            most = std::max(most, held);
            largest = std::max(largest, now);
            if (!limit.empty() && now > limit[rank] && !result.fault) {
                result.fault = Fault{FaultKind::MEMORY, rank, lists.rows[i]};
                result.fault->count = held;
                result.fault->bytes = now;
            }
        }
        result.peak_in_flight.push_back(most);
        result.peak_bytes.push_back(largest);
    }
}

}  // namespace

CheckResult check_lists(const StepGraph &graph, const std::vector<ActionRow> &rows, const std::vector<int64_t> &first,
                        bool reduce_grad, bool dispatch, const std::vector<double> &activation_bytes,
                        const std::vector<double> &memory_limit) {
    CheckResult result;
    Lists lists{graph, rows, first, {}};
    result.fault = read_rows(graph, rows, first, reduce_grad, dispatch, lists.meanings);
    if (!result.fault) result.fault = check_lanes(lists);
    if (!result.fault) result.fault = check_sums(lists);
    if (!result.fault) result.fault = check_shards(lists);
    std::vector<char> by_layer;
    if (!result.fault) result.fault = check_ways(lists, by_layer);
    if (result.fault) return result;
    const Meetings meetings(graph.stages.node_lane, graph.stages.lane_ranks, graph.stages.shard_members, by_layer);
    result.fault = check_meetings(lists, meetings);
    if (!result.fault) result.fault = check_reduction_order(lists, meetings);
    if (!result.fault) result.fault = Runner(lists, meetings).run();
    if (!result.fault) find_peaks(lists, activation_bytes, memory_limit, result);
    return result;
}

}  // namespace interlace
