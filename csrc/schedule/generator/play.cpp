#include "schedule/generator/play.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "common/interrupt.h"

namespace interlace {

namespace {

// Kinds of steps. Each node has one queue per kind.
enum Kind : int32_t { FORWARD, BACK, WEIGHT, KINDS };

Kind kind_of(Step step) {
    if (op_of(step) == ActionOp::FORWARD) return FORWARD;
    return op_of(step) == ActionOp::BACKWARD_WEIGHT ? WEIGHT : BACK;
}

class Play {
  public:
    Play(const StepGraph &graph, const std::vector<Step> &order, const Rules &rules, const std::vector<double> &seconds)
        : graph_(graph), order_(order), rules_(rules), seconds_(seconds) {
        const size_t steps = STEPS_PER_JOB * static_cast<size_t>(graph.jobs());
        place_.assign(steps, -1);
        back_.assign(graph.jobs(), -1);
        std::vector<std::pair<int32_t, int32_t>> pairs;
        pairs.reserve(order.size());
        for (size_t i = 0; i < order.size(); ++i) {
            const Step step = order[i];
            place_[step] = static_cast<int32_t>(i);
            if (hands_back(step)) back_[job_of(step)] = step;
            pairs.emplace_back(KINDS * graph.job_node[job_of(step)] + kind_of(step), step);
        }
        queues_ = Ragged::of(KINDS * graph.nodes(), pairs);
        at_.assign(queues_.first.begin(), queues_.first.end() - 1);
        in_flight_.assign(graph.nodes(), 0);
        kept_.assign(graph.nodes(), 0);
        held_.assign(graph.stages.ranks, 0.0);
        idle_.assign(graph.stages.ranks, 1);
        dirty_.assign(graph.lanes(), 0);
        waits_.assign(steps, 0);
        for (int32_t job = 0; job < graph.jobs(); ++job) {
            graph.each_input(job, [&](int32_t, int32_t) { ++waits_[step_of(ActionOp::FORWARD, job)]; });
            if (!graph.backward[job]) continue;
            ++waits_[back_[job]];
            waits_[step_of(ActionOp::BACKWARD_WEIGHT, job)] = 1;
            graph.each_reader(job, [&](int32_t, int32_t) { ++waits_[back_[job]]; });
        }
        started_.reserve(order.size());
    }

    std::vector<Step> run() {
        Poll poll;
        for (int32_t lane = 0; lane < graph_.lanes(); ++lane) touch(lane);
        double clock = 0.0;
        while (true) {
            start_steps(clock);
            if (running_.empty() && !start_earliest(clock)) return std::move(started_);
            clock = running_.top().first;
            while (!running_.empty() && running_.top().first <= clock) {
                poll();
                const Step step = started_[running_.top().second];
                running_.pop();
                finish(step);
            }
        }
    }

  private:
    void touch(int32_t lane) {
        if (dirty_[lane]) return;
        dirty_[lane] = 1;
        todo_.push_back(lane);
    }

    bool idle(int32_t lane) const {
        const Ragged &ranks = graph_.stages.lane_ranks;
        return std::all_of(ranks.begin(lane), ranks.end(lane), [&](int32_t rank) { return idle_[rank] != 0; });
    }

    // True if its limits allow the forward to start.
    bool fits(int32_t node, Step step) const {
        const int32_t job = job_of(step);
        if (graph_.backward[job]) {
            if (!rules_.in_flight.empty() && in_flight_[node] >= rules_.in_flight[node]) return false;
            if (!rules_.kept.empty() && kept_[node] >= rules_.kept[node]) return false;
        }
        if (rules_.limit.empty()) return true;
        const int32_t lane = graph_.lane(job);
        const Ragged &ranks = graph_.stages.lane_ranks;
        return std::all_of(ranks.begin(lane), ranks.end(lane),
                           [&](int32_t rank) { return fits_rank(rank, step, rules_.limit[rank]); });
    }

    bool fits_rank(int32_t rank, Step step, double limit) const {
        double size = held_[rank] + rules_.bytes[job_of(step)];
        // Room for this rank's forwards that are earlier in the order and have not started.
        for (const int32_t *lane = graph_.rank_lanes.begin(rank); lane < graph_.rank_lanes.end(rank); ++lane)
            for (const int32_t *node = graph_.lane_nodes.begin(*lane); node < graph_.lane_nodes.end(*lane); ++node) {
                const int32_t queue = KINDS * *node + FORWARD;
                for (int32_t i = at_[queue]; i < queues_.first[queue + 1] && size <= limit; ++i) {
                    if (place_[queues_.items[i]] >= place_[step]) break;
                    size += rules_.bytes[job_of(queues_.items[i])];
                }
            }
        return size <= limit;
    }

    // The step that the lane should start; -1: none is ready.
    Step choose(int32_t lane) const {
        const Kind kinds[] = {BACK, rules_.weights_first ? WEIGHT : FORWARD, rules_.weights_first ? FORWARD : WEIGHT};
        Step best = -1;
        for (const Kind kind : kinds) {
            for (const int32_t *node = graph_.lane_nodes.begin(lane); node < graph_.lane_nodes.end(lane); ++node) {
                const int32_t queue = KINDS * *node + kind;
                if (at_[queue] == queues_.first[queue + 1]) continue;
                const Step step = queues_.items[at_[queue]];
                if (waits_[step] > 0 || (best >= 0 && place_[step] > place_[best])) continue;
                if (kind == FORWARD && !fits(*node, step)) continue;
                best = step;
            }
            if (best >= 0 && !rules_.by_place) return best;
        }
        return best;
    }

    int32_t rank_of(Kind kind) const {  // of competing steps, the lowest rank starts
        if (kind == BACK || rules_.by_place) return 0;
        return (kind == WEIGHT) == rules_.weights_first ? 1 : 2;
    }

    void start_steps(double clock) {
        // Lanes that share ranks compete. A lane without any of these events has nothing new to start.
        ready_.clear();
        for (const int32_t lane : todo_) {
            dirty_[lane] = 0;
            if (!idle(lane)) continue;
            const Step step = choose(lane);
            if (step >= 0) ready_.push_back(step);
        }
        todo_.clear();
        std::sort(ready_.begin(), ready_.end(), [&](Step a, Step b) {
            const int32_t first = rank_of(kind_of(a)), second = rank_of(kind_of(b));
            return first != second ? first < second : place_[a] < place_[b];
        });
        for (const Step step : ready_)
            if (idle(graph_.lane(job_of(step)))) start(step, clock);
    }

    void start(Step step, double clock) {
        const int32_t job = job_of(step), node = graph_.job_node[job], lane = graph_.lane(job);
        set_idle(lane, 0);
        ++at_[KINDS * node + kind_of(step)];
        if (op_of(step) == ActionOp::FORWARD && graph_.backward[job]) {
            ++in_flight_[node];
            ++kept_[node];
            hold(job, 1.0);
        }
        running_.emplace(clock + seconds_[step], static_cast<int32_t>(started_.size()));
        started_.push_back(step);
    }

    // If limits block all lanes: the earliest remaining step whose dependencies are done. False: none is left.
    bool start_earliest(double clock) {
        for (; earliest_ < order_.size(); ++earliest_) {
            const Step step = order_[earliest_];
            const int32_t queue = KINDS * graph_.job_node[job_of(step)] + kind_of(step);
            if (at_[queue] == queues_.first[queue + 1] || place_[queues_.items[at_[queue]]] > place_[step]) continue;
            start(step, clock);
            return true;
        }
        return false;
    }

    void finish(Step step) {
        const int32_t job = job_of(step), lane = graph_.lane(job), node = graph_.job_node[job];
        set_idle(lane, 1);
        const Ragged &ranks = graph_.stages.lane_ranks;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank)
            for (const int32_t *other = graph_.rank_lanes.begin(*rank); other < graph_.rank_lanes.end(*rank); ++other)
                touch(*other);
        const auto release = [&](Step next) {
            if (--waits_[next] == 0) touch(graph_.lane(job_of(next)));
        };
        if (hands_back(step)) {
            --in_flight_[node];
            graph_.each_input(job, [&](int32_t producer, int32_t) {
                if (graph_.backward[producer]) release(back_[producer]);
            });
            if (op_of(step) == ActionOp::BACKWARD_INPUT) release(step_of(ActionOp::BACKWARD_WEIGHT, job));
        } else if (op_of(step) == ActionOp::FORWARD) {
            graph_.each_reader(job, [&](int32_t reader, int32_t) { release(step_of(ActionOp::FORWARD, reader)); });
            if (graph_.backward[job]) release(back_[job]);
        }
        if (releases(step)) {
            --kept_[node];
            hold(job, -1.0);
        }
    }

    void hold(int32_t job, double sign) {
        if (rules_.limit.empty()) return;
        const int32_t lane = graph_.lane(job);
        const Ragged &ranks = graph_.stages.lane_ranks;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank)
            held_[*rank] += sign * rules_.bytes[job];
    }

    void set_idle(int32_t lane, char value) {
        const Ragged &ranks = graph_.stages.lane_ranks;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank) idle_[*rank] = value;
    }

    const StepGraph &graph_;
    const std::vector<Step> &order_;
    const Rules &rules_;
    const std::vector<double> &seconds_;
    Ragged queues_;                          // KINDS * node + kind -> steps in their order
    std::vector<int32_t> at_;                // of each queue
    std::vector<int32_t> place_;             // step -> place in the order
    std::vector<Step> back_;                 // job -> step that hands back its gradients
    std::vector<int32_t> waits_;             // step -> number of steps that it needs and that are not done
    std::vector<int32_t> in_flight_, kept_;  // of nodes
    std::vector<double> held_;               // of ranks
    std::vector<char> idle_, dirty_;
    std::vector<int32_t> todo_, ready_;
    std::vector<Step> started_;
    size_t earliest_ = 0;
    using Running = std::pair<double, int32_t>;  // when it finishes, place in started_
    std::priority_queue<Running, std::vector<Running>, std::greater<Running>> running_;
};

}  // namespace

std::vector<Step> play(const StepGraph &graph, const std::vector<Step> &order, const Rules &rules,
                       const std::vector<double> &seconds) {
    return Play(graph, order, rules, seconds).run();
}

}  // namespace interlace
