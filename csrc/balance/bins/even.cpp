#include "balance/bins/even.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include "balance/bins/refine.h"
#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr int MOST_MOVED = 3;
// Maximum number of sets formed for one bin. Larger bins exchange fewer items at once, but have more to choose from.
constexpr int64_t MOST_SETS = 64;
constexpr int64_t MOST_STEPS = 1'000'000;  // sets that are tested in total: some milliseconds

struct Set {
    double weight;
    std::array<int32_t, MOST_MOVED> items;  // positions in the bin
};

// The sets of 0, 1, 2 and 3 items of one bin, each by rising weight.
using Sets = std::array<std::vector<Set>, MOST_MOVED + 1>;

class Evening {
  public:
    Evening(const std::vector<double> &weights, const std::vector<int32_t> &bin_of, int64_t bins, int64_t capacity)
        : weights_(weights), capacity_(capacity), members_(bins), loads_(bins, 0.0), sets_(bins), stale_(bins, 1),
          changed_(bins, 0) {
        for (size_t i = 0; i < weights.size(); ++i) {
            poll_();
            members_[bin_of[i]].push_back(static_cast<int32_t>(i));
        }
        for (int64_t bin = 0; bin < bins; ++bin) weigh(bin);
    }

    void run() {
        const int64_t bins = static_cast<int64_t>(loads_.size());
        const double mean = std::accumulate(loads_.begin(), loads_.end(), 0.0) / static_cast<double>(bins);
        const double near = mean * (GOOD_ENOUGH - 1);
        std::vector<int32_t> order(bins);
        std::iota(order.begin(), order.end(), 0);
        for (bool improved = true; improved && steps_ < MOST_STEPS;) {
            improved = false;
            ++sweep_;
            interruptible_sort(order.begin(), order.end(), [this](int32_t a, int32_t b) {
                return loads_[a] != loads_[b] ? loads_[a] > loads_[b] : a < b;
            });
            for (int64_t i = 0; i < bins && steps_ < MOST_STEPS; ++i) {
                for (int64_t j = bins - 1; j > i && steps_ < MOST_STEPS; --j) {
                    poll_();
                    ++steps_;
                    const int32_t a = order[i], b = order[j];
                    // Tested in the last sweep or later, and both unchanged since.
                    if (std::max(changed_[a], changed_[b]) + 1 < sweep_) continue;
                    if (std::abs(loads_[a] - loads_[b]) <= near) continue;
                    if (!(loads_[a] > loads_[b] ? exchange(a, b) : exchange(b, a))) continue;
                    improved = true;
                    break;  // its difference is smaller now: other pairs come first
                }
            }
        }
    }

    std::vector<int32_t> bin_of() const {
        std::vector<int32_t> result(weights_.size());
        for (size_t bin = 0; bin < members_.size(); ++bin)
            for (const int32_t item : members_[bin]) result[item] = static_cast<int32_t>(bin);
        return result;
    }

  private:
    // Recomputed, so that rounding errors do not accumulate.
    void weigh(int64_t bin) {
        poll_(static_cast<int64_t>(members_[bin].size()));
        interruptible_sort(members_[bin].begin(), members_[bin].end(), std::less<>());
        loads_[bin] = 0.0;
        for (const int32_t item : members_[bin]) loads_[bin] += weights_[item];
        stale_[bin] = 1;
    }

    const Sets &sets(int64_t bin) {
        if (!stale_[bin]) return sets_[bin];
        stale_[bin] = 0;
        Sets &made = sets_[bin];
        const int32_t n = static_cast<int32_t>(members_[bin].size());
        const auto weight = [&](int32_t place) { return weights_[members_[bin][place]]; };
        for (auto &each : made) each.clear();
        made[0].push_back({0.0, {-1, -1, -1}});
        const int64_t pairs = int64_t{n} * (n - 1) / 2;
        const bool few = pairs <= MOST_SETS && pairs * (n - 2) / 3 <= MOST_SETS;  // triples of millions would overflow
        for (int32_t i = 0; i < n; ++i) {
            poll_();
            made[1].push_back({weight(i), {i, -1, -1}});
            if (pairs > MOST_SETS) continue;
            for (int32_t j = i + 1; j < n; ++j) {
                made[2].push_back({weight(i) + weight(j), {i, j, -1}});
                if (!few) continue;
                for (int32_t k = j + 1; k < n; ++k) made[3].push_back({weight(i) + weight(j) + weight(k), {i, j, k}});
            }
        }
        for (auto &each : made) {
            steps_ += static_cast<int64_t>(each.size());
            interruptible_sort(each.begin(), each.end(), [](const Set &a, const Set &b) {
                return a.weight != b.weight ? a.weight < b.weight : a.items < b.items;
            });
        }
        return made;
    }

    // Applies the exchange that shifts closest to half the difference, if it brings the loads closer.
    bool exchange(int32_t heavy, int32_t light) {
        const double difference = loads_[heavy] - loads_[light], half = difference / 2;
        const Sets &gives = sets(heavy), &takes = sets(light);
        const int64_t room = capacity_ - static_cast<int64_t>(members_[light].size());
        const int64_t back = capacity_ - static_cast<int64_t>(members_[heavy].size());
        double miss = half;
        const Set *give = nullptr, *take = nullptr;
        for (int g = 0; g <= MOST_MOVED; ++g) {
            for (int t = 0; t <= MOST_MOVED; ++t) {
                if (g - t > room || t - g > back) continue;
                // One pass over both lists: the heavier the set given, the heavier the set taken.
                const std::vector<Set> &from = gives[g], &into = takes[t];
                size_t at = 0;
                for (const Set &each : from) {
                    while (at < into.size() && each.weight - into[at].weight > half) ++at;
                    for (const size_t near : {at - 1, at}) {  // -1 wraps round
                        if (near >= into.size()) continue;
                        const double off = std::abs(each.weight - into[near].weight - half);
                        if (off < miss) {
                            miss = off;
                            give = &each;
                            take = &into[near];
                        }
                    }
                }
                steps_ += static_cast<int64_t>(from.size() + at);
                poll_(static_cast<int64_t>(from.size() + at));
            }
        }
        // Shifts below the rounding error of the sums are ignored.
        if (give == nullptr || !(half - miss > 1e-12 * loads_[heavy])) return false;
        std::vector<int32_t> kept_heavy, kept_light;
        split(heavy, *give, kept_heavy, kept_light);
        split(light, *take, kept_light, kept_heavy);
        members_[heavy] = std::move(kept_heavy);
        members_[light] = std::move(kept_light);
        weigh(heavy);
        weigh(light);
        changed_[heavy] = changed_[light] = sweep_;
        return true;
    }

    void split(int32_t bin, const Set &set, std::vector<int32_t> &kept, std::vector<int32_t> &moved) const {
        for (size_t place = 0; place < members_[bin].size(); ++place) {
            const bool goes =
                std::find(set.items.begin(), set.items.end(), static_cast<int32_t>(place)) != set.items.end();
            (goes ? moved : kept).push_back(members_[bin][place]);
        }
    }

    const std::vector<double> &weights_;
    const int64_t capacity_;
    std::vector<std::vector<int32_t>> members_;  // of each bin, ascending
    std::vector<double> loads_;
    std::vector<Sets> sets_;
    std::vector<char> stale_;
    std::vector<int32_t> changed_;  // the last sweep that changed the bin
    int32_t sweep_ = 0;
    int64_t steps_ = 0;
    Poll poll_;
};

}  // namespace

std::vector<int32_t> even_loads(const std::vector<double> &weights, std::vector<int32_t> bin_of, int64_t bins,
                                int64_t capacity) {
    if (weights.empty() || bins < 2) return bin_of;
    Evening evening(weights, bin_of, bins, capacity);
    evening.run();
    return evening.bin_of();
}

}  // namespace interlace
