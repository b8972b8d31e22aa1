#include "balance/bins/refine.h"

#include <algorithm>
#include <cmath>

#include "common/order.h"
#include "common/tournament.h"
#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr int PARTNERS = 8;

struct Item {
    double weight;
    int32_t id;
};

bool before(const Item &a, const Item &b) { return a.weight != b.weight ? a.weight > b.weight : a.id < b.id; }

using Items = std::vector<Item>;  // one group of one bin, by falling weight

// The exchange that shifts closest to half the difference of two loads; a negative position means no item.
struct Exchange {
    double miss = Tournament::OUT;  // |shift - half|
    double shift = 0.0;
    int64_t give = -1, take = -1, group = -1;
};

void consider(Exchange &best, double shift, double half, int64_t give, int64_t take, int64_t group) {
    const double miss = std::abs(shift - half);
    if (miss < best.miss) best = {miss, shift, give, take, group};
}

// One pass over both lists: the lighter the item given, the lighter the item taken.
void best_exchange(const Items &heavy, const Items &light, bool room, double half, int64_t group, Exchange &best) {
    const int64_t gives = static_cast<int64_t>(heavy.size()), takes = static_cast<int64_t>(light.size());
    for (int64_t give = 0, take = 0; give < gives; ++give) {
        const double weight = heavy[give].weight;
        while (take < takes && weight - light[take].weight < half) ++take;
        if (take > 0) consider(best, weight - light[take - 1].weight, half, give, take - 1, group);
        if (take < takes) consider(best, weight - light[take].weight, half, give, take, group);
        if (room) consider(best, weight, half, give, -1, group);
    }
}

void insert(Items &items, const Item &item) {
    items.insert(std::lower_bound(items.begin(), items.end(), item, before), item);
}

}  // namespace

double makespan(const std::vector<double> &weights, const std::vector<int32_t> &bin_of, int64_t bins) {
    std::vector<double> loads(bins, 0.0);
    for (size_t i = 0; i < weights.size(); ++i) loads[bin_of[i]] += weights[i];
    return *std::max_element(loads.begin(), loads.end());
}

std::vector<int32_t> refine(const std::vector<double> &weights, const std::vector<int32_t> &order,
                            std::vector<int32_t> bin_of, int64_t bins, int64_t capacity, int64_t groups) {
    if (weights.empty()) return bin_of;
    std::vector<double> loads(bins, 0.0);
    double total = 0.0;
    for (size_t i = 0; i < weights.size(); ++i) {
        loads[bin_of[i]] += weights[i];
        total += weights[i];
    }
    const double heaviest_before = *std::max_element(loads.begin(), loads.end());
    double bound = std::max(total / static_cast<double>(bins), weights[order[0]]);
    if (exactly_whole(weights)) bound = std::ceil(bound);
    const double enough = bound * GOOD_ENOUGH;
    if (heaviest_before <= enough) return bin_of;

    const int64_t row_length = static_cast<int64_t>(weights.size()) / groups;
    Poll poll;
    // Only a few bins are ever visited. All bins get a chain of their items, lightest first; visited bins get a list.
    std::vector<int32_t> last(bins, -1), previous(weights.size());
    for (const int32_t item : order) {
        poll();
        previous[item] = last[bin_of[item]];
        last[bin_of[item]] = item;
    }
    std::vector<Items> lists(bins * groups);
    std::vector<char> listed(bins, 0);
    const auto list = [&](int64_t bin) {
        if (listed[bin]) return;
        listed[bin] = 1;
        const auto begin = lists.begin() + bin * groups;
        for (int32_t item = last[bin]; item >= 0; item = previous[item])
            begin[groups == 1 ? 0 : item / row_length].push_back({weights[item], item});
        for (auto items = begin; items != begin + groups; ++items) std::reverse(items->begin(), items->end());
    };

    Tournament heaviest(bins, 0.0), lightest(bins, 0.0);
    for (int64_t bin = 0; bin < bins; ++bin) {
        poll();
        heaviest.set(bin, -loads[bin]);
        lightest.set(bin, loads[bin]);
    }

    std::vector<int32_t> refined = bin_of;
    for (int64_t step = 0; step < 8 * bins + 1000; ++step) {
        const int32_t from = heaviest.index();
        if (loads[from] <= enough) break;
        std::vector<int32_t> tried;
        bool improved = false;
        while (!improved && static_cast<int>(tried.size()) < PARTNERS) {
            const int32_t to = lightest.index();
            const double difference = loads[from] - loads[to];
            if (lightest.key() == Tournament::OUT || !(difference > 0)) break;
            Exchange best;
            list(from);
            list(to);
            for (int64_t group = 0; group < groups; ++group) {
                const Items &light = lists[to * groups + group];
                poll(static_cast<int64_t>(1 + light.size() + lists[from * groups + group].size()));
                const bool room = static_cast<int64_t>(light.size()) < capacity;
                best_exchange(lists[from * groups + group], light, room, difference / 2, group, best);
            }
            const double less = loads[from] - best.shift, more = loads[to] + best.shift;
            if (best.group >= 0 && std::max(less, more) < loads[from]) {
                Items &heavy = lists[from * groups + best.group], &light = lists[to * groups + best.group];
                const Item given = heavy[best.give];
                heavy.erase(heavy.begin() + best.give);
                if (best.take >= 0) {
                    const Item taken = light[best.take];
                    light.erase(light.begin() + best.take);
                    insert(heavy, taken);
                    refined[taken.id] = from;
                }
                insert(light, given);
                refined[given.id] = to;
                loads[from] = less;
                loads[to] = more;
                improved = true;
                for (const int32_t bin : {from, to}) {
                    heaviest.set(bin, -loads[bin]);
                    lightest.set(bin, loads[bin]);
                }
            } else {
                tried.push_back(to);
                lightest.set(to, Tournament::OUT);
            }
        }
        for (const int32_t bin : tried) lightest.set(bin, loads[bin]);
        if (!improved) break;
    }
    // Running sums and recomputed sums round differently: keep the input if that decides.
    double heaviest_after = 0.0;
    for (int64_t bin = 0; bin < bins; ++bin) {
        double load = listed[bin] ? 0.0 : loads[bin];
        for (int64_t at = bin * groups; at < (bin + 1) * groups; ++at)
            for (const Item &item : lists[at]) load += item.weight;
        heaviest_after = std::max(heaviest_after, load);
    }
    return heaviest_after < heaviest_before ? refined : bin_of;
}

}  // namespace interlace
