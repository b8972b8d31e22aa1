#include "plan/orchestrate.h"

#include <algorithm>
#include <limits>

namespace interlace {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<int64_t> divisors(int64_t value) {
    std::vector<int64_t> low, high;
    for (int64_t d = 1; d * d <= value; ++d) {
        if (value % d) continue;
        low.push_back(d);
        if (d != value / d) high.push_back(value / d);
    }
    low.insert(low.end(), high.rbegin(), high.rend());
    return low;
}

// One choice of tensor and data parallelism for a module, given the backbone's DP.
struct Choice {
    size_t tp;         // index
    int64_t dp;
    double warm;       // T * PP: one microbatch through the module
    double work;       // GPU time per microbatch: warm * tp * dp
};

class Search {
public:
    Search(const std::vector<OrchestratedModule> &modules, size_t backbone, const std::vector<int64_t> &tp,
           const OrchestrationLimits &limits)
        : modules_(modules), backbone_(backbone), tp_(tp), limits_(limits), best_{kInfinity, {}} {
        for (const OrchestratedModule &module : modules) {
            std::vector<int64_t> sizes;
            if (module.layers > 0) {
                for (const int64_t d : divisors(module.layers))
                    if ((module.layers / d) % limits.vpp == 0) sizes.push_back(d);
            }
            sizes_.push_back(std::move(sizes));
        }
    }

    Orchestration solve() {
        const std::vector<int64_t> degrees = divisors(limits_.batch);
        for (const bool first : {true, false}) {
            for (const int64_t dp : degrees) {
                microbatches_ = limits_.batch / dp;
                options_.clear();
                for (size_t m = 0; m < modules_.size(); ++m) options_.push_back(choices(m, dp));
                chosen_.assign(modules_.size(), {});
                if (first)
                    seed();
                else
                    enumerate(0, 0.0, 0.0, 0);
            }
        }
        return best_;
    }

private:
    std::vector<Choice> choices(size_t m, int64_t dp) const {
        std::vector<Choice> found;
        for (size_t t = 0; t < tp_.size(); ++t) {
            const std::vector<int64_t> degrees = m == backbone_ ? std::vector<int64_t>{dp} : divisors(dp);
            for (const int64_t own : degrees) {
                if (own > limits_.gpus / tp_[t]) continue;
                const double warm = static_cast<double>(dp / own) * modules_[m].forward[t];
                found.push_back({t, own, warm, warm * static_cast<double>(own * tp_[t])});
            }
        }
        // The most promising first, so that good times are found early; ties by tensor-parallel size.
        std::stable_sort(found.begin(), found.end(), [&](const Choice &a, const Choice &b) {
            return promise(a) < promise(b);
        });
        return found;
    }

    double promise(const Choice &choice) const {
        return choice.warm / static_cast<double>(limits_.vpp) +
               static_cast<double>(microbatches_ - 1) * choice.work / static_cast<double>(limits_.gpus);
    }

    double relaxed(double warm, double work) const {
        return warm / static_cast<double>(limits_.vpp) +
               static_cast<double>(microbatches_ - 1) * work / static_cast<double>(limits_.gpus);
    }

    // The choice of least relaxed time for this DP, to have a good time before the enumeration.
    void seed() {
        for (size_t m = 0; m < modules_.size(); ++m) {
            if (options_[m].empty()) return;
            chosen_[m] = options_[m].front();
        }
        evaluate();
    }

    void enumerate(size_t m, double warm, double work, int64_t gpus) {
        if (m == modules_.size()) {
            evaluate();
            return;
        }
        double rest = 0.0;  // the least that the modules after m add to the bound
        for (size_t later = m + 1; later < modules_.size(); ++later) {
            if (options_[later].empty()) return;
            rest += promise(options_[later].front());
        }
        for (const Choice &choice : options_[m]) {
            if (!(relaxed(warm + choice.warm, work + choice.work) + rest < best_.time)) break;  // sorted by promise
            const int64_t used = gpus + choice.dp * tp_[choice.tp];
            if (used > limits_.gpus) continue;
            chosen_[m] = choice;
            enumerate(m + 1, warm + choice.warm, work + choice.work, used);
        }
    }

    // The smallest allowed pipeline size above `pp`, or 0.
    int64_t larger(size_t m, int64_t pp) const {
        if (modules_[m].layers == 0) return pp + 1;
        const auto next = std::upper_bound(sizes_[m].begin(), sizes_[m].end(), pp);
        return next == sizes_[m].end() ? 0 : *next;
    }

    bool memory_fits(size_t m, int64_t pp, int64_t downstream) const {
        if (limits_.gpu_memory == kInfinity) return true;
        const OrchestratedModule &module = modules_[m];
        const double shards = static_cast<double>(tp_[chosen_[m].tp] * pp);
        const int64_t depth = pp + downstream;
        double flight = static_cast<double>(depth);
        // Interleaving warms up 2 (depth - 1) + (vpp - 1) depth + 1 chunks of 1 / vpp of a stage each.
        if (limits_.vpp > 1)
            flight = static_cast<double>((limits_.vpp + 1) * depth - 1) / static_cast<double>(limits_.vpp);
        flight = std::min(flight, static_cast<double>(microbatches_));
        const double samples = static_cast<double>(chosen_[backbone_].dp / chosen_[m].dp);
        return module.weight_bytes / shards + module.optimizer_bytes / (shards * static_cast<double>(chosen_[m].dp)) +
                   samples * module.activation_bytes * flight / shards <=
               limits_.gpu_memory;
    }

    // Raises pipeline sizes to what memory needs, from the sink to the source, since a stage holds as many microbatches
    // as there are stages from it to the sink. Returns the GPUs, or -1 if no sizes fit.
    int64_t settle(std::vector<int64_t> &pp) const {
        int64_t downstream = 0, gpus = 0;
        for (size_t m = modules_.size(); m-- > 0;) {
            const int64_t each = tp_[chosen_[m].tp] * chosen_[m].dp;
            while (!memory_fits(m, pp[m], downstream)) {
                pp[m] = larger(m, pp[m]);
                if (pp[m] == 0 || gpus + pp[m] * each > limits_.gpus) return -1;
            }
            downstream += pp[m];
            gpus += pp[m] * each;
        }
        return gpus;
    }

    void evaluate() {
        double warm = 0.0;
        for (const Choice &choice : chosen_) warm += choice.warm;
        warm /= static_cast<double>(limits_.vpp);
        std::vector<int64_t> pp(modules_.size());
        for (size_t m = 0; m < modules_.size(); ++m) {
            pp[m] = larger(m, 0);
            if (pp[m] == 0) return;
        }
        while (true) {
            const int64_t gpus = settle(pp);
            if (gpus < 0 || gpus > limits_.gpus) return;
            size_t slowest = 0;
            double stage = -1.0;
            for (size_t m = 0; m < modules_.size(); ++m) {
                const double each = chosen_[m].warm / static_cast<double>(pp[m]);
                if (each > stage) stage = each, slowest = m;
            }
            const double time = warm + static_cast<double>(microbatches_ - 1) * stage;
            if (time < best_.time) {
                best_.time = time;
                best_.degrees.clear();
                for (size_t m = 0; m < modules_.size(); ++m)
                    best_.degrees.push_back({tp_[chosen_[m].tp], chosen_[m].dp, pp[m]});
            }
            if (microbatches_ == 1) return;
            pp[slowest] = larger(slowest, pp[slowest]);
            if (pp[slowest] == 0) return;
        }
    }

    const std::vector<OrchestratedModule> &modules_;
    size_t backbone_;
    const std::vector<int64_t> &tp_;
    OrchestrationLimits limits_;
    Orchestration best_;
    int64_t microbatches_ = 1;
    std::vector<std::vector<int64_t>> sizes_;  // allowed pipeline sizes of modules with a number of layers
    std::vector<std::vector<Choice>> options_;
    std::vector<Choice> chosen_;
};

}  // namespace

Orchestration best_orchestration(const std::vector<OrchestratedModule> &modules, size_t backbone,
                                 const std::vector<int64_t> &tp, const OrchestrationLimits &limits) {
    return Search(modules, backbone, tp, limits).solve();
}

}  // namespace interlace
