#include "plan/pipeline_template.h"

#include <algorithm>
#include <limits>
#include <queue>

namespace interlace {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Planner {
public:
    Planner(const std::vector<double> &costs, int64_t layers, const std::vector<int64_t> &widths, int64_t nodes,
            int64_t gpus, int64_t per_stage)
        : layers_(layers),
          nodes_(nodes),
          gpus_(gpus),
          more_(static_cast<double>(per_stage - 1)),
          widths_(widths),
          prefix_(widths.size(), std::vector<double>(layers + 1, 0.0)),
          before_((nodes * gpus + 1) * (layers + 1)),
          after_(before_.size()) {
        for (size_t w = 0; w < widths.size(); ++w)
            for (int64_t i = 0; i < layers; ++i)
                prefix_[w][i + 1] = prefix_[w][i] + costs[i * widths.size() + w];
        const int64_t most = layers - nodes + 1;  // every other node holds a layer at least
        for (size_t w = 0; w < widths.size(); ++w)
            for (int64_t i = 0; i < layers; ++i)
                for (int64_t j = i + 1; j <= std::min(layers, i + most); ++j)
                    slowest_.push_back(prefix_[w][j] - prefix_[w][i]);
        std::sort(slowest_.begin(), slowest_.end());
        slowest_.erase(std::unique(slowest_.begin(), slowest_.end()), slowest_.end());
    }

    PipelineTemplate solve() {
        PipelineTemplate best{{}, {}, kInfinity};
        struct Interval {
            double bound;
            int64_t low, high;
        };
        const auto worse = [](const Interval &a, const Interval &b) {
            return a.bound != b.bound ? a.bound > b.bound : a.low > b.low;
        };
        std::priority_queue<Interval, std::vector<Interval>, decltype(worse)> open(worse);
        const auto push = [&](int64_t low, int64_t high) {
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

    // Layers that may have been placed when `gpu` GPUs are used: each node, also one in part, holds one at least.
    int64_t least(int64_t gpu) const { return (gpu + gpus_ - 1) / gpus_; }
    int64_t most(int64_t gpu) const { return layers_ - (nodes_ * gpus_ - gpu + gpus_ - 1) / gpus_; }

    // Lower bound on T1 + T2 + T3 for slowest stages in low .. high; exact for low == high.
    double relax(double low, double high) {
        std::fill(before_.begin(), before_.end(), kInfinity);
        std::fill(after_.begin(), after_.end(), kInfinity);
        const int64_t all = nodes_ * gpus_;
        after_[at(all, layers_)] = 0.0;
        for (int64_t gpu = all - 1; gpu >= 0; --gpu) {
            for (size_t w = 0; w < widths_.size(); ++w) {
                if (widths_[w] > gpus_ - gpu % gpus_) continue;
                const int64_t next = gpu + widths_[w];
                const double *sums = prefix_[w].data();
                const double *before_next = &before_[at(next, 0)], *after_next = &after_[at(next, 0)];
                for (int64_t layer = least(gpu); layer <= most(gpu); ++layer) {
                    double before = before_[at(gpu, layer)], after = after_[at(gpu, layer)];
                    const int64_t stop = most(next);
                    for (int64_t end = std::max(layer + 1, least(next)); end <= stop; ++end) {
                        const double stage = sums[end] - sums[layer];
                        if (stage > high) break;
                        const double rest = stage + more_ * low;
                        after = std::min(after, rest + stage + after_next[end]);
                        before = std::min(before, rest + std::max(low, stage) + before_next[end]);
                        if (stage >= low) before = std::min(before, rest + after_next[end]);
                    }
                    before_[at(gpu, layer)] = before;
                    after_[at(gpu, layer)] = after;
                }
            }
        }
        return before_[0];
    }

    // The path that relax() found, by the same arithmetic, with its true objective.
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
                for (int64_t end = std::max(layer + 1, least(next)); end <= most(next) && !done; ++end) {
                    const double stage = prefix_[w][end] - prefix_[w][layer];
                    if (stage > high) break;
                    const double rest = stage + more_ * low;
                    if (passed) {
                        done = rest + stage + after_[at(next, end)] == value;
                    } else if (stage >= low && rest + after_[at(next, end)] == value) {
                        done = passed = true;
                    } else {
                        done = rest + std::max(low, stage) + before_[at(next, end)] == value;
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
    std::vector<double> slowest_;
    std::vector<double> before_, after_;
};

}  // namespace

PipelineTemplate best_pipeline_template(const std::vector<double> &costs, int64_t layers,
                                        const std::vector<int64_t> &widths, int64_t nodes, int64_t gpus,
                                        int64_t per_stage) {
    if (nodes > layers) return {{}, {}, kInfinity};
    return Planner(costs, layers, widths, nodes, gpus, per_stage).solve();
}

}  // namespace interlace
