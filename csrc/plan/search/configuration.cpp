#include "plan/search/configuration.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "common/interrupt.h"
#include "plan/partition/partition.h"

namespace interlace {

namespace {

// One way to run a group, independent of data parallelism.
struct Option {
    int64_t tp, cp, pp;
    bool recompute;
    std::vector<std::vector<int32_t>> cuts;
    double slowest = 0.0, fill = 0.0;            // the slowest stage; all stages once with the transfers between them
    double gradients = 0.0;                      // bytes of the stage with the most
    double entry = 0.0;                          // bytes that enter each rank of the first stage
    std::vector<double> fixed, optimizer, kept;  // bytes per stage; kept: per microbatch in flight

    int64_t gpus() const { return tp * cp * pp; }
};

bool any_backward(const double *backward, int64_t layers) {
    return std::any_of(backward, backward + layers, [](double seconds) { return seconds > 0; });
}

class Options {
  public:
    explicit Options(const SearchLimits &limits) : limits_(limits) {}

    // All options of the modules under one (tp, cp), pp and recompute each.
    std::vector<Option> of(const std::vector<const SearchedModule *> &modules) const {
        std::vector<Option> found;
        const SearchedModule &first = *modules.front();
        for (size_t d = 0; d < first.tp.size(); ++d) {
            std::vector<size_t> at;  // index of these degrees in each module
            int64_t deepest = limits_.gpus / (first.tp[d] * first.cp[d]);
            for (const SearchedModule *module : modules) {
                for (size_t own = 0; own < module->tp.size(); ++own)
                    if (module->tp[own] == first.tp[d] && module->cp[own] == first.cp[d]) at.push_back(own);
                deepest = std::min(deepest, module->layers());
            }
            if (at.size() < modules.size()) continue;
            for (const char recompute : limits_.recompute) {
                std::vector<std::vector<double>> seconds;
                double total = 0.0;
                for (size_t m = 0; m < modules.size(); ++m) {
                    seconds.push_back(layer_times(*modules[m], at[m], recompute != 0));
                    total = std::accumulate(seconds[m].begin(), seconds[m].end(), total);
                }
                if (!std::isfinite(total))
                    throw std::invalid_argument("the seconds of all layers overflow: use a larger unit");
                for (int64_t pp = 1; pp <= deepest; ++pp)
                    found.push_back(one(modules, at, seconds, pp, recompute != 0));
            }
        }
        return found;
    }

  private:
    // Forward and backward of each layer, plus a second forward if it is recomputed, plus the sums of tensor
    // parallelism: the same for every forward and for the backward.
    std::vector<double> layer_times(const SearchedModule &module, size_t at, bool recompute) const {
        const double *const forward = &module.forward[at * module.layers()];
        const double *const backward = &module.backward[at * module.layers()];
        std::vector<double> seconds;
        for (int64_t i = 0; i < module.layers(); ++i) {
            const bool trained = backward[i] > 0;
            const int passes = 1 + trained + (recompute && trained);
            const double sum =
                module.reduces[i] *
                limits_.tensor_link.all_reduce(module.input[i] / static_cast<double>(module.cp[at]), module.tp[at]);
            seconds.push_back(forward[i] * (1 + (recompute && trained)) + backward[i] + passes * sum);
        }
        return seconds;
    }

    Option one(const std::vector<const SearchedModule *> &modules, const std::vector<size_t> &at,
               const std::vector<std::vector<double>> &seconds, int64_t pp, bool recompute) const {
        check_interrupt();
        Option option;
        option.tp = modules[0]->tp[at[0]];
        option.cp = modules[0]->cp[at[0]];
        option.pp = pp;
        option.recompute = recompute;
        const double tp = static_cast<double>(option.tp), ranks = static_cast<double>(option.tp * option.cp);
        // Per stage. sent back: the gradient of the stage's input, if anything before it is trained.
        std::vector<double> times(pp, 0.0), gradients(pp, 0.0), sent(pp, 0.0), sent_back(pp, 0.0), largest(pp, 0.0);
        option.fixed.assign(pp, 0.0);
        option.optimizer.assign(pp, 0.0);
        option.kept.assign(pp, 0.0);
        for (size_t m = 0; m < modules.size(); ++m) {
            const SearchedModule &module = *modules[m];
            const double *const backward = &module.backward[at[m] * module.layers()];
            std::vector<int32_t> cuts = min_bottleneck_partition(seconds[m], pp, module.layers());
            for (int64_t s = 0; s < pp; ++s) {
                for (int32_t i = cuts[s]; i < cuts[s + 1]; ++i) {
                    times[s] += seconds[m][i];
                    option.fixed[s] += (module.weights[i] + module.gradients[i]) / tp;
                    option.optimizer[s] += module.optimizer[i] / tp;
                    gradients[s] += module.gradients[i] / tp;
                    if (!(backward[i] > 0)) continue;  // keeps no activations
                    option.kept[s] += (recompute ? module.input[i] : module.activations[i]) / ranks;
                    largest[s] = std::max(largest[s], module.activations[i] / ranks);
                }
                sent[s] += module.input[cuts[s]] / ranks;
                if (any_backward(backward, cuts[s])) sent_back[s] += module.input[cuts[s]] / ranks;
            }
            option.entry += module.input[0] / ranks;
            option.cuts.push_back(std::move(cuts));
        }
        for (int64_t s = 0; s < pp; ++s) {
            option.slowest = std::max(option.slowest, times[s]);
            option.fill += times[s];
            option.gradients = std::max(option.gradients, gradients[s]);
            if (recompute) option.fixed[s] += largest[s];  // of the layer being recomputed
            if (s > 0) option.fill += limits_.stage_link.transfer(sent[s]) + limits_.stage_link.transfer(sent_back[s]);
        }
        return option;
    }

    const SearchLimits &limits_;
};

// An option with a given data parallelism.
struct Candidate {
    const Option *option;
    int64_t gpus;
    double fill, slowest, sync;

    bool beats(const Candidate &other) const {
        return gpus <= other.gpus && fill <= other.fill && slowest <= other.slowest && sync <= other.sync;
    }
};

class Search {
  public:
    Search(const std::vector<SearchedModule> &modules, const SearchLimits &limits) : limits_(limits) {
        const Options options(limits);
        const int64_t encoders = static_cast<int64_t>(modules.size()) - 1;
        std::vector<const SearchedModule *> together;
        for (int64_t m = 0; m < encoders; ++m) {
            together.push_back(&modules[m]);
            alone_.push_back(limits.parallel.empty() ? std::vector<Option>() : options.of({&modules[m]}));
            trained_.push_back(any_backward(modules[m].backward.data(), modules[m].layers()));
        }
        if (!limits.colocated.empty() && encoders > 0) merged_ = options.of(together);
        backbone_ = options.of({&modules.back()});
    }

    SearchResult solve() {
        for (size_t d = 0; d < limits_.dp.size(); ++d) {
            dp_ = limits_.dp[d];
            count_ = limits_.batch / (dp_ * limits_.microbatch);
            budget_ = limits_.gpus / dp_;
            if (!limits_.parallel.empty() && !limits_.parallel[d].empty()) {
                std::vector<const std::vector<Option> *> groups;
                for (const std::vector<Option> &each : alone_) groups.push_back(&each);
                place(groups, trained_, limits_.parallel[d], false);
            }
            if (!limits_.colocated.empty() && !limits_.colocated[d].empty()) {
                const char trained = std::any_of(trained_.begin(), trained_.end(), [](char each) { return each; });
                place({&merged_}, {trained}, limits_.colocated[d], true);
            }
        }
        return std::move(best_);
    }

  private:
    double peak(const Option &option, int64_t downstream) const {
        double most = 0.0;
        for (int64_t s = 0; s < option.pp; ++s) {
            // Under 1F1B a stage holds as many microbatches as there are stages from it to the end of the pipeline.
            const double flight = static_cast<double>(std::min(option.pp - s + downstream, count_));
            const double states = option.optimizer[s] / static_cast<double>(dp_ * option.cp);
            most = std::max(most, option.fixed[s] + states + option.kept[s] * flight);
        }
        return most;
    }

    Candidate candidate(const Option &option) const {
        return {&option, option.gpus(), option.fill, option.slowest,
                limits_.data_link.all_reduce(option.gradients, dp_ * option.cp)};
    }

    double steady() const { return static_cast<double>(count_ - 1); }

    double alone(const Candidate &each) const { return each.fill + steady() * each.slowest + each.sync; }

    // Candidates that fit the memory with `downstream` stages after them and that no other one equals or beats.
    std::vector<Candidate> undominated(const std::vector<Candidate> &every, int64_t downstream) const {
        std::vector<Candidate> found;
        for (const Candidate &each : every)
            if (peak(*each.option, downstream) <= limits_.gpu_memory) found.push_back(each);
        std::stable_sort(found.begin(), found.end(), [](const Candidate &a, const Candidate &b) {
            return std::tie(a.gpus, a.fill, a.slowest, a.sync) < std::tie(b.gpus, b.fill, b.slowest, b.sync);
        });
        size_t kept = 0;
        Poll poll;
        for (const Candidate &each : found) {
            poll(1 + static_cast<int64_t>(kept));
            const auto better = [&](const Candidate &other) { return other.beats(each); };
            if (std::none_of(found.begin(), found.begin() + static_cast<int64_t>(kept), better)) found[kept++] = each;
        }
        found.resize(kept);
        // Best ones first, so that the rest is cut off early.
        std::stable_sort(found.begin(), found.end(),
                         [&](const Candidate &a, const Candidate &b) { return alone(a) < alone(b); });
        return found;
    }

    // shares: GPUs of each group, the language model's last.
    void place(const std::vector<const std::vector<Option> *> &groups, const std::vector<char> &trained,
               const std::vector<int64_t> &shares, bool colocated) {
        const size_t encoders = groups.size();
        std::vector<std::vector<Candidate>> usable(encoders);
        const auto fits = [&](const Option &option, int64_t share) {
            if (share >= 0) return option.gpus() == share;
            return option.gpus() + static_cast<int64_t>(encoders) <= budget_;  // every other group needs a GPU
        };
        for (size_t e = 0; e < encoders; ++e)
            for (const Option &option : *groups[e])
                if (fits(option, shares[e])) usable[e].push_back(candidate(option));
        std::vector<Candidate> backbone;
        for (const Option &option : backbone_)
            if (fits(option, shares.back())) backbone.push_back(candidate(option));
        std::stable_sort(backbone.begin(), backbone.end(),
                         [&](const Candidate &a, const Candidate &b) { return alone(a) < alone(b); });

        std::map<std::pair<size_t, int64_t>, std::vector<Candidate>> any_degrees;
        std::map<std::tuple<size_t, int64_t, int64_t, int64_t>, std::vector<Candidate>> same_degrees;
        for (const Candidate &last : backbone) {
            poll_();
            if (!(alone(last) < best_.time)) break;
            const Option &own = *last.option;
            if (peak(own, 0) > limits_.gpu_memory) continue;
            std::vector<std::vector<Choice>> choices(encoders);
            const double hop = limits_.stage_link.transfer(own.entry);
            bool possible = true;
            for (size_t e = 0; e < encoders && possible; ++e) {
                const double way = hop * (1 + (trained[e] ? 1 : 0));
                const auto [any, fresh] = any_degrees.try_emplace({e, own.pp});
                if (fresh) any->second = undominated(usable[e], own.pp);
                const auto [same, unknown] = same_degrees.try_emplace({e, own.pp, own.tp, own.cp});
                if (unknown) {
                    std::vector<Candidate> matching;
                    for (const Candidate &each : usable[e])
                        if (each.option->tp == own.tp && each.option->cp == own.cp) matching.push_back(each);
                    same->second = undominated(matching, own.pp);
                }
                for (const Candidate &each : same->second) choices[e].push_back({each, each.fill + way, 0.0});
                for (const Candidate &each : any->second)
                    if (each.option->tp != own.tp || each.option->cp != own.cp)
                        choices[e].push_back({each, each.fill + way, way});
                possible = !choices[e].empty();
            }
            if (!possible) continue;
            std::vector<std::vector<const Choice *>> open(encoders);
            for (size_t e = 0; e < encoders; ++e)
                for (const Choice &choice : choices[e]) open[e].push_back(&choice);
            chosen_.assign(encoders, nullptr);
            combine(open, last, 0, {last.gpus, 0.0, last.slowest, last.sync, 0.0}, colocated);
        }
    }

    struct Choice {
        Candidate candidate;
        double fill, reshard;  // including the path to the language model; per microbatch
    };

    struct Partial {
        int64_t gpus;
        double fill, slowest, sync, reshard;
    };

    double time(const Candidate &last, const Partial &sum) const {
        return last.fill + sum.fill + steady() * sum.slowest + static_cast<double>(count_) * sum.reshard + sum.sync;
    }

    static Partial join(const Partial &sum, const Choice &choice) {
        const Candidate &own = choice.candidate;
        return {sum.gpus + own.gpus, std::max(sum.fill, choice.fill), std::max(sum.slowest, own.slowest),
                std::max(sum.sync, own.sync), sum.reshard + choice.reshard};
    }

    // Encoders before e have been chosen; the others have these choices.
    void combine(const std::vector<std::vector<const Choice *>> &choices, const Candidate &last, size_t e,
                 const Partial &sum, bool colocated) {
        if (!(time(last, sum) < best_.time)) return;
        if (e == choices.size()) {
            keep(last, time(last, sum), colocated);
            return;
        }
        // Per encoder: the choices that stay below the best time if the other encoders cost nothing, and their lowest
        // number of GPUs.
        std::vector<std::vector<const Choice *>> open(choices.size());
        std::vector<int64_t> fewest(choices.size(), 0);
        int64_t needed = sum.gpus;
        for (size_t f = e; f < choices.size(); ++f) {
            poll_(1 + static_cast<int64_t>(choices[f].size()));
            for (const Choice *choice : choices[f]) {
                if (!(time(last, join(sum, *choice)) < best_.time)) continue;
                if (open[f].empty() || choice->candidate.gpus < fewest[f]) fewest[f] = choice->candidate.gpus;
                open[f].push_back(choice);
            }
            if (open[f].empty()) return;
            needed += fewest[f];
        }
        for (const Choice *choice : open[e]) {
            if (needed - fewest[e] + choice->candidate.gpus > budget_) continue;
            chosen_[e] = choice->candidate.option;
            combine(open, last, e + 1, join(sum, *choice), colocated);
        }
    }

    void keep(const Candidate &last, double time, bool colocated) {
        best_.time = time;
        best_.dp = dp_;
        best_.colocated = colocated;
        best_.groups.clear();
        for (const Option *option : chosen_) add(*option, last.option->pp);
        add(*last.option, 0);
    }

    void add(const Option &option, int64_t downstream) {
        best_.groups.push_back(
            {option.tp, option.cp, option.pp, option.recompute, option.cuts, peak(option, downstream)});
    }

    const SearchLimits &limits_;
    std::vector<std::vector<Option>> alone_;  // per encoder
    std::vector<Option> merged_, backbone_;
    std::vector<char> trained_;  // per encoder: true if any layer has a backward
    SearchResult best_;
    int64_t dp_ = 1, count_ = 1, budget_ = 1;
    std::vector<const Option *> chosen_;
    Poll poll_;
};

}  // namespace

SearchResult best_configuration(const std::vector<SearchedModule> &modules, const SearchLimits &limits) {
    return Search(modules, limits).solve();
}

}  // namespace interlace
