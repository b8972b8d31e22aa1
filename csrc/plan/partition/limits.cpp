#include "plan/partition/limits.h"

#include <algorithm>
#include <cmath>

#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

namespace {

struct Interval {
    int64_t low, high;
};

// Range maximum over a row, in O(1) after O(n log n).
class RangeMax {
  public:
    explicit RangeMax(const std::vector<double> &values) : levels_{values} {
        for (size_t width = 1; 2 * width <= values.size(); width *= 2) {
            const std::vector<double> &below = levels_.back();
            std::vector<double> level(values.size() - 2 * width + 1);
            for (size_t i = 0; i < level.size(); ++i) level[i] = std::max(below[i], below[i + width]);
            levels_.push_back(std::move(level));
        }
    }

    double operator()(int64_t low, int64_t high) const {  // both included
        size_t level = 0;
        while ((int64_t{2} << level) <= high - low + 1) ++level;
        return std::max(levels_[level][low], levels_[level][high + 1 - (int64_t{1} << level)]);
    }

  private:
    std::vector<std::vector<double>> levels_;
};

std::vector<double> prefix_sums(const std::vector<double> &values) {
    std::vector<double> sums(values.size() + 1, 0.0);
    for (size_t i = 0; i < values.size(); ++i) sums[i + 1] = sums[i] + values[i];
    return sums;
}

std::vector<double> differences(const std::vector<double> &sums) {
    std::vector<double> values(sums.size() - 1);
    for (size_t i = 0; i < values.size(); ++i) values[i] = sums[i + 1] - sums[i];
    return values;
}

class Row {
  public:
    Row(const std::vector<double> &costs, const std::vector<double> &memory, const std::vector<double> &limits,
        const std::vector<double> &speeds)
        : n_(static_cast<int64_t>(costs.size())), stages_(static_cast<int64_t>(speeds.size())),
          cost_(prefix_sums(costs)), memory_(prefix_sums(memory)), limits_(limits), speeds_(speeds),
          costliest_(differences(cost_)), largest_(differences(memory_)), ends_(stages_) {}

    std::vector<int32_t> solve() {
        if (!probe(INF)) return {};
        double high = bottleneck(cuts(INF)), speed = 0.0, fastest = 0.0;
        for (const double each : speeds_) speed += each, fastest = std::max(fastest, each);
        // Lower bound: an equal share, or the costliest layer on its fastest stage. The optimum is usually close to it.
        double low = std::max(cost_[n_] / speed * (1.0 - 1e-12), costliest_(0, n_ - 1) / fastest);
        if (1.25 * low < high && probe(1.25 * low)) high = bottleneck(cuts(1.25 * low));
        while (low < high) {
            double middle = low + (high - low) / 2;
            if (!(middle < high)) middle = low;
            if (probe(middle))
                high = bottleneck(cuts(middle));
            else
                low = next_;
        }
        probe(high);
        return cuts(high);
    }

  private:
    double cost(int64_t stage, int64_t start, int64_t end) const {
        return (cost_[end] - cost_[start]) / speeds_[stage];
    }

    bool fits(int64_t stage, int64_t start, int64_t end, double limit) const {
        return cost(stage, start, end) <= limit && memory_[end] - memory_[start] <= limits_[stage];
    }

    // The first layer in low .. high that exceeds the limits of the stage by itself, or high + 1.
    int64_t first_misfit(int64_t stage, int64_t low, int64_t high, double limit) const {
        const auto all_fit = [&](int64_t end) {
            return costliest_(low, end) / speeds_[stage] <= limit && largest_(low, end) <= limits_[stage];
        };
        if (all_fit(high)) return high + 1;
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (costliest_(low, middle) / speeds_[stage] <= limit && largest_(low, middle) <= limits_[stage])
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }

    int64_t furthest_end(int64_t stage, int64_t start, double limit) {
        // Searched without divisions, which may be off by a rounding error, and then corrected.
        const double bound = cost_[start] + limit * speeds_[stage];
        int64_t by_cost = std::upper_bound(cost_.begin() + start, cost_.end(), bound) - cost_.begin() - 1;
        by_cost = std::max(by_cost, start);
        for (; by_cost > start && cost(stage, start, by_cost) > limit; --by_cost) poll_();
        for (; by_cost < n_ && cost(stage, start, by_cost + 1) <= limit; ++by_cost) poll_();
        const auto small = [&](double sum) { return sum - memory_[start] <= limits_[stage]; };
        const int64_t by_memory =
            std::partition_point(memory_.begin() + start, memory_.begin() + by_cost + 1, small) - memory_.begin() - 1;
        if (by_memory == by_cost && by_cost < n_) next_ = std::min(next_, cost(stage, start, by_cost + 1));
        return by_memory;
    }

    // True if all layers can be placed. ends_[s]: possible ends of stage s. next_: the least limit that changes one.
    bool probe(double limit) {
        next_ = INF;
        std::vector<Interval> starts{{0, 0}};
        for (int64_t stage = 0; stage < stages_; ++stage) {
            std::vector<Interval> &ends = ends_[stage];
            ends.clear();
            const int64_t last = n_ - (stages_ - 1 - stage);  // later stages need one layer each
            for (const Interval &each : starts) {
                poll_();
                for (int64_t low = each.low; low <= std::min(each.high, last - 1);) {
                    poll_();
                    const int64_t stop = std::min(each.high, last - 1);
                    const int64_t misfit = first_misfit(stage, low, stop, limit);
                    if (misfit <= stop) {
                        const double alone = cost(stage, misfit, misfit + 1);
                        if (alone > limit) next_ = std::min(next_, alone);
                    }
                    if (misfit > low) {
                        const int64_t high = std::min(last, furthest_end(stage, misfit - 1, limit));
                        if (!ends.empty() && low + 1 <= ends.back().high + 1)
                            ends.back().high = std::max(ends.back().high, high);
                        else
                            ends.push_back({low + 1, high});
                    }
                    low = misfit + 1;
                }
            }
            if (ends.empty()) return false;
            starts = ends;
        }
        return ends_.back().back().high == n_;
    }

    // Cuts within the limit, from the last to the first, each nearest to an equal share of the remaining work.
    std::vector<int32_t> cuts(double limit) const {
        std::vector<double> speed = prefix_sums(speeds_);
        std::vector<int32_t> cuts(stages_ + 1, 0);
        cuts[stages_] = static_cast<int32_t>(n_);
        Poll poll;
        for (int64_t stage = stages_ - 1; stage > 0; --stage) {
            poll(1 + static_cast<int64_t>(ends_[stage - 1].size()));
            const int64_t end = cuts[stage + 1];
            int64_t low = 0, high = end - 1;  // the first start at which this stage fits
            while (low < high) {
                const int64_t middle = low + (high - low) / 2;
                if (fits(stage, middle, end, limit))
                    high = middle;
                else
                    low = middle + 1;
            }
            const double share = cost_[end] * (speed[stage] / speed[stage + 1]);
            int64_t wanted = std::lower_bound(cost_.begin() + low, cost_.begin() + end - 1, share) - cost_.begin();
            if (wanted > low && share - cost_[wanted - 1] <= cost_[wanted] - share) --wanted;
            int64_t best = -1;
            for (const Interval &each : ends_[stage - 1]) {
                const int64_t from = std::max(each.low, low), to = std::min(each.high, end - 1);
                if (from > to) continue;
                const int64_t nearest = std::clamp(wanted, from, to);
                if (best < 0 || std::abs(nearest - wanted) < std::abs(best - wanted)) best = nearest;
            }
            cuts[stage] = static_cast<int32_t>(best);
        }
        return cuts;
    }

    double bottleneck(const std::vector<int32_t> &cuts) const {
        double most = 0.0;
        for (int64_t stage = 0; stage < stages_; ++stage)
            most = std::max(most, cost(stage, cuts[stage], cuts[stage + 1]));
        return most;
    }

    int64_t n_, stages_;
    std::vector<double> cost_, memory_, limits_, speeds_;
    RangeMax costliest_, largest_;
    std::vector<std::vector<Interval>> ends_;
    double next_ = INF;
    Poll poll_;
};

}  // namespace

std::vector<int32_t> limited_partition(const std::vector<double> &costs, const std::vector<double> &memory,
                                       const std::vector<double> &limits, const std::vector<double> &speeds) {
    return Row(costs, memory, limits, speeds).solve();
}

}  // namespace interlace
