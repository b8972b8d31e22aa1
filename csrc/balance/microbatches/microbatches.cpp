#include "balance/microbatches/microbatches.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <tuple>
#include <utility>

#include "balance/microbatches/bottleneck_match.h"
#include "balance/microbatches/refine.h"
#include "common/order.h"
#include "balance/bins/refine.h"
#include "balance/microbatches/subset_sum.h"
#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr double NEAR = 1.001;                 // an overload up to this factor needs no second attempt
constexpr int64_t BUCKETS = int64_t{1} << 14;  // for an overloaded microbatch whose costs are not whole numbers

double sum(const std::vector<double> &values) { return std::accumulate(values.begin(), values.end(), 0.0); }

// Possible sums of subsets of one overloaded microbatch, near the requested transfers.
class Transfers {
  public:
    Transfers(const std::vector<double> &costs, const std::vector<double> &targets, bool chosen)
        : costs_(costs), units_(to_units(costs, 0.0, BUCKETS)), usable_(units_.unit > 0.0 && units_.total > 0),
          limit_(usable_ ? limit(*std::max_element(targets.begin(), targets.end())) : 0),
          // For whole numbers the trace is not needed to weigh a sum, only to choose items once the partner is known.
          sums_(units_.counts, limit_, chosen || !units_.exact, ideals(targets)) {}

    double moved(double target) const {
        const int64_t units = nearest(target);
        if (units_.exact) return static_cast<double>(units) * units_.unit;
        double weight = 0.0;
        for (const int32_t item : sums_.items(units)) weight += costs_[item];
        return weight;
    }

    // Requires `chosen`.
    std::vector<int32_t> items(double target) const { return sums_.items(nearest(target)); }

  private:
    const std::vector<double> &costs_;
    const Units units_;
    const bool usable_;
    const int64_t limit_;
    const SubsetSums sums_;

    // Sums above twice the target are further from it than the empty set.
    int64_t limit(double target) const {
        const double most = std::floor(2.0 * (target / units_.unit)) + 1.0;
        return most < static_cast<double>(units_.total) ? static_cast<int64_t>(most) : units_.total;
    }

    std::vector<int64_t> ideals(const std::vector<double> &targets) const {
        std::vector<int64_t> sums;
        for (const double target : targets)
            sums.push_back(usable_ ? SubsetSums::ideal(target, units_.unit, limit_) : 0);
        return sums;
    }

    int64_t nearest(double target) const { return usable_ ? sums_.nearest(target, units_.unit) : 0; }
};

double half_difference(double overloaded, double underloaded) { return std::max(0.0, overloaded - underloaded) / 2; }

}  // namespace

std::vector<int32_t> assign_replicas(const std::vector<double> &encoder, const std::vector<double> &llm,
                                     int64_t replicas, bool equal_counts) {
    const int64_t n = static_cast<int64_t>(encoder.size());
    const int64_t share = n / replicas;
    int64_t extra = n % replicas;  // replicas that may still take one sample more than their share
    using Replica = std::pair<double, int32_t>;
    const auto later = [](const Replica &a, const Replica &b) { return a > b; };
    std::vector<Replica> heap(replicas);
    for (int64_t r = 0; r < replicas; ++r) heap[r] = {0.0, static_cast<int32_t>(r)};
    std::vector<int64_t> counts(replicas, 0);
    std::vector<int32_t> replica_of(n);
    Poll poll;
    for (const int32_t sample : descending_order(encoder)) {
        poll();
        // A replica with a full share stays in the heap while any replica may take one more.
        while (equal_counts && counts[heap.front().second] >= share + (extra > 0)) {
            std::pop_heap(heap.begin(), heap.end(), later);
            heap.pop_back();
        }
        std::pop_heap(heap.begin(), heap.end(), later);
        Replica &replica = heap.back();
        replica_of[sample] = replica.second;
        replica.first += llm[sample];
        extra -= ++counts[replica.second] > share;
        std::push_heap(heap.begin(), heap.end(), later);
    }
    return replica_of;
}

int64_t effective_microbatches(const std::vector<double> &encoder, int64_t microbatches) {
    const int64_t count = std::min<int64_t>(microbatches, static_cast<int64_t>(encoder.size()));
    const double largest = *std::max_element(encoder.begin(), encoder.end());
    if (largest == 0.0) return count;
    // The margin corrects rounding: six samples of 0.1 must not count as 5.999.. samples.
    const double fit = std::floor(sum(encoder) / largest * (1.0 + 1e-12));
    return fit < static_cast<double>(count) ? std::max<int64_t>(1, static_cast<int64_t>(fit)) : count;
}

DeferralCosts deferral_costs(const std::vector<std::vector<double>> &overloaded,
                             const std::vector<double> &underloaded) {
    DeferralCosts result;
    const size_t pairs = overloaded.size() * underloaded.size();
    result.cost.reserve(pairs);
    result.moved.reserve(pairs);
    if (underloaded.empty()) return result;
    std::vector<double> targets(underloaded.size());
    Poll poll;
    for (const std::vector<double> &costs : overloaded) {
        const double load = sum(costs);
        for (size_t j = 0; j < targets.size(); ++j) targets[j] = half_difference(load, underloaded[j]);
        const Transfers transfers(costs, targets, false);
        for (size_t j = 0; j < targets.size(); ++j) {
            poll();
            const double moved = transfers.moved(targets[j]);
            result.moved.push_back(moved);
            result.cost.push_back(std::max(load - moved, underloaded[j] + moved));
        }
    }
    return result;
}

namespace {

// Coarse samples before fine ones, each by falling encoder cost, to the lightest encoder microbatch.
std::vector<int32_t> stratified(const std::vector<double> &encoder, const std::vector<double> &llm, int64_t count) {
    const int64_t n = static_cast<int64_t>(encoder.size());
    const std::vector<int32_t> by_llm = descending_order(llm);
    std::vector<char> fine(n, 0);
    for (int64_t i = (n + 1) / 2; i < n; ++i) fine[by_llm[i]] = 1;
    const std::vector<int32_t> by_encoder = descending_order(encoder);
    std::vector<int32_t> microbatch_of(n);
    std::vector<double> encoder_loads(count, 0.0), llm_loads(count, 0.0);
    Poll poll;
    using Key = std::tuple<double, double, int32_t>;
    for (const char pass : {0, 1}) {
        for (const bool priced : {true, false}) {  // zero costs come last in each order anyway
            std::vector<Key> heap;
            for (int64_t m = 0; m < count; ++m)
                heap.emplace_back(priced ? encoder_loads[m] : 0.0, llm_loads[m], static_cast<int32_t>(m));
            std::make_heap(heap.begin(), heap.end(), std::greater<Key>());
            for (const int32_t sample : by_encoder) {
                poll();
                if (fine[sample] != pass || (encoder[sample] > 0.0) != priced) continue;
                std::pop_heap(heap.begin(), heap.end(), std::greater<Key>());
                const int32_t m = std::get<2>(heap.back());
                microbatch_of[sample] = m;
                encoder_loads[m] += encoder[sample];
                llm_loads[m] += llm[sample];
                heap.back() = {priced ? encoder_loads[m] : 0.0, llm_loads[m], m};
                std::push_heap(heap.begin(), heap.end(), std::greater<Key>());
            }
        }
    }
    return microbatch_of;
}

std::vector<double> loads_of(const std::vector<double> &costs, const std::vector<int32_t> &microbatch_of,
                             int64_t count) {
    std::vector<double> loads(count, 0.0);
    for (size_t sample = 0; sample < costs.size(); ++sample) loads[microbatch_of[sample]] += costs[sample];
    return loads;
}

// Lower bound of the heaviest microbatch for any pairing: the heavier of a pair has at least half the pair's sum.
double pairing_bound(std::vector<double> loads) {
    interruptible_sort(loads.begin(), loads.end(), std::greater<double>());
    double bound = 0.0;
    const size_t count = loads.size();
    // Every row above the bound needs a partner. The best choice pairs the heaviest with the lightest.
    for (size_t i = 0; i < count / 2; ++i) {
        const double paired = (loads[i] + loads[count - 1 - i]) / 2;
        bound = std::max(bound, std::min(loads[i], paired));
    }
    return bound;
}

// Pairwise deferral of the samples of given encoder microbatches, and the order of execution.
Deferral defer(const std::vector<double> &encoder, const std::vector<double> &llm,
               const std::vector<int32_t> &microbatch_of, int64_t count) {
    const int64_t n = static_cast<int64_t>(encoder.size());
    std::vector<std::vector<int32_t>> members(count);
    for (int64_t sample = 0; sample < n; ++sample)
        members[microbatch_of[sample]].push_back(static_cast<int32_t>(sample));
    const std::vector<double> llm_loads = loads_of(llm, microbatch_of, count);
    const std::vector<int32_t> order = descending_order(llm_loads);
    const int64_t over = (count + 1) / 2, under = count - over;
    std::vector<std::vector<double>> costs(over);
    std::vector<double> alone(over), loads(under);
    Poll poll;
    for (int64_t i = 0; i < over; ++i) {
        poll(1 + static_cast<int64_t>(members[order[i]].size()));
        for (const int32_t sample : members[order[i]]) costs[i].push_back(llm[sample]);
        alone[i] = llm_loads[order[i]];
    }
    for (int64_t j = 0; j < under; ++j) loads[j] = llm_loads[order[over + j]];
    const DeferralCosts pairs = deferral_costs(costs, loads);
    const BottleneckMatch match = bottleneck_match(pairs.cost, alone, under);

    // (ol_0, ul_0, ol_1, ul_1, ...): a deferred sample waits for one microbatch only. Overloaded microbatches that meet
    // the threshold alone are followed by the remaining ones. The last may have no follower.
    Deferral result;
    result.count = count;
    result.threshold = match.threshold;
    result.encoder_of.resize(n);
    result.llm_of.resize(n);
    std::vector<char> taken(under, 0);
    for (const int32_t partner : match.partner)
        if (partner >= 0) taken[partner] = 1;
    int64_t rest = 0;
    std::vector<int32_t> sequence;
    const auto place = [&](int32_t m) {
        for (const int32_t sample : members[m])
            result.encoder_of[sample] = result.llm_of[sample] = static_cast<int32_t>(sequence.size());
        sequence.push_back(m);
    };
    const auto place_overloaded = [&](int64_t i, int32_t partner) {
        place(order[i]);
        if (partner < 0) {
            while (rest < under && taken[rest]) ++rest;
            if (rest < under) place(order[over + rest++]);
            return;
        }
        place(order[over + partner]);
        const double target = half_difference(alone[i], loads[partner]);
        for (const int32_t item : Transfers(costs[i], {target}, true).items(target))
            result.llm_of[members[order[i]][item]] = static_cast<int32_t>(sequence.size()) - 1;
    };
    // With an odd count one has no follower: the lightest of those that stay alone, placed last.
    int64_t last = -1;
    for (int64_t i = over - 1; i >= 0 && over > under && last < 0; --i)
        if (match.partner[i] < 0) last = i;
    for (int64_t i = 0; i < over; ++i)
        if (i != last) place_overloaded(i, match.partner[i]);
    if (last >= 0) place_overloaded(last, -1);

    result.encoder_loads = loads_of(encoder, result.encoder_of, count);
    result.llm_loads = loads_of(llm, result.llm_of, count);
    return result;
}

}  // namespace

Deferral assign_microbatches(const std::vector<double> &encoder, const std::vector<double> &llm, int64_t count,
                             bool as_printed) {
    const std::vector<int32_t> printed = stratified(encoder, llm, count);
    if (as_printed) return defer(encoder, llm, printed, count);
    const auto heaviest = [](const std::vector<double> &loads) {
        return *std::max_element(loads.begin(), loads.end());
    };
    // Excess of the heavier bottleneck over an equal share.
    const double encoder_share = sum(encoder) / static_cast<double>(count);
    const double llm_share = sum(llm) / static_cast<double>(count);
    const auto overload = [&](const Deferral &plan) {
        return std::max(encoder_share > 0.0 ? heaviest(plan.encoder_loads) / encoder_share : 0.0,
                        llm_share > 0.0 ? heaviest(plan.llm_loads) / llm_share : 0.0);
    };
    // The lower the limit on the encoder's bottleneck, the less freedom for the LLM's.
    const int64_t n = static_cast<int64_t>(encoder.size());
    const double most = heaviest(loads_of(encoder, printed, count));
    const std::vector<int32_t> even = refine(encoder, descending_order(encoder), printed, count, n);
    const double least = heaviest(loads_of(encoder, even, count));
    const double least_printed = pairing_bound(loads_of(llm, printed, count));
    Deferral best, plain;
    for (const double cap : {least, least + (most - least) / 4, most}) {
        if (best.count > 0 && (least == most || overload(best) <= NEAR)) break;
        Deferral found = defer(encoder, llm, even_llm_loads(encoder, llm, even, count, cap), count);
        if (heaviest(found.llm_loads) > least_printed) {
            if (plain.count == 0) plain = defer(encoder, llm, printed, count);
            if (heaviest(found.llm_loads) > heaviest(plain.llm_loads)) continue;
        }
        if (best.count == 0 || overload(found) < overload(best)) best = std::move(found);
    }
    return best.count > 0 ? best : plain;
}

}  // namespace interlace
