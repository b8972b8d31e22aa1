#include "schedule/check.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "common/interrupt.h"
#include "schedule/meetings.h"
#include "schedule/read_rows.h"

namespace interlace {

namespace {

// The lists, with what each row is.
struct Lists {
    const StepGraph &graph;
    const std::vector<ActionRow> &rows;
    const std::vector<int64_t> &first;
    std::vector<Meaning> meanings;

    int32_t ranks() const { return graph.stages.ranks; }
};

// All ranks of a lane have its compute actions in one order.
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
        std::fill(at.begin(), at.end(), 0);
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i) {
            poll();
            if (!is_compute(lists.rows[i].op) || lists.meanings[i].place == 0) continue;
            const int32_t lane = lists.graph.lane(lists.meanings[i].id), leader = *ranks.begin(lane);
            // There is one: as every job is complete, lists that agree so far end together.
            const int64_t other = leading[lane][at[lane]++];
            if (lists.rows[other].op != lists.rows[i].op || lists.meanings[other].id != lists.meanings[i].id)
                return Fault{FaultKind::LANE_ORDER, rank, lists.rows[i], lists.rows[other], leader};
        }
    }
    return std::nullopt;
}

// On every rank a sum begins when all that adds to it is over, tied weights last.
std::optional<Fault> check_sums(const Lists &lists) {
    Poll poll;
    const StageArrays &stages = lists.graph.stages;
    std::vector<int64_t> summed(stages.node_lane.size());  // by which row of this rank
    for (int32_t rank = 0; rank < lists.ranks(); ++rank) {
        std::fill(summed.begin(), summed.end(), -1);
        int64_t tied = -1;
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i) {
            poll();
            const ActionRow &row = lists.rows[i];
            if (row.op == ActionOp::REDUCE_GRAD) {
                if (stages.reduction_tied[row.other])
                    tied = i;
                else if (tied >= 0)
                    return Fault{FaultKind::AFTER_TIED, rank, row, lists.rows[tied]};
                const Ragged &members = stages.reduction_members;
                for (const int32_t *node = members.begin(row.other); node < members.end(row.other); ++node)
                    if (stages.node_trains[*node]) summed[*node] = i;
            } else if (is_compute(row.op) && row.op != ActionOp::FORWARD) {
                const int64_t before = summed[lists.graph.job_node[lists.meanings[i].id]];
                if (before >= 0) return Fault{FaultKind::AFTER_REDUCTION, rank, row, lists.rows[before]};
            }
        }
    }
    return std::nullopt;
}

// Weights are used while they are whole, and given up once.
std::optional<Fault> check_shards(const Lists &lists) {
    Poll poll;
    const StepGraph &graph = lists.graph;
    std::vector<int32_t> shard_of(graph.stages.shard_ranks.items.size());  // by place there
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
                    fault = Fault{FaultKind::NO_UNSHARD, rank, row, other(ActionOp::UNSHARD)};
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

// All ranks of a shard gather it once, or all layer by layer. by_layer: filled, of each shard.
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

// The nodes of a meeting run equally many forwards and backwards in one order: each gathers as often as the others.
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

// Some order of all reductions and gathers holds on every rank: then each is begun by all its ranks before anybody has
// to wait for it. What meetings compute has its place in that order too, because it gathers and sums. Gathers are
// numbered behind reductions, and what meetings do behind gathers.
std::optional<Fault> check_reduction_order(const Lists &lists, const Meetings &meetings) {
    const Ragged &reducing = lists.graph.stages.reduction_ranks, &sharing = lists.graph.stages.shard_ranks;
    const auto reductions = static_cast<int32_t>(reducing.size());
    const auto once = reductions + static_cast<int32_t>(sharing.size());
    const auto all = once + static_cast<int32_t>(meetings.ranks.size());
    const auto begin = [&](int32_t n) {
        return n < reductions ? reducing.begin(n)
               : n < once     ? sharing.begin(n - reductions)
                              : meetings.ranks.begin(n - once);
    };
    const auto end = [&](int32_t n) {
        return n < reductions ? reducing.end(n) : n < once ? sharing.end(n - reductions) : meetings.ranks.end(n - once);
    };
    // What a meeting does is one number, again and again: its ranks do it equally often.
    const auto number_of = [&](int64_t i) {
        const ActionRow &row = lists.rows[i];
        if (row.op == ActionOp::REDUCE_GRAD) return row.other;
        if (is_unshard(row.op)) return reductions + row.other;
        const int32_t meeting = is_compute(row.op) ? meetings.of_node[lists.graph.job_node[lists.meanings[i].id]] : -1;
        return meeting < 0 ? -1 : once + meeting;
    };
    std::vector<std::vector<int64_t>> queues(lists.ranks());
    for (int32_t rank = 0; rank < lists.ranks(); ++rank)
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i)
            if (number_of(i) >= 0) queues[rank].push_back(i);
    std::vector<size_t> at(lists.ranks(), 0);
    std::vector<int32_t> arrived(all, 0), todo;
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

    // Runs the rank's next action if it need not wait; whether it is over.
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

    // A shard that the rank's next row waits for; -1: none.
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

    // The meeting of what the rank computes next; -1: none.
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

    // What stands later in the rank's own list cannot be there in time: no action waits for that.
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
            // In one order of all gathers: who has not started this one has it still before it.
            const auto starts = [&](int64_t i) {
                return is_unshard(lists_.rows[i].op) && lists_.rows[i].other == shard;
            };
            const Ragged &sharing = graph_.stages.shard_ranks;
            return *std::find_if(sharing.begin(shard), sharing.end(shard), [&](int32_t other) {
                for (int64_t i = at_[other]; i < lists_.first[other + 1]; ++i)
                    if (starts(i)) return true;
                return false;
            });
        }
        if (const int32_t meeting = meeting_of(rank); meeting >= 0) {
            const Ragged &meeting_ranks = meetings_.ranks;
            return *std::find_if(meeting_ranks.begin(meeting), meeting_ranks.end(meeting),
                                 [&](int32_t other) { return !waiting_[other] || meeting_of(other) != meeting; });
        }
        // All ranks of a lane meet its actions in one order: who waits elsewhere has not come to this one.
        const Ragged &ranks = graph_.stages.lane_ranks;
        const int32_t lane = graph_.lane(meaning.id);
        return *std::find_if(ranks.begin(lane), ranks.end(lane), [&](int32_t other) {
            return lists_.meanings[at_[other]].id != meaning.id || !waiting_[other];
        });
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
    std::vector<int32_t> arrived_;    // the same: how many ranks of the lane wait there
    std::vector<int64_t> at_;         // rank -> its next row
    std::vector<char> waiting_;       // rank -> for the others of its lane
    std::vector<int32_t> todo_;
    std::optional<Fault> fault_;
};

// What every rank holds at most, and the first place where that is more than it may.
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
                        bool reduce_grad, const std::vector<double> &activation_bytes,
                        const std::vector<double> &memory_limit) {
    CheckResult result;
    Lists lists{graph, rows, first, {}};
    result.fault = read_rows(graph, rows, first, reduce_grad, lists.meanings);
    if (!result.fault) result.fault = check_lanes(lists);
    if (!result.fault) result.fault = check_sums(lists);
    if (!result.fault) result.fault = check_shards(lists);
    std::vector<char> by_layer;
    if (!result.fault) result.fault = check_ways(lists, by_layer);
    if (result.fault) return result;
    const Meetings meetings(graph, by_layer);
    result.fault = check_meetings(lists, meetings);
    if (!result.fault) result.fault = check_reduction_order(lists, meetings);
    if (!result.fault) result.fault = Runner(lists, meetings).run();
    if (!result.fault) find_peaks(lists, activation_bytes, memory_limit, result);
    return result;
}

}  // namespace interlace
