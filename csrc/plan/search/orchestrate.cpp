#include "plan/search/orchestrate.h"

#include <algorithm>
#include <cmath>

#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

namespace {

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
    size_t tp;            // index
    int64_t dp, samples;  // replicas; samples of a microbatch on the replica with the most
    double warm;          // T * PP: one microbatch through the module
    double work;          // GPU time per microbatch: warm * tp * dp
    double sent;          // bytes of a microbatch from each GPU of a stage to the next
    double hop;           // seconds of this transfer
    double least;         // this module's own part of T_warm and T_PP with the fewest stages
    double least_sum;     // seconds of a gradient sum with the most stages
};

class Search {
  public:
    Search(const std::vector<OrchestratedModule> &modules, size_t backbone, const std::vector<int64_t> &tp,
           const OrchestrationLimits &limits)
        : modules_(modules), backbone_(backbone), tp_(tp), limits_(limits), best_{INF, {}} {
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
        for (size_t m = 0; m < modules_.size(); ++m)
            if (larger(m, 0) == 0) return best_;  // vpp does not divide the layers
        degrees_ = divisors(limits_.batch);
        for (const bool first : {true, false}) {
            for (const int64_t dp : degrees_) {
                microbatches_ = limits_.batch / dp;
                options_.clear();
                for (size_t m = 0; m < modules_.size(); ++m) options_.push_back(choices(m, dp));
                chosen_.assign(modules_.size(), {});
                if (first)
                    seed();
                else
                    enumerate(0, 0.0, 0.0, 0.0, 0);
            }
        }
        return best_;
    }

  private:
    std::vector<Choice> choices(size_t m, int64_t dp) const {
        std::vector<Choice> found;
        for (size_t t = 0; t < tp_.size(); ++t) {
            int64_t enough = 0;  // samples for which fewer replicas are equally fast and always fit the memory
            for (const int64_t own : degrees_) {
                if (own > dp || own > limits_.gpus / tp_[t] || (m == backbone_ && own != dp)) continue;
                const int64_t samples = (dp + own - 1) / own;
                if (samples == enough) continue;
                found.push_back(choice(m, t, own, samples));
                if (memory(m, found.back(), larger(m, 0), static_cast<double>(microbatches_)) <= limits_.gpu_memory)
                    enough = samples;
            }
        }
        // The most promising first, so that good times are found early; ties by tensor-parallel size.
        std::stable_sort(found.begin(), found.end(),
                         [&](const Choice &a, const Choice &b) { return promise(a) < promise(b); });
        return found;
    }

    Choice choice(size_t m, size_t t, int64_t dp, int64_t samples) const {
        const OrchestratedModule &module = modules_[m];
        Choice found{t, dp, samples, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
        found.warm = static_cast<double>(samples) * module.forward[t];
        found.work = found.warm * static_cast<double>(dp * tp_[t]);
        found.sent = static_cast<double>(samples) * module.output_bytes / static_cast<double>(tp_[t]);
        found.hop = limits_.stage_link.transfer(found.sent);
        // The last stage of a module sends to the next module, too.
        const int64_t hops = larger(m, 0) - (m + 1 == modules_.size());
        found.least = found.warm / static_cast<double>(limits_.vpp) + static_cast<double>(hops) * found.hop;
        const int64_t most = limits_.gpus / (dp * tp_[t]);
        found.least_sum = gradient_sum(m, found, module.layers == 0 ? most : std::min(most, sizes_[m].back()));
        return found;
    }

    double gradient_sum(size_t m, const Choice &choice, int64_t pp) const {
        const double bytes = modules_[m].gradient_bytes / static_cast<double>(tp_[choice.tp] * pp);
        return limits_.data_link.all_reduce(bytes, choice.dp);
    }

    double promise(const Choice &choice) const { return relaxed(choice.least, choice.work); }

    double relaxed(double least, double work) const {
        return least + static_cast<double>(microbatches_ - 1) * work / static_cast<double>(limits_.gpus);
    }

    // The choice of least relaxed time for this DP, to start the enumeration with a good time.
    void seed() {
        for (size_t m = 0; m < modules_.size(); ++m) {
            if (options_[m].empty()) return;
            chosen_[m] = options_[m].front();
        }
        evaluate();
    }

    void enumerate(size_t m, double least, double work, double least_sum, int64_t gpus) {
        if (m == modules_.size()) {
            evaluate();
            return;
        }
        double rest = 0.0, rest_least = 0.0;  // modules after m: share of the bound, and share without their stages
        for (size_t later = m + 1; later < modules_.size(); ++later) {
            if (options_[later].empty()) return;
            rest += promise(options_[later].front());
            double fewest = INF;
            for (const Choice &choice : options_[later]) fewest = std::min(fewest, choice.least);
            rest_least += fewest;
        }
        for (const Choice &choice : options_[m]) {
            poll_();
            const double bound = relaxed(least + choice.least, work + choice.work) + rest;
            if (!(bound < best_.time)) break;  // sorted by promise
            const double sum = std::max(least_sum, choice.least_sum);
            if (!(bound + sum < best_.time)) continue;
            const int64_t pp = stages_for(m, choice.warm, least + choice.least + rest_least + sum);
            const int64_t used = gpus + pp * choice.dp * tp_[choice.tp];
            if (pp == 0 || used > limits_.gpus) continue;
            chosen_[m] = choice;
            enumerate(m + 1, least + choice.least, work + choice.work, sum, used);
        }
    }

    // The smallest allowed pipeline size above `pp`, or 0.
    int64_t larger(size_t m, int64_t pp) const {
        if (modules_[m].layers == 0) return pp + 1;
        const auto next = std::upper_bound(sizes_[m].begin(), sizes_[m].end(), pp);
        return next == sizes_[m].end() ? 0 : *next;
    }

    // The smallest pipeline size whose stages are short enough for a time below the best, if all other parts take
    // `others`; 0 if none is.
    int64_t stages_for(size_t m, double warm, double others) const {
        if (microbatches_ == 1 || best_.time == INF) return larger(m, 0);
        const double stage = (best_.time - others) / static_cast<double>(microbatches_ - 1);
        const double needed = std::ceil(warm / stage * (1 - 1e-12));  // slightly lower, to allow for rounding
        if (!(needed <= static_cast<double>(limits_.gpus)) || stage <= 0) return 0;
        return larger(m, std::max<int64_t>(0, static_cast<int64_t>(needed) - 1));
    }

    // Bytes per GPU with `flight` microbatches in flight; less with more stages.
    double memory(size_t m, const Choice &choice, int64_t pp, double flight) const {
        const OrchestratedModule &module = modules_[m];
        const double shards = static_cast<double>(tp_[choice.tp] * pp);
        return module.weight_bytes / shards + module.optimizer_bytes / (shards * static_cast<double>(choice.dp)) +
               static_cast<double>(choice.samples) * module.activation_bytes * flight / shards;
    }

    bool memory_fits(size_t m, int64_t pp, int64_t downstream) const {
        if (limits_.gpu_memory == INF) return true;
        const int64_t depth = pp + downstream;
        double flight = static_cast<double>(depth);
        // The warm-up of interleaving has 2 (depth - 1) + (vpp - 1) depth + 1 chunks of 1 / vpp of a stage each.
        if (limits_.vpp > 1)
            flight = static_cast<double>((limits_.vpp + 1) * depth - 1) / static_cast<double>(limits_.vpp);
        return memory(m, chosen_[m], pp, std::min(flight, static_cast<double>(microbatches_))) <= limits_.gpu_memory;
    }

    // Raises pipeline sizes until memory fits, from the sink to the source, since a stage holds as many microbatches as
    // there are stages from it to the sink. Returns true if there are enough GPUs.
    bool settle(std::vector<int64_t> &pp) const {
        int64_t downstream = 0, gpus = 0;
        for (size_t m = modules_.size(); m-- > 0;) {
            const int64_t each = tp_[chosen_[m].tp] * chosen_[m].dp;
            while (!memory_fits(m, pp[m], downstream)) {
                poll_();
                pp[m] = larger(m, pp[m]);
                if (pp[m] == 0 || gpus + pp[m] * each > limits_.gpus) return false;
            }
            downstream += pp[m];
            gpus += pp[m] * each;
        }
        return gpus <= limits_.gpus;
    }

    // The highest time over modules, and its module.
    struct Slowest {
        size_t module = 0;
        double seconds = -1.0;

        void consider(size_t m, double own) {
            if (own > seconds) *this = {m, own};
        }
    };

    Slowest slowest_sum(const std::vector<int64_t> &pp) const {
        Slowest found;
        for (size_t m = 0; m < modules_.size(); ++m) found.consider(m, gradient_sum(m, chosen_[m], pp[m]));
        return found;
    }

    // T_warm / vpp, plus transfers between modules, limited by the side whose GPUs carry more.
    double fixed_time() const {
        double warm = 0.0, between = 0.0;
        for (size_t m = 0; m < modules_.size(); ++m) {
            warm += chosen_[m].warm;
            if (m + 1 == modules_.size()) continue;
            const Choice &next = chosen_[m + 1];
            const double taken =
                static_cast<double>(next.samples) * modules_[m].output_bytes / static_cast<double>(tp_[next.tp]);
            between += limits_.stage_link.transfer(std::max(chosen_[m].sent, taken));
        }
        return warm / static_cast<double>(limits_.vpp) + between;
    }

    double hops(const std::vector<int64_t> &pp) const {
        double seconds = 0.0;
        for (size_t m = 0; m < modules_.size(); ++m) seconds += static_cast<double>(pp[m] - 1) * chosen_[m].hop;
        return seconds;
    }

    void evaluate() {
        const double fixed = fixed_time();
        std::vector<int64_t> least(modules_.size());
        for (size_t m = 0; m < modules_.size(); ++m) least[m] = larger(m, 0);
        double floor = 0.0;  // minimum time of a gradient sum plus the slowest stages
        for (const Choice &choice : chosen_) floor = std::max(floor, choice.least_sum);
        // For every limit on the gradient sums, the best limit on the stages.
        for (bool first = true; settle(least); first = false) {
            const Slowest sum = slowest_sum(least);
            const double stage = raise_stages(least, fixed, floor);
            if (stage < 0 || sum.seconds <= 0) return;
            if (first) floor += static_cast<double>(microbatches_ - 1) * stage;
            least[sum.module] = larger(sum.module, least[sum.module]);
            if (least[sum.module] == 0 || !(fixed + hops(least) + floor < best_.time)) return;
        }
    }

    // Returns the least time of a slowest stage that it reached, or -1 if no size can help.
    double raise_stages(std::vector<int64_t> pp, double fixed, double floor) {
        Slowest stage;
        const double others = fixed + hops(pp);
        for (size_t m = 0; m < modules_.size(); ++m) {
            const int64_t needed = stages_for(m, chosen_[m].warm, others);
            if (needed == 0) return -1.0;
            pp[m] = std::max(pp[m], needed);
        }
        while (settle(pp) && fixed + hops(pp) + floor < best_.time) {
            poll_(static_cast<int64_t>(modules_.size()));
            stage = {};
            for (size_t m = 0; m < modules_.size(); ++m)
                stage.consider(m, chosen_[m].warm / static_cast<double>(pp[m]));
            const double without_stages = fixed + hops(pp) + slowest_sum(pp).seconds;
            const double time = without_stages + static_cast<double>(microbatches_ - 1) * stage.seconds;
            if (time < best_.time) {
                best_.time = time;
                best_.degrees.clear();
                for (size_t m = 0; m < modules_.size(); ++m)
                    best_.degrees.push_back({tp_[chosen_[m].tp], chosen_[m].dp, pp[m]});
            }
            if (microbatches_ == 1) break;
            pp[stage.module] = larger(stage.module, pp[stage.module]);
            if (pp[stage.module] == 0) break;
        }
        return std::max(0.0, stage.seconds);
    }

    const std::vector<OrchestratedModule> &modules_;
    size_t backbone_;
    const std::vector<int64_t> &tp_;
    OrchestrationLimits limits_;
    Orchestration best_;
    int64_t microbatches_ = 1;
    std::vector<int64_t> degrees_;             // divisors of the batch
    std::vector<std::vector<int64_t>> sizes_;  // allowed pipeline sizes of modules with a number of layers
    std::vector<std::vector<Choice>> options_;
    std::vector<Choice> chosen_;
    mutable Poll poll_;
};

}  // namespace

Orchestration best_orchestration(const std::vector<OrchestratedModule> &modules, size_t backbone,
                                 const std::vector<int64_t> &tp, const OrchestrationLimits &limits) {
    return Search(modules, backbone, tp, limits).solve();
}

}  // namespace interlace
