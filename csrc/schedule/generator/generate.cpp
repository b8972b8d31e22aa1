#include "schedule/generator/generate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <utility>

#include "common/interrupt.h"
#include "schedule/generator/play.h"

namespace interlace {

namespace {

// Nominal seconds, as if every rank were equally busy whatever its number of stages. Stages of a lane share a round,
// divided by the largest number of stages of a rank in the lane. A round is a multiple of all numbers up to 10, so that
// sums of its shares are exact.
std::vector<double> nominal_seconds(const StepGraph &graph) {
    constexpr double ROUND = 5040.0;
    std::vector<int32_t> most(graph.lanes(), 1);
    for (int32_t rank = 0; rank < graph.stages.ranks; ++rank) {
        int32_t nodes = 0;
        graph.each_node(rank, [&](int32_t) { ++nodes; });
        for (const int32_t *lane = graph.rank_lanes.begin(rank); lane < graph.rank_lanes.end(rank); ++lane)
            most[*lane] = std::max(most[*lane], nodes);
    }
    std::vector<double> seconds;
    seconds.reserve(STEPS_PER_JOB * static_cast<size_t>(graph.jobs()));
    for (int32_t job = 0; job < graph.jobs(); ++job) {
        const double share = ROUND / most[graph.lane(job)];
        seconds.insert(seconds.end(), {share, 2 * share, share, share});
    }
    return seconds;
}

// Of a split schedule: if no weights of the node are trained, the backward is its input half.
std::vector<double> nominal_halves(const StepGraph &graph) {
    std::vector<double> seconds = nominal_seconds(graph);
    for (int32_t job = 0; job < graph.jobs(); ++job)
        if (!splits(graph, job)) seconds[step_of(ActionOp::BACKWARD, job)] /= 2;
    return seconds;
}

std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.0f", value);
    return text;
}

class Search {
  public:
    Search(const StepGraph &graph, const std::vector<double> &seconds, const Limits &limits)
        : graph_(graph), limits_(limits), places_(find_places(graph)), given_(!seconds.empty()),
          seconds_(given_ ? seconds : nominal_halves(graph)) {
        find_late();
        bytes_ = limits.bytes.empty() ? std::vector<double>(graph.jobs(), 1.0) : limits.bytes;
    }

    std::vector<Step> find(Generator generator) {
        if (generator == Generator::AUTOMATIC)
            try_all();
        else
            try_one(generator);
        if (order_.empty() && graph_.jobs() > 0) throw std::invalid_argument(refusal_);
        return std::move(order_);
    }

  private:
    bool limited() const { return !limits_.memory.empty() || limits_.in_flight > 0; }
    std::vector<Step> timed(int64_t period, int64_t hop, bool split) const {
        return timed_order(graph_, places_, period, hop, split);
    }
    // Peak memory of the fullest rank, as a limit for all ranks.
    std::vector<double> fullest(const std::vector<Step> &order) const {
        const std::vector<double> peaks = peaks_of(graph_, order, bytes_);
        return std::vector<double>(peaks.size(), *std::max_element(peaks.begin(), peaks.end()));
    }

    void try_one(Generator generator) {
        switch (generator) {
            case Generator::ONE_F_ONE_B: return play_within(timed(2, 1, false), {depths(1), {}, {}, {}}, true);
            case Generator::INTERLEAVED: {
                const std::vector<Step> order = interleaved_order(graph_, places_, false);
                offer(order);
                return play_within(order, {most_in_flight(graph_, order), {}, {}, {}}, true);
            }
            case Generator::ZB_H1: {
                const std::vector<Step> order = timed(2, 1, true);
                const std::vector<double> most = fullest(order);
                if (std::vector<Step> textbook = zb_h1_order(graph_, places_); fullest(textbook)[0] <= most[0])
                    offer(std::move(textbook));
                return play_within(order, {depths(1), {}, bytes_, most}, true);
            }
            case Generator::ZB_H2: {
                const std::vector<Step> order = timed(2, 2, true);
                return play_within(order, {depths(2), {}, bytes_, fullest(order)}, true);
            }
            case Generator::ZB_V: {
                const std::vector<Step> order = timed(turn(), 1, true);
                std::vector<double> most = fullest(timed(2, 1, true)), own = fullest(order);
                for (size_t rank = 0; rank < most.size(); ++rank) most[rank] = std::max(most[rank], own[rank]);
                return play_within(order, {{}, {}, bytes_, most}, true);
            }
            default: return offer(gpipe_order(graph_));
        }
    }

    void try_all() {
        // Without external limits: no rank keeps more than the fullest one under 1F1B.
        if (!limited()) limits_.memory = fullest(timed(2, 1, true));
        for (int32_t eager = 0; eager < 2; ++eager) {  // first within the schedule's own limits, if these are tighter
            for (int32_t g = 0; g < static_cast<int32_t>(Generator::AUTOMATIC); ++g) {
                own_limits_ = eager == 0;
                try_one(static_cast<Generator>(g));
            }
        }
        own_limits_ = false;
        const std::vector<Step> orders[] = {timed(2, 1, true), timed(turn(), 1, true),
                                            interleaved_order(graph_, places_, true)};
        for (const std::vector<Step> &order : orders)
            for (const int64_t depth : {int64_t{0}, int64_t{1}, int64_t{2}})
                for (const bool early : {false, true})
                    play_within(order, {depth ? depths(depth) : std::vector<int32_t>{}, {}, {}, {}, early}, false);
        if (!order_.empty()) improve();
    }

    // Justification (Valls, Ballestin and Quintanilla 2005, for project scheduling). Moving every step of the best
    // order as late as its length allows shows which steps are urgent. A play with these priorities is often shorter.
    void improve() {
        constexpr int32_t ROUNDS = 8;
        for (int32_t round = 0; round < ROUNDS; ++round) {
            const double before = best_;
            const std::vector<Step> order = by_latest_start(order_);
            play_within(order, {{}, {}, {}, {}, false, true}, false);
            if (!(best_ < before)) return;
        }
    }

    // An order sorted by the latest start of each step, if ranks keep to the given order and the end stays the same. A
    // step's latest start is no earlier than those of the steps that it needs, so the result respects every dependency.
    std::vector<Step> by_latest_start(std::vector<Step> order) const {
        Poll poll;
        std::vector<double> latest(STEPS_PER_JOB * static_cast<size_t>(graph_.jobs()), 0.0);
        std::vector<double> next(graph_.stages.ranks, 0.0);  // all counted back from the end: none is above 0
        std::vector<Step> back(graph_.jobs(), -1);
        for (const Step step : order)
            if (hands_back(step)) back[job_of(step)] = step;
        for (auto at = order.rbegin(); at != order.rend(); ++at) {
            poll();
            const Step step = *at;
            const int32_t job = job_of(step), lane = graph_.lane(job);
            double end = 0.0;
            const auto before = [&](Step other) { end = std::min(end, latest[other]); };
            if (op_of(step) == ActionOp::FORWARD) {
                graph_.each_reader(job, [&](int32_t reader, int32_t) { before(step_of(ActionOp::FORWARD, reader)); });
                if (graph_.backward[job]) before(back[job]);
            } else if (hands_back(step)) {
                graph_.each_input(job, [&](int32_t producer, int32_t) {
                    if (graph_.backward[producer]) before(back[producer]);
                });
                before(step_of(ActionOp::BACKWARD_WEIGHT, job));  // 0 if it has none
            }
            const Ragged &ranks = graph_.stages.lane_ranks;
            for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank)
                end = std::min(end, next[*rank]);
            latest[step] = end - seconds_[step];
            for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank) next[*rank] = latest[step];
        }
        std::stable_sort(order.begin(), order.end(), [&](Step a, Step b) { return latest[a] < latest[b]; });
        return order;
    }

    // Forwards in flight of every node under 1F1B, if a hop takes the given number of turns.
    std::vector<int32_t> depths(int64_t hop) const {
        std::vector<int32_t> most = most_in_flight(graph_, timed(2, hop, false));
        for (int32_t node = 0; node < graph_.nodes(); ++node)
            most[node] = std::max<int32_t>(most[node], static_cast<int32_t>(hop) * places_.distance[node] + 1);
        return most;
    }

    // Steps of the busiest rank for each chunk without readers.
    int64_t turn() const {
        std::vector<int64_t> steps(graph_.stages.ranks, 0);
        int32_t rounds = 1;
        for (int32_t job = 0; job < graph_.jobs(); ++job) {
            rounds = std::max(rounds, places_.last[graph_.job_chunk[job]] + 1);
            const Ragged &ranks = graph_.stages.lane_ranks;
            const int32_t lane = graph_.lane(job);
            for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank)
                steps[*rank] += 1 + graph_.backward[job] + splits(graph_, job);
        }
        const int64_t most = *std::max_element(steps.begin(), steps.end());
        return std::max<int64_t>(1, (most + rounds - 1) / rounds);
    }

    // Plays an order with the given seconds and with nominal ones. own: its rules are those of the schedule, and
    // external limits replace them; otherwise its rules hold in addition to external limits.
    void play_within(const std::vector<Step> &order, Rules rules, bool own) {
        if (own && limited() && !own_limits_) rules = Rules{};
        if (limited() && !(own && own_limits_)) {
            rules.bytes = bytes_;
            rules.limit = limits_.memory;
            if (limits_.in_flight > 0) rules.kept.assign(graph_.nodes(), limits_.in_flight);
        }
        const bool split =
            std::any_of(order.begin(), order.end(), [](Step step) { return op_of(step) == ActionOp::BACKWARD_WEIGHT; });
        offer(play(graph_, order, rules, split ? nominal_halves(graph_) : nominal_seconds(graph_)));
        if (given_) offer(play(graph_, order, rules, seconds_));
    }

    // Chunks whose backwards may wait until all others have run. Example: a pipeline encodes everything in one chunk,
    // on a rank shared with a module without readers ("shared" ranks: first the encoder for the whole step, then the
    // language model). Run as early as possible, its backward delays that module's lane, on each of these ranks in
    // turn. All chunks that such chunks read wait with them.
    void find_late() {
        const StageArrays &stages = graph_.stages;
        std::vector<char> feeds(stages.modules, 0), alone(stages.pipeline_module.size(), 0);
        for (const auto &[from, to] : stages.module_links) feeds[from] = 1;
        const auto feeder = [&](int32_t node) {
            return feeds[stages.pipeline_module[stages.node_pipeline[node]]] != 0;
        };
        for (int32_t rank = 0; rank < stages.ranks; ++rank) {
            bool last_module = false;
            graph_.each_node(rank, [&](int32_t node) { last_module |= !feeder(node); });
            graph_.each_node(rank,
                             [&](int32_t node) { alone[stages.node_pipeline[node]] |= last_module && feeder(node); });
        }
        std::vector<int32_t> chunks(alone.size(), 0);
        for (const int32_t pipeline : graph_.chunk_pipeline) ++chunks[pipeline];
        late_.assign(graph_.chunks(), 0);
        for (int32_t i = graph_.chunks(); i-- > 0;) {
            const int32_t c = graph_.chunk_order[i], pipeline = graph_.chunk_pipeline[c];
            if (alone[pipeline] && chunks[pipeline] == 1) late_[c] = 1;
            if (!late_[c]) continue;
            graph_.each_input(graph_.chunk_first[c], [&](int32_t job, int32_t) { late_[graph_.job_chunk[job]] = 1; });
        }
        for (int32_t job = 0; job < graph_.jobs(); ++job)
            any_late_ |= graph_.backward[job] && late_[graph_.job_chunk[job]];
    }

    // Keeps the best order offered so far, each with late chunks in place and at the end. If only the schedule's own
    // rules limit it, late chunks at the end may fill no rank more than the other variant fills its fullest rank.
    void offer(std::vector<Step> order) {
        if (!any_late_) return keep(std::move(order));
        std::vector<Step> later = order;
        std::stable_partition(later.begin(), later.end(), [&](Step step) {
            return op_of(step) == ActionOp::FORWARD || !late_[graph_.job_chunk[job_of(step)]];
        });
        const bool fits = limited() || fullest(later)[0] <= fullest(order)[0];
        keep(std::move(order));
        if (fits) keep(std::move(later));
    }

    // Keeps an order if it is within the external limits and the best so far.
    void keep(std::vector<Step> order) {
        if (!limits_.memory.empty()) {
            const std::vector<double> peaks = peaks_of(graph_, order, bytes_);
            for (int32_t rank = 0; rank < graph_.stages.ranks; ++rank)
                if (peaks[rank] > limits_.memory[rank]) return refuse_rank(rank, peaks[rank]);
        }
        if (limits_.in_flight > 0) {
            std::vector<int32_t> kept(graph_.nodes(), 0);
            for (const Step step : order) {
                const int32_t job = job_of(step), node = graph_.job_node[job];
                if (!graph_.backward[job]) continue;
                kept[node] += (op_of(step) == ActionOp::FORWARD) - releases(step);
                if (kept[node] > limits_.in_flight) return refuse_node(node);
            }
        }
        const double seconds = span(graph_, order, seconds_);
        if (!order_.empty() && seconds >= best_) return;
        order_ = std::move(order);
        best_ = seconds;
    }

    void refuse_rank(int32_t rank, double bytes) {
        if (!refusal_.empty() && bytes - limits_.memory[rank] >= excess_) return;
        excess_ = bytes - limits_.memory[rank];
        refusal_ = "rank " + std::to_string(rank) + " would hold " + number(bytes) +
                   " bytes of activations, over its " + "limit of " + number(limits_.memory[rank]) +
                   ": allow more, or use more stages, smaller microbatches or activation checkpointing";
    }

    void refuse_node(int32_t node) {
        if (!refusal_.empty()) return;
        refusal_ = "stage " + std::to_string(graph_.stages.node_stage[node]) + " of pipeline " +
                   std::to_string(graph_.stages.node_pipeline[node]) +
                   " would hold more than in_flight = " + std::to_string(limits_.in_flight) +
                   " forwards: what reads its chunks needs more of them at once";
    }

    const StepGraph &graph_;
    Limits limits_;
    const Places places_;
    const bool given_;
    const std::vector<double> seconds_;
    std::vector<double> bytes_;
    std::vector<char> late_;  // of chunks
    bool own_limits_ = false, any_late_ = false;
    std::vector<Step> order_;
    double best_ = 0.0, excess_ = std::numeric_limits<double>::infinity();
    std::string refusal_;
};

}  // namespace

std::vector<Step> generate(const StepGraph &graph, Generator generator, const std::vector<double> &seconds,
                           const Limits &limits) {
    return Search(graph, seconds, limits).find(generator);
}

double lower_bound_of(const StepGraph &graph, const std::vector<double> &seconds) {
    Poll poll;
    const auto cost = [&](ActionOp op, int32_t job) { return seconds[step_of(op, job)]; };
    // Lower bound, split or not: handing back gradients takes at least the shorter of the two.
    const auto back_of = [&](int32_t job) {
        const double whole = cost(ActionOp::BACKWARD, job);
        return splits(graph, job) ? std::min(whole, cost(ActionOp::BACKWARD_INPUT, job)) : whole;
    };
    const auto work_of = [&](int32_t job) {
        double work = cost(ActionOp::FORWARD, job);
        if (!graph.backward[job]) return work;
        const double whole = cost(ActionOp::BACKWARD, job);
        const double halves = cost(ActionOp::BACKWARD_INPUT, job) + cost(ActionOp::BACKWARD_WEIGHT, job);
        return work + (splits(graph, job) ? std::min(whole, halves) : whole);
    };
    // Earliest end of each forward and backward; and the time that must follow the end of each.
    std::vector<double> forward(graph.jobs(), 0.0), backward(graph.jobs(), 0.0), tail(graph.jobs(), 0.0),
        ahead(graph.jobs(), 0.0);
    std::vector<double> head(graph.stages.ranks, std::numeric_limits<double>::infinity()), after = head,
                                                                                           work(head.size());
    double longest = 0.0;
    const Ragged &ranks = graph.stages.lane_ranks;
    graph.each_job(true, poll, [&](int32_t job) {
        double start = 0.0, behind = 0.0;
        graph.each_input(job, [&](int32_t producer, int32_t) {
            start = std::max(start, forward[producer]);
            if (graph.backward[producer]) behind = std::max(behind, back_of(producer) + tail[producer]);
        });
        forward[job] = start + cost(ActionOp::FORWARD, job);
        tail[job] = behind;  // after this job's own gradients are handed back
        const int32_t lane = graph.lane(job);
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank) {
            head[*rank] = std::min(head[*rank], start);
            work[*rank] += work_of(job);
        }
    });
    graph.each_job(false, poll, [&](int32_t job) {
        double start = forward[job], behind = 0.0;
        graph.each_reader(job, [&](int32_t reader, int32_t) {
            start = std::max(start, backward[reader]);
            behind = std::max(behind, cost(ActionOp::FORWARD, reader) + ahead[reader]);
        });
        if (graph.backward[job]) {
            backward[job] = start + back_of(job);
            behind = std::max(behind, back_of(job) + tail[job]);
            // Its weight half, or the rest of it, may be last.
            const double whole = cost(ActionOp::BACKWARD, job);
            const double halves = cost(ActionOp::BACKWARD_INPUT, job) + cost(ActionOp::BACKWARD_WEIGHT, job);
            longest = std::max(longest, start + (splits(graph, job) ? std::min(whole, halves) : whole));
        }
        ahead[job] = behind;
        longest = std::max({longest, forward[job], backward[job]});
        // Last action of a rank: a weight half, if there may be one, needs nothing after it.
        const double last = !graph.backward[job] ? behind : splits(graph, job) ? 0.0 : tail[job];
        const int32_t lane = graph.lane(job);
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank)
            after[*rank] = std::min(after[*rank], last);
    });
    for (size_t rank = 0; rank < head.size(); ++rank)
        if (std::isfinite(head[rank])) longest = std::max(longest, head[rank] + work[rank] + after[rank]);
    return longest;
}

}  // namespace interlace
