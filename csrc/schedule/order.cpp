#include "schedule/order.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "common/interrupt.h"

namespace interlace {

namespace {

// Per node: d. Per chunk: the first and the last place.
struct Places {
    std::vector<int32_t> distance, first, last;
};

Places find_places(const StepGraph &graph) {
    Poll poll;
    const int32_t chunks = graph.chunks();
    Places places{std::vector<int32_t>(graph.nodes(), 0), graph.chunk_index, graph.chunk_index};
    const auto reach = [&](int32_t producer, int32_t consumer) {  // jobs
        const int32_t from = graph.job_node[producer], to = graph.job_node[consumer];
        const int32_t hop = graph.lane(producer) != graph.lane(consumer);
        places.distance[from] = std::max(places.distance[from], places.distance[to] + hop);
    };
    // Module by module, consumers first; all links of a module before its stages, which take their distance from the
    // last one's.
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

std::vector<Step> order_of(const StepGraph &graph, const Places &places) {
    struct Timed {
        int64_t time;
        int32_t tie, chunk;
        Step step;
    };
    std::vector<Timed> timed;
    timed.reserve(2 * static_cast<size_t>(graph.jobs()));
    for (int32_t job = 0; job < graph.jobs(); ++job) {
        const int32_t c = graph.job_chunk[job], node = graph.job_node[job], place = graph.topological[node];
        const int64_t d = places.distance[node];
        timed.push_back({2 * int64_t{places.first[c]} - d, place, c, forward_step(job)});
        // Backwards first, which keeps fewer forwards in flight; consumers first among them.
        if (graph.backward[job])
            timed.push_back({2 * int64_t{places.last[c]} + d + 1, -1 - place, c, backward_step(job)});
    }
    interruptible_sort(timed.begin(), timed.end(), [](const Timed &a, const Timed &b) {
        if (a.time != b.time) return a.time < b.time;
        if (a.tie != b.tie) return a.tie < b.tie;
        return a.chunk < b.chunk;
    });
    std::vector<Step> order;
    order.reserve(timed.size());
    for (const Timed &entry : timed) order.push_back(entry.step);
    return order;
}

// The most forwards that each node holds at once where steps run in this order, or d + 1 if that is more.
std::vector<int32_t> find_caps(const StepGraph &graph, const Places &places, const std::vector<Step> &order) {
    std::vector<int32_t> held(graph.nodes(), 0), caps;
    for (const int32_t d : places.distance) caps.push_back(d + 1);
    for (const Step step : order) {
        const int32_t job = job_of(step), node = graph.job_node[job];
        if (!graph.backward[job]) continue;
        held[node] += is_backward(step) ? -1 : 1;
        caps[node] = std::max(caps[node], held[node]);
    }
    return caps;
}

class Play {
  public:
    Play(const StepGraph &graph, const std::vector<Step> &order, const std::vector<int32_t> &caps,
         const std::vector<double> &seconds)
        : graph_(graph), caps_(caps), seconds_(seconds) {
        place_.assign(2 * static_cast<size_t>(graph.jobs()), -1);
        std::vector<std::pair<int32_t, int32_t>> pairs;
        pairs.reserve(order.size());
        for (size_t i = 0; i < order.size(); ++i) {
            place_[order[i]] = static_cast<int32_t>(i);
            pairs.emplace_back(2 * graph.job_node[job_of(order[i])] + is_backward(order[i]), order[i]);
        }
        queues_ = Ragged::of(2 * graph.nodes(), pairs);
        at_.assign(queues_.first.begin(), queues_.first.end() - 1);
        held_.assign(graph.nodes(), 0);
        idle_.assign(graph.stages.ranks, 1);
        dirty_.assign(graph.lanes(), 0);
        waits_.assign(place_.size(), 0);
        for (int32_t job = 0; job < graph.jobs(); ++job) {
            graph.each_input(job, [&](int32_t, int32_t) { ++waits_[forward_step(job)]; });
            if (!graph.backward[job]) continue;
            ++waits_[backward_step(job)];
            graph.each_reader(job, [&](int32_t, int32_t) { ++waits_[backward_step(job)]; });
        }
        started_.reserve(order.size());
    }

    std::vector<Step> run() {
        Poll poll;
        for (int32_t lane = 0; lane < graph_.lanes(); ++lane) touch(lane);
        double clock = 0.0;
        while (true) {
            start_steps(clock);
            if (running_.empty()) return std::move(started_);
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

    // What the lane should start; -1: nothing is ready.
    Step choose(int32_t lane) const {
        for (const int32_t back : {1, 0}) {
            Step best = -1;
            for (const int32_t *node = graph_.lane_nodes.begin(lane); node < graph_.lane_nodes.end(lane); ++node) {
                const int32_t queue = 2 * *node + back;
                if (at_[queue] == queues_.first[queue + 1]) continue;
                const Step step = queues_.items[at_[queue]];
                if (waits_[step] > 0) continue;
                if (!back && graph_.backward[job_of(step)] && held_[*node] >= caps_[*node]) continue;
                if (best < 0 || place_[step] < place_[best]) best = step;
            }
            if (best >= 0) return best;
        }
        return -1;
    }

    void start_steps(double clock) {
        // Lanes that share ranks compete; a lane that none of these events touched could start nothing before either.
        ready_.clear();
        for (const int32_t lane : todo_) {
            dirty_[lane] = 0;
            if (!idle(lane)) continue;
            const Step step = choose(lane);
            if (step >= 0) ready_.push_back(step);
        }
        todo_.clear();
        std::sort(ready_.begin(), ready_.end(), [&](Step a, Step b) {
            return is_backward(a) != is_backward(b) ? is_backward(a) : place_[a] < place_[b];
        });
        for (const Step step : ready_) {
            const int32_t job = job_of(step), node = graph_.job_node[job], lane = graph_.lane(job);
            if (!idle(lane)) continue;
            set_idle(lane, 0);
            ++at_[2 * node + is_backward(step)];
            if (!is_backward(step) && graph_.backward[job]) ++held_[node];
            running_.emplace(clock + seconds_[step], static_cast<int32_t>(started_.size()));
            started_.push_back(step);
        }
    }

    void finish(Step step) {
        const int32_t job = job_of(step), lane = graph_.lane(job);
        set_idle(lane, 1);
        const Ragged &ranks = graph_.stages.lane_ranks;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank)
            for (const int32_t *other = graph_.rank_lanes.begin(*rank); other < graph_.rank_lanes.end(*rank); ++other)
                touch(*other);
        const auto release = [&](Step next) {
            if (--waits_[next] == 0) touch(graph_.lane(job_of(next)));
        };
        if (is_backward(step)) {
            --held_[graph_.job_node[job]];
            graph_.each_input(job, [&](int32_t producer, int32_t) {
                if (graph_.backward[producer]) release(backward_step(producer));
            });
        } else {
            graph_.each_reader(job, [&](int32_t reader, int32_t) { release(forward_step(reader)); });
            if (graph_.backward[job]) release(backward_step(job));
        }
    }

    void set_idle(int32_t lane, char value) {
        const Ragged &ranks = graph_.stages.lane_ranks;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank) idle_[*rank] = value;
    }

    const StepGraph &graph_;
    const std::vector<int32_t> &caps_;
    const std::vector<double> &seconds_;
    Ragged queues_;               // 2 * node + backward -> steps by virtual time
    std::vector<int32_t> at_;     // of each queue
    std::vector<int32_t> place_;  // step -> place by virtual time
    std::vector<int32_t> waits_;  // step -> steps that it needs and that are not done
    std::vector<int32_t> held_;
    std::vector<char> idle_, dirty_;
    std::vector<int32_t> todo_, ready_;
    std::vector<Step> started_;
    using Running = std::pair<double, int32_t>;  // when it finishes, place in started_
    std::priority_queue<Running, std::vector<Running>, std::greater<Running>> running_;
};

}  // namespace

std::vector<Step> gpipe_order(const StepGraph &graph) {
    std::vector<Step> order = order_of(graph, find_places(graph));
    std::stable_partition(order.begin(), order.end(), [](Step step) { return !is_backward(step); });
    return order;
}

std::vector<Step> one_f_one_b_order(const StepGraph &graph, const std::vector<double> &seconds) {
    const Places places = find_places(graph);
    const std::vector<Step> order = order_of(graph, places);
    return Play(graph, order, find_caps(graph, places, order), seconds).run();
}

double span(const StepGraph &graph, const std::vector<Step> &order, const std::vector<double> &seconds) {
    Poll poll;
    std::vector<double> finish(2 * static_cast<size_t>(graph.jobs()), 0.0), clock(graph.stages.ranks, 0.0);
    double latest = 0.0;
    for (const Step step : order) {
        poll();
        const int32_t job = job_of(step), lane = graph.lane(job);
        double start = 0.0;
        const auto after = [&](Step other) { start = std::max(start, finish[other]); };
        if (is_backward(step)) {
            graph.each_reader(job, [&](int32_t reader, int32_t) { after(backward_step(reader)); });
            after(forward_step(job));
        } else {
            graph.each_input(job, [&](int32_t producer, int32_t) { after(forward_step(producer)); });
        }
        const Ragged &ranks = graph.stages.lane_ranks;
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank)
            start = std::max(start, clock[*rank]);
        finish[step] = start + seconds[step];
        for (const int32_t *rank = ranks.begin(lane); rank < ranks.end(lane); ++rank) clock[*rank] = finish[step];
        latest = std::max(latest, finish[step]);
    }
    return latest;
}

}  // namespace interlace
