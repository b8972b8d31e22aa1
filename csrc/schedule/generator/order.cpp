#include "schedule/generator/order.h"

#include <algorithm>
#include <set>
#include <utility>

#include "common/interrupt.h"

namespace interlace {

namespace {

// Sorts by time; steps of equal time are ordered as in order.h. forward, backward, weight: times of every job; without
// weight, weight halves follow the input halves.
std::vector<Step> sorted(const StepGraph &graph, const std::vector<int64_t> &forward,
                         const std::vector<int64_t> &backward, bool split, const std::vector<int64_t> &weight = {}) {
    struct Timed {
        int64_t time;
        int32_t tie, chunk;
        Step step;
    };
    std::vector<Timed> timed;
    timed.reserve(2 * static_cast<size_t>(graph.jobs()));
    for (int32_t job = 0; job < graph.jobs(); ++job) {
        const int32_t c = graph.job_chunk[job], place = graph.topological[graph.job_node[job]];
        timed.push_back({forward[job], place, c, step_of(ActionOp::FORWARD, job)});
        // Backwards first, which keeps fewer forwards in flight; consumers first among them.
        if (graph.backward[job]) timed.push_back({backward[job], -1 - place, c, backward_of(graph, job, split)});
        if (!weight.empty() && splits(graph, job))
            timed.push_back({weight[job], graph.nodes() + place, c, step_of(ActionOp::BACKWARD_WEIGHT, job)});
    }
    interruptible_sort(timed.begin(), timed.end(), [](const Timed &a, const Timed &b) {
        if (a.time != b.time) return a.time < b.time;
        if (a.tie != b.tie) return a.tie < b.tie;
        return a.chunk < b.chunk;
    });
    std::vector<Step> order;
    order.reserve(timed.size() * (split ? 2 : 1));
    for (const Timed &entry : timed) {
        order.push_back(entry.step);
        if (op_of(entry.step) == ActionOp::BACKWARD_INPUT && weight.empty())
            order.push_back(step_of(ActionOp::BACKWARD_WEIGHT, job_of(entry.step)));
    }
    return order;
}

// Per node: the lap of its pipeline at this lane, from 0, and the position of the lane in its lap.
struct Laps {
    std::vector<int32_t> lap, place;    // of nodes
    std::vector<int32_t> count, width;  // of pipelines: laps, and lanes of each
};

Laps find_laps(const StepGraph &graph) {
    const StageArrays &stages = graph.stages;
    Laps laps{std::vector<int32_t>(graph.nodes(), 0), std::vector<int32_t>(graph.nodes(), 0), {}, {}};
    for (size_t p = 0; p + 1 < stages.pipeline_first.size(); ++p) {
        const int32_t first = stages.pipeline_first[p], end = stages.pipeline_first[p + 1];
        std::set<int32_t> lanes;
        for (int32_t n = first; n < end; ++n) lanes.insert(stages.node_lane[n]);
        // Whole laps: each lane once in every `width` stages. (Copies are lanes of their own: one lap.)
        const auto width = static_cast<int32_t>(lanes.size());
        bool whole = (end - first) % width == 0;
        for (int32_t n = first; whole && n < end; n += width)
            whole = std::set<int32_t>(&stages.node_lane[n], &stages.node_lane[n] + width).size() == lanes.size();
        laps.count.push_back(whole ? (end - first) / width : 1);
        laps.width.push_back(whole ? width : end - first);
        for (int32_t n = first; n < end; ++n) {
            laps.lap[n] = (n - first) / laps.width.back();
            laps.place[n] = (n - first) % laps.width.back();
        }
    }
    return laps;
}

}  // namespace

Places find_places(const StepGraph &graph) {
    Poll poll;
    const int32_t chunks = graph.chunks();
    Places places{std::vector<int32_t>(graph.nodes(), 0), graph.chunk_index, graph.chunk_index};
    const auto reach = [&](int32_t producer, int32_t consumer) {  // jobs
        const int32_t from = graph.job_node[producer], to = graph.job_node[consumer];
        const int32_t hop = graph.lane(producer) != graph.lane(consumer);
        places.distance[from] = std::max(places.distance[from], places.distance[to] + hop);
    };
    // Module by module, consumers first. All links of a module come before its stages, whose distance starts at the
    // last stage's.
    int32_t end = chunks;
    while (end > 0) {
        const auto module_of = [&](int32_t i) {
            return graph.stages.pipeline_module[graph.chunk_pipeline[graph.chunk_order[i]]];
        };
        int32_t begin = end - 1;
        while (begin > 0 && module_of(begin - 1) == module_of(end - 1)) --begin;
        for (int32_t i = begin; i < end; ++i) {
            const int32_t c = graph.chunk_order[i];
            const Range<int32_t> links = graph.links_out(c);
            poll(1 + links.end() - links.begin());
            if (links.begin() == links.end()) continue;
            places.first[c] = INT32_MAX;
            places.last[c] = 0;
            for (int32_t link = links.begin(); link < links.end(); ++link) {
                const int32_t reader = graph.job_chunk[graph.link_consumer[link]];
                places.first[c] = std::min(places.first[c], places.first[reader]);
                places.last[c] = std::max(places.last[c], places.last[reader]);
                reach(graph.link_producer[link], graph.link_consumer[link]);
            }
        }
        for (int32_t i = begin; i < end; ++i) {
            const int32_t c = graph.chunk_order[i];
            if (graph.chunk_index[c] > 0) continue;  // once for each pipeline
            for (int32_t job = graph.chunk_first[c + 1] - 1; job-- > graph.chunk_first[c];)
                if (!graph.last_stage(job)) reach(job, job + 1);
        }
        end = begin;
    }
    return places;
}

std::vector<Step> timed_order(const StepGraph &graph, const Places &places, int64_t period, int64_t hop, bool split) {
    std::vector<int64_t> forward(graph.jobs()), backward(graph.jobs());
    for (int32_t job = 0; job < graph.jobs(); ++job) {
        const int64_t d = places.distance[graph.job_node[job]];
        forward[job] = period * places.first[graph.job_chunk[job]] - hop * d;
        backward[job] = period * places.last[graph.job_chunk[job]] + hop * d + 1;
    }
    return sorted(graph, forward, backward, split);
}

std::vector<Step> zb_h1_order(const StepGraph &graph, const Places &places) {
    const int64_t deepest = *std::max_element(places.distance.begin(), places.distance.end());
    std::vector<int64_t> forward(graph.jobs()), backward(graph.jobs()), weight(graph.jobs());
    for (int32_t job = 0; job < graph.jobs(); ++job) {
        const int64_t d = places.distance[graph.job_node[job]], c = graph.job_chunk[job];
        forward[job] = 2 * places.first[c] - d;
        backward[job] = 2 * places.last[c] + d + 1;
        weight[job] = backward[job] + 2 * (deepest - d);
    }
    return sorted(graph, forward, backward, true, weight);
}

std::vector<Step> gpipe_order(const StepGraph &graph) {
    std::vector<Step> order = timed_order(graph, find_places(graph), 2, 1, false);
    std::stable_partition(order.begin(), order.end(), [](Step step) { return op_of(step) == ActionOp::FORWARD; });
    return order;
}

std::vector<Step> interleaved_order(const StepGraph &graph, const Places &places, bool split) {
    const Laps laps = find_laps(graph);
    int32_t main = -1, most = 1;  // the module with laps
    for (const int32_t c : graph.chunk_order) {
        const int32_t pipeline = graph.chunk_pipeline[c], count = laps.count[pipeline];
        if (count < 2 || count < most) continue;
        most = count;
        main = graph.stages.pipeline_module[pipeline];
    }
    if (main < 0) return timed_order(graph, places, 2, 1, split);

    Poll poll;
    constexpr int64_t HOP = 2, NEVER = INT64_MIN / 2;
    std::vector<int64_t> forward(graph.jobs(), NEVER), backward(graph.jobs(), NEVER);
    const auto in_main = [&](int32_t job) {
        return graph.stages.pipeline_module[graph.chunk_pipeline[graph.job_chunk[job]]] == main;
    };
    for (int32_t job = 0; job < graph.jobs(); ++job) {
        if (!in_main(job)) continue;
        const int32_t node = graph.job_node[job], c = graph.job_chunk[job], p = graph.chunk_pipeline[c];
        const int64_t width = laps.width[p], count = laps.count[p], lap = laps.lap[node], place = laps.place[node];
        const auto turn = [&](int64_t k, int64_t at) { return (k / width * count + at) * width + k % width; };
        forward[job] = HOP * (turn(places.first[c], lap) + place);
        backward[job] = HOP * (turn(places.last[c], count - 1 - lap) + width - 1 - place + count * width - 1) + 1;
    }
    const auto hop = [&](int32_t a, int32_t b) { return graph.lane(a) == graph.lane(b) ? int64_t{0} : HOP; };
    // Modules that feed it run as late, and their backwards as early, as their readers allow.
    graph.each_job(false, poll, [&](int32_t job) {
        if (in_main(job)) return;
        int64_t latest = INT64_MAX;
        graph.each_reader(job, [&](int32_t reader, int32_t) {
            if (forward[reader] != NEVER) latest = std::min(latest, forward[reader] - hop(job, reader));
        });
        if (latest != INT64_MAX) forward[job] = latest;
    });
    // All others: as early as possible. After this no step is earlier than a step that it needs.
    graph.each_job(true, poll, [&](int32_t job) {
        graph.each_input(job, [&](int32_t producer, int32_t) {
            forward[job] = std::max(forward[job], forward[producer] + hop(producer, job));
        });
        if (forward[job] == NEVER) forward[job] = HOP * places.first[graph.job_chunk[job]];  // no link to the module
    });
    graph.each_job(false, poll, [&](int32_t job) {
        backward[job] = std::max(backward[job], forward[job] + 1);
        graph.each_reader(job, [&](int32_t reader, int32_t) {
            backward[job] = std::max(backward[job], backward[reader] + hop(reader, job));
        });
    });
    return sorted(graph, forward, backward, split);
}

std::vector<int32_t> most_in_flight(const StepGraph &graph, const std::vector<Step> &order) {
    std::vector<int32_t> held(graph.nodes(), 0), most = held;
    for (const Step step : order) {
        const int32_t job = job_of(step), node = graph.job_node[job];
        if (!graph.backward[job] || op_of(step) == ActionOp::BACKWARD_WEIGHT) continue;
        held[node] += hands_back(step) ? -1 : 1;
        most[node] = std::max(most[node], held[node]);
    }
    return most;
}

std::vector<double> peaks_of(const StepGraph &graph, const std::vector<Step> &order, const std::vector<double> &bytes) {
    Poll poll;
    std::vector<double> held(graph.stages.ranks, 0.0), peaks = held;
    for (const Step step : order) {
        poll();
        const int32_t job = job_of(step), lane = graph.lane(job);
        const Ragged &ranks = graph.stages.lane_ranks;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank) {
            if (op_of(step) == ActionOp::FORWARD) {
                peaks[*rank] = std::max(peaks[*rank], held[*rank] + bytes[job]);
                if (graph.backward[job]) held[*rank] += bytes[job];
            } else if (releases(step)) {
                held[*rank] -= bytes[job];
            }
        }
    }
    return peaks;
}

double span(const StepGraph &graph, const std::vector<Step> &order, const std::vector<double> &seconds) {
    Poll poll;
    std::vector<double> finish(2 * static_cast<size_t>(graph.jobs()), 0.0), clock(graph.stages.ranks, 0.0);
    double latest = 0.0;
    for (const Step step : order) {
        poll();
        const int32_t job = job_of(step), lane = graph.lane(job);
        double start = 0.0;
        const auto after = [&](int32_t other, bool back) { start = std::max(start, finish[2 * other + back]); };
        if (hands_back(step)) {
            graph.each_reader(job, [&](int32_t reader, int32_t) { after(reader, true); });
            after(job, false);
        } else if (op_of(step) == ActionOp::FORWARD) {
            graph.each_input(job, [&](int32_t producer, int32_t) { after(producer, false); });
        } else {
            after(job, true);
        }
        const Ragged &ranks = graph.stages.lane_ranks;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank)
            start = std::max(start, clock[*rank]);
        const double end = start + seconds[step];
        if (op_of(step) != ActionOp::BACKWARD_WEIGHT) finish[2 * job + hands_back(step)] = end;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank) clock[*rank] = end;
        latest = std::max(latest, end);
    }
    return latest;
}

std::optional<Misplaced> misplaced(const StepGraph &graph, const std::vector<Step> &order) {
    std::vector<char> done(STEPS_PER_JOB * static_cast<size_t>(graph.jobs()), 0);
    const auto has = [&](ActionOp op, int32_t job) { return done[step_of(op, job)] != 0; };
    const auto handed_back = [&](int32_t job) {
        return has(ActionOp::BACKWARD, job) || has(ActionOp::BACKWARD_INPUT, job);
    };
    Poll poll;
    for (size_t at = 0; at < order.size(); ++at) {
        poll();
        const Step step = order[at];
        const int32_t job = job_of(step);
        const ActionOp op = op_of(step);
        Step other = -1;
        const auto needs = [&](bool ready, Step needed) {
            if (!ready && other < 0) other = needed;
        };
        if (op == ActionOp::FORWARD) {
            needs(!has(op, job), step);
            graph.each_input(job, [&](int32_t producer, int32_t) {
                needs(has(ActionOp::FORWARD, producer), step_of(ActionOp::FORWARD, producer));
            });
        } else if (op == ActionOp::BACKWARD_WEIGHT) {
            needs(splits(graph, job) && !has(op, job), step);
            needs(has(ActionOp::BACKWARD_INPUT, job), step_of(ActionOp::BACKWARD_INPUT, job));
        } else {
            needs(graph.backward[job] && !handed_back(job) && (op == ActionOp::BACKWARD || splits(graph, job)), step);
            needs(has(ActionOp::FORWARD, job), step_of(ActionOp::FORWARD, job));
            graph.each_reader(job, [&](int32_t reader, int32_t) {
                needs(!graph.backward[reader] || handed_back(reader), step_of(ActionOp::BACKWARD, reader));
            });
        }
        if (other >= 0) return Misplaced{static_cast<int64_t>(at), step, other};
        done[step] = 1;
    }
    for (int32_t job = 0; job < graph.jobs(); ++job) {
        Step missing = -1;
        if (has(ActionOp::BACKWARD_INPUT, job) && !has(ActionOp::BACKWARD_WEIGHT, job))
            missing = step_of(ActionOp::BACKWARD_WEIGHT, job);
        if (graph.backward[job] && !handed_back(job)) missing = step_of(ActionOp::BACKWARD, job);
        if (!has(ActionOp::FORWARD, job)) missing = step_of(ActionOp::FORWARD, job);
        if (missing >= 0) return Misplaced{static_cast<int64_t>(order.size()), missing, missing};
    }
    return std::nullopt;
}

}  // namespace interlace
