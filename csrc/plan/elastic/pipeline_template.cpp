#include "plan/elastic/pipeline_template.h"

#include <algorithm>
#include <functional>
#include <queue>

#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

namespace {

constexpr int64_t FEW_STAGES = 24;  // per layer and width; measured

// Sliding-window minimum: the least of the keys in a queue; ties go to the earliest.
class SlidingMin {
  public:
    explicit SlidingMin(int64_t places) : entries_(places) {}

    void clear() { first_ = last_ = 0; }

    // Places are pushed in rising order.
    void push(int64_t place, double key) {
        while (last_ > first_ && entries_[last_ - 1].key > key) --last_;
        entries_[last_++] = {key, place};
    }

    // The place of the least key pushed at `place` or later, or -1. `place` rises from call to call.
    int64_t from(int64_t place) {
        while (first_ < last_ && entries_[first_].place < place) ++first_;
        return first_ < last_ ? entries_[first_].place : -1;
    }

  private:
    struct Entry {
        double key;
        int64_t place;
    };
    std::vector<Entry> entries_;
    size_t first_ = 0, last_ = 0;
};

class Planner {
  public:
    Planner(const std::vector<double> &costs, int64_t layers, const std::vector<int64_t> &widths, int64_t nodes,
            int64_t gpus, int64_t per_stage)
        : layers_(layers), nodes_(nodes), gpus_(gpus), more_(static_cast<double>(per_stage - 1)), widths_(widths),
          prefix_(widths.size(), std::vector<double>(layers + 1, 0.0)), before_((nodes * gpus + 1) * (layers + 1)),
          after_(before_.size()), ends_(widths.size(), {std::vector<int32_t>(layers), std::vector<int32_t>(layers)}),
          past_(layers + 1), now_(layers + 1), slow_(layers + 1), quick_(layers + 1), low_(nodes * gpus + 1),
          high_(nodes * gpus + 1) {
        for (size_t w = 0; w < widths.size(); ++w)
            for (int64_t i = 0; i < layers; ++i) prefix_[w][i + 1] = prefix_[w][i] + costs[i * widths.size() + w];
        for (int64_t i = 0; i < layers; ++i)
            cheapest_ += *std::min_element(&costs[i * widths.size()], &costs[i * widths.size()] + widths.size());
        const int64_t most = layers - nodes + 1;  // every other node holds at least one layer
        for (size_t w = 0; w < widths.size(); ++w) {
            for (int64_t i = 0; i < layers; ++i) {
                poll_(most);
                for (int64_t j = i + 1; j <= std::min(layers, i + most); ++j)
                    slowest_.push_back(prefix_[w][j] - prefix_[w][i]);
            }
        }
        interruptible_sort(slowest_.begin(), slowest_.end(), std::less<>());
        slowest_.erase(std::unique(slowest_.begin(), slowest_.end()), slowest_.end());
    }

    PipelineTemplate solve() {
        PipelineTemplate best{{}, {}, INF};
        struct Interval {
            double bound;
            int64_t low, high;
        };
        const auto worse = [](const Interval &a, const Interval &b) {
            return a.bound != b.bound ? a.bound > b.bound : a.low > b.low;
        };
        std::priority_queue<Interval, std::vector<Interval>, decltype(worse)> open(worse);
        const auto push = [&](int64_t low, int64_t high) {
            if (!(least_time(slowest_[low]) < best.time)) return;
            const double bound = relax(slowest_[low], slowest_[high]);
            if (!(bound < best.time)) return;
            const PipelineTemplate found = follow(slowest_[low], slowest_[high]);
            if (found.time < best.time) best = found;
            if (low < high) open.push({bound, low, high});
        };
        push(0, static_cast<int64_t>(slowest_.size()) - 1);
        while (!open.empty() && open.top().bound < best.time) {
            const Interval top = open.top();
            open.pop();
            const int64_t middle = top.low + (top.high - top.low) / 2;
            push(top.low, middle);
            push(middle + 1, top.high);
        }
        return best;
    }

  private:
    size_t at(int64_t gpu, int64_t layer) const { return gpu * (layers_ + 1) + layer; }

    // Lower bound of pipelines with this slowest stage: all layers at their lowest cost, and as few stages as can use
    // all GPUs. Excludes most of the upper halves without visiting the stages.
    double least_time(double slowest) const {
        const int64_t widest = *std::max_element(widths_.begin(), widths_.end());
        const int64_t stages = nodes_ * ((gpus_ + widest - 1) / widest);
        return (cheapest_ + more_ * static_cast<double>(stages) * slowest) * (1 - 1e-12);
    }

    // Ends of stages of one width that begin with a layer: the first end with a cost of at least `low`, the last with a
    // cost of at most `high`.
    struct Ends {
        std::vector<int32_t> slow, last;
    };

    // Lower bound on T1 + T2 + T3 for slowest stages in low .. high; exact for low == high.
    double relax(double low, double high) {
        std::fill(before_.begin(), before_.end(), INF);
        std::fill(after_.begin(), after_.end(), INF);
        const int64_t all = nodes_ * gpus_;
        after_[at(all, layers_)] = 0.0;
        int64_t stages = 0;
        for (size_t w = 0; w < widths_.size(); ++w) stages += find_ends(w, low, high);
        // Both methods visit the same stages. If each layer begins only a few, trying each is faster.
        const bool few = stages <= FEW_STAGES * layers_ * static_cast<int64_t>(widths_.size());
        find_ranges();
        for (int64_t gpu = all - 1; gpu >= 0; --gpu) {
            for (size_t w = 0; w < widths_.size(); ++w) {
                if (widths_[w] > gpus_ - gpu % gpus_) continue;
                poll_(layers_);
                few ? try_each(gpu, w, low) : try_best(gpu, w, low);
            }
        }
        return before_[0];
    }

    // Returns the number of stages.
    int64_t find_ends(size_t w, double low, double high) {
        const std::vector<double> &sums = prefix_[w];
        Ends &ends = ends_[w];
        int64_t stages = 0;
        for (int64_t layer = 0, slow = 1, last = 0; layer < layers_; ++layer) {
            slow = std::max(slow, layer + 1);
            while (slow <= layers_ && sums[slow] - sums[layer] < low) ++slow;
            while (last < layers_ && sums[last + 1] - sums[layer] <= high) ++last;
            ends.slow[layer] = static_cast<int32_t>(slow);
            ends.last[layer] = static_cast<int32_t>(last);
            stages += std::max<int64_t>(0, last - layer);
        }
        return stages;
    }

    // Possible numbers of placed layers when `gpu` GPUs are used, low_ .. high_. Each node, also a partly used one,
    // holds at least one layer. Stages with known ends must be able to place them, and the remaining layers after them.
    void find_ranges() {
        const int64_t all = nodes_ * gpus_;
        std::fill(low_.begin(), low_.end(), layers_ + 1);
        std::fill(high_.begin(), high_.end(), -1);
        high_[0] = 0;
        low_[all] = layers_;
        for (int64_t gpu = 0; gpu < all; ++gpu) {
            if (high_[gpu] < 0) continue;
            high_[gpu] = std::min(high_[gpu], layers_ - (all - gpu + gpus_ - 1) / gpus_);
            for (size_t w = 0; w < widths_.size(); ++w) {
                if (widths_[w] > gpus_ - gpu % gpus_) continue;
                int64_t &next = high_[gpu + widths_[w]];
                next = std::max<int64_t>(next, ends_[w].last[high_[gpu]]);
            }
        }
        for (int64_t gpu = all - 1; gpu >= 0; --gpu) {
            for (size_t w = 0; w < widths_.size(); ++w) {
                if (widths_[w] > gpus_ - gpu % gpus_) continue;
                const std::vector<int32_t> &last = ends_[w].last;
                const auto reaches = std::lower_bound(last.begin(), last.end(), low_[gpu + widths_[w]]);
                low_[gpu] = std::min<int64_t>(low_[gpu], reaches - last.begin());
            }
            low_[gpu] = std::max(low_[gpu], (gpu + gpus_ - 1) / gpus_);
        }
    }

    // Minimum time of the rest of the pipeline if a stage of this cost comes next. Three cases: the slowest stage came
    // before, it is this one, it comes later.
    double past(double stage, double low, double rest) const { return stage + more_ * low + stage + rest; }
    double now(double stage, double low, double rest) const { return stage + more_ * low + rest; }
    double later(double stage, double low, double rest) const {
        return stage + more_ * low + std::max(low, stage) + rest;
    }

    // Improves before_ and after_ of a GPU with stages of one width.
    void try_each(int64_t gpu, size_t w, double low) {
        const int64_t next = gpu + widths_[w];
        const double *const sums = prefix_[w].data();
        const double *const before_next = &before_[at(next, 0)], *const after_next = &after_[at(next, 0)];
        for (int64_t layer = low_[gpu]; layer <= high_[gpu]; ++layer) {
            double before = before_[at(gpu, layer)], after = after_[at(gpu, layer)];
            const int64_t last = std::min<int64_t>(high_[next], ends_[w].last[layer]), slow = ends_[w].slow[layer];
            for (int64_t end = std::max(layer + 1, low_[next]); end <= last; ++end) {
                const double stage = sums[end] - sums[layer];
                after = std::min(after, past(stage, low, after_next[end]));
                before = std::min(before, later(stage, low, before_next[end]));
                if (end >= slow) before = std::min(before, now(stage, low, after_next[end]));
            }
            before_[at(gpu, layer)] = before;
            after_[at(gpu, layer)] = after;
        }
    }

    // The same in a few steps per layer: from layer to layer the ends of a stage only move upwards, and the better of
    // two ends stays the better one.
    void try_best(int64_t gpu, size_t w, double low) {
        const int64_t next = gpu + widths_[w];
        const double *const sums = prefix_[w].data();
        const double *const before_next = &before_[at(next, 0)], *const after_next = &after_[at(next, 0)];
        for (SlidingMin *each : {&past_, &now_, &slow_, &quick_}) each->clear();
        int64_t known = low_[next], quick = known;  // the first ends that have not been pushed
        for (int64_t layer = low_[gpu]; layer <= high_[gpu]; ++layer) {
            const int64_t first = std::max(layer + 1, low_[next]);
            const int64_t last = std::min<int64_t>(high_[next], ends_[w].last[layer]);
            const int64_t slow = std::max<int64_t>(first, ends_[w].slow[layer]);
            for (; known <= last; ++known) {
                past_.push(known, 2 * sums[known] + after_next[known]);
                now_.push(known, sums[known] + after_next[known]);
                slow_.push(known, 2 * sums[known] + before_next[known]);
            }
            for (; quick < slow && quick <= last; ++quick) quick_.push(quick, sums[quick] + before_next[quick]);
            double &before = before_[at(gpu, layer)], &after = after_[at(gpu, layer)];
            if (const int64_t end = past_.from(first); end >= 0)
                after = std::min(after, past(sums[end] - sums[layer], low, after_next[end]));
            if (const int64_t end = quick_.from(first); end >= 0)
                before = std::min(before, later(sums[end] - sums[layer], low, before_next[end]));
            if (const int64_t end = slow_.from(slow); end >= 0)
                before = std::min(before, later(sums[end] - sums[layer], low, before_next[end]));
            if (const int64_t end = now_.from(slow); end >= 0)
                before = std::min(before, now(sums[end] - sums[layer], low, after_next[end]));
        }
    }

    // The path found by relax(), by the same arithmetic, with its true objective.
    PipelineTemplate follow(double low, double high) const {
        PipelineTemplate found{{0}, {}, 0.0};
        std::vector<double> stages;
        bool passed = false;
        for (int64_t gpu = 0, layer = 0; gpu < nodes_ * gpus_;) {
            const double value = passed ? after_[at(gpu, layer)] : before_[at(gpu, layer)];
            bool done = false;
            for (size_t w = 0; w < widths_.size() && !done; ++w) {
                if (widths_[w] > gpus_ - gpu % gpus_) continue;
                const int64_t next = gpu + widths_[w];
                for (int64_t end = std::max(layer + 1, low_[next]); end <= high_[next] && !done; ++end) {
                    const double stage = prefix_[w][end] - prefix_[w][layer];
                    if (stage > high) break;
                    if (passed) {
                        done = past(stage, low, after_[at(next, end)]) == value;
                    } else if (stage >= low && now(stage, low, after_[at(next, end)]) == value) {
                        done = passed = true;
                    } else {
                        done = later(stage, low, before_[at(next, end)]) == value;
                    }
                    if (!done) continue;
                    stages.push_back(stage);
                    found.widths.push_back(static_cast<int32_t>(widths_[w]));
                    found.cuts.push_back(static_cast<int32_t>(end));
                    gpu = next;
                    layer = end;
                }
            }
        }
        found.time = objective(stages);
        return found;
    }

    double objective(const std::vector<double> &stages) const {
        const size_t slow = std::max_element(stages.begin(), stages.end()) - stages.begin();
        double time = (more_ * static_cast<double>(stages.size()) + static_cast<double>(slow) - 1.0) * stages[slow];
        for (size_t k = 0; k < stages.size(); ++k) time += k < slow ? stages[k] : 2.0 * stages[k];
        return time;
    }

    int64_t layers_, nodes_, gpus_;
    double more_;
    std::vector<int64_t> widths_;
    std::vector<std::vector<double>> prefix_;
    double cheapest_ = 0.0;  // all layers, each at its best width
    std::vector<double> slowest_;
    std::vector<double> before_, after_;
    std::vector<Ends> ends_;  // per width
    // Ends of a stage after the slowest one, of the slowest, of one before it with at least its cost, and with less.
    SlidingMin past_, now_, slow_, quick_;
    std::vector<int64_t> low_, high_;  // per number of GPUs
    Poll poll_;
};

}  // namespace

PipelineTemplate best_pipeline_template(const std::vector<double> &costs, int64_t layers,
                                        const std::vector<int64_t> &widths, int64_t nodes, int64_t gpus,
                                        int64_t per_stage) {
    if (nodes > layers) return {{}, {}, INF};
    return Planner(costs, layers, widths, nodes, gpus, per_stage).solve();
}

}  // namespace interlace
