#include "plan/elastic/split_batch.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <utility>

#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

namespace {

// Adds or removes units one by one until the counts sum to `total`: adds the cheapest next unit, removes the dearest
// last one. price(i, m) is the price of the m-th unit of pipeline i, and grows with m. No count falls below 1.
void settle(std::vector<int64_t> &counts, int64_t total, const std::function<double(size_t, int64_t)> &price) {
    int64_t sum = 0;
    for (const int64_t count : counts) sum += count;
    using Entry = std::pair<double, size_t>;
    Poll poll;
    if (sum < total) {
        std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> next;
        for (size_t i = 0; i < counts.size(); ++i) next.push({price(i, counts[i] + 1), i});
        for (; sum < total; ++sum) {
            poll();
            const size_t i = next.top().second;
            next.pop();
            ++counts[i];
            next.push({price(i, counts[i] + 1), i});
        }
    } else if (sum > total) {
        std::priority_queue<Entry> last;
        for (size_t i = 0; i < counts.size(); ++i)
            if (counts[i] > 1) last.push({price(i, counts[i]), i});
        for (; sum > total; --sum) {
            poll();
            const size_t i = last.top().second;
            last.pop();
            --counts[i];
            if (counts[i] > 1) last.push({price(i, counts[i]), i});
        }
    }
}

// The largest x for which the sum of counts, `count(x)`, which grows with x, stays below `total`. Exact to the last
// bit, since every missing unit is then a step of `settle`.
double level(double low, double high, int64_t total, const std::function<int64_t(double)> &count) {
    while (true) {
        check_interrupt();
        const double middle = low + (high - low) / 2;
        if (!(middle > low && middle < high)) break;
        (count(middle) < total ? low : high) = middle;
    }
    return low;
}

class LeastVariance {
  public:
    LeastVariance(const std::vector<double> &times, int64_t total) : times_(times), total_(total) {}

    std::vector<int64_t> solve() {
        counts_ = around(relaxed_mean());
        double centre = keep();
        const double margin = centre * 1e-12, stop = last_within(centre, 2 * centre) + margin;
        centre = std::max(0.0, last_within(centre, 0.0) - margin);
        counts_ = around(centre);
        Poll poll;
        for (keep(); exchange(centre, stop);) {
            poll(8 * static_cast<int64_t>(times_.size()));
            keep();
        }
        return best_counts_;
    }

  private:
    // Change of sum (N_i T_i - mu)^2 by the m-th unit of pipeline i.
    double price(size_t i, int64_t m, double mu) const {
        return times_[i] * (times_[i] * static_cast<double>(2 * m - 1) - 2.0 * mu);
    }

    // An optimum of sum (N_i T_i - mu)^2.
    std::vector<int64_t> around(double mu) const {
        // Units with price <= p: m <= ((p / T + 2 mu) / T + 1) / 2.
        const auto units = [&](size_t i, double p) {
            const double m = ((p / times_[i] + 2.0 * mu) / times_[i] + 1.0) / 2.0;
            return static_cast<int64_t>(std::clamp(std::floor(m), 1.0, static_cast<double>(total_)));
        };
        const auto count = [&](double p) {
            int64_t sum = 0;
            for (size_t i = 0; i < times_.size(); ++i) sum += units(i, p);
            return sum;
        };
        double low = 0.0, high = 0.0;
        for (size_t i = 0; i < times_.size(); ++i) {
            low = std::min(low, price(i, 1, mu));
            high = std::max(high, price(i, total_ + 1, mu));
        }
        const double p = level(low, high, total_, count);
        std::vector<int64_t> counts(times_.size());
        for (size_t i = 0; i < times_.size(); ++i) counts[i] = units(i, p);
        settle(counts, total_, [&](size_t i, int64_t m) { return price(i, m, mu); });
        return counts;
    }

    // Stores the counts if they are the best so far. Returns their mean time.
    double keep() {
        double mean = 0.0, sum = 0.0;
        for (size_t i = 0; i < times_.size(); ++i) mean += static_cast<double>(counts_[i]) * times_[i];
        mean /= static_cast<double>(times_.size());
        for (size_t i = 0; i < times_.size(); ++i) {
            const double off = static_cast<double>(counts_[i]) * times_[i] - mean;
            sum += off * off;
        }
        if (sum < best_) {
            best_ = sum;
            best_counts_ = counts_;
        }
        return mean;
    }

    struct Relaxed {
        double squares, mean;
    };

    // The least sum (N_i T_i - mu)^2 over real N_i >= 1 that sum to the total, and their mean time. By convexity
    // N_i = max(1, (mu + lambda / T_i) / T_i) for one lambda. Newton's method finds it from above: the sum of counts is
    // convex in lambda, and linear for a fixed set of N_i that are 1. That set only grows, except for rounding.
    Relaxed relaxed(double mu) const {
        check_interrupt();
        double lambda = INF;
        for (size_t least = 0; true;) {
            double sum = static_cast<double>(total_), slope = 0.0;
            size_t now = 0;
            for (const double time : times_) {
                if (lambda < time * (time - mu)) {
                    ++now;
                    sum -= 1.0;
                } else {
                    slope += 1.0 / (time * time);
                    sum -= mu / time;
                }
            }
            if (now < least || now == times_.size()) break;
            least = now + 1;
            lambda = sum / slope;
        }
        Relaxed found{0.0, 0.0};
        for (const double time : times_) {
            const double off = lambda < time * (time - mu) ? time - mu : lambda / time;
            found.squares += off * off;
            found.mean += off;
        }
        found.mean = mu + found.mean / static_cast<double>(times_.size());
        return found;
    }

    // The minimum of relaxed(mu): it is convex in mu, and its slope has the sign of mu - mean. It is the mu of equal
    // times, unless some of these would be less than one unit.
    double relaxed_mean() const {
        double speed = 0.0;
        for (const double time : times_) speed += 1.0 / time;
        const double even = static_cast<double>(total_) / speed;
        double low = even, high = even;
        while (relaxed(high).mean > high * (1 + 1e-12)) low = high, high *= 2;
        for (int step = 0; step < 60 && low < high; ++step) {
            const double middle = low + (high - low) / 2;
            (relaxed(middle).mean > middle ? low : high) = middle;
        }
        return low;
    }

    // Upper end of the possible means of counts as good as the best, starting at the mean of such counts and possibly
    // beyond `end`. Counts with mean mu cannot be better than relaxed(mu).
    double last_within(double from, double end) const {
        const double limit = best_ * (1 + 1e-10);
        while (end > from && relaxed(end).squares <= limit) end *= 2;
        for (int step = 0; step < 60; ++step) {
            const double middle = from + (end - from) / 2;
            (relaxed(middle).squares <= limit ? from : end) = middle;
        }
        return end;
    }

    // Moves one unit where the optimum next changes as mu grows from `centre`, unless that is after `stop`. A unit
    // moves to a pipeline with a longer time, so the walk ends. The gap is the dearest last unit minus the cheapest
    // next unit. It is a maximum of lines in mu: from the right, the zero of the steepest line found leads to its first
    // zero.
    bool exchange(double &centre, double stop) {
        double right = stop;
        size_t giver = 0, taker = 0;
        bool found = false;
        while (true) {
            double dearest = -INF, cheapest = INF;
            size_t from = 0, to = 0;
            for (size_t i = 0; i < times_.size(); ++i) {
                const double last = counts_[i] > 1 ? price(i, counts_[i], right) : -INF;
                const double next = price(i, counts_[i] + 1, right);
                if (last > dearest) dearest = last, from = i;
                if (next < cheapest) cheapest = next, to = i;
            }
            if (!(dearest > cheapest) || !(times_[to] > times_[from])) break;
            const double a = times_[to], b = times_[from];
            const double cross = (a * a * static_cast<double>(2 * counts_[to] + 1) -
                                  b * b * static_cast<double>(2 * counts_[from] - 1)) /
                                 (2.0 * (a - b));
            giver = from;
            taker = to;
            found = true;
            if (!(cross < right)) break;
            right = cross;
            if (right <= centre) break;
        }
        if (!found) return false;
        centre = std::max(centre, right);
        --counts_[giver];
        ++counts_[taker];
        return true;
    }

    const std::vector<double> &times_;
    int64_t total_;
    double best_ = INF;
    std::vector<int64_t> counts_, best_counts_;
};

}  // namespace

int64_t microbatches_within(double limit, double time, int64_t most) {
    int64_t m = static_cast<int64_t>(std::min(std::floor(limit / time), static_cast<double>(most)));
    while (m > 0 && static_cast<double>(m) * time > limit) --m;
    while (m < most && static_cast<double>(m + 1) * time <= limit) ++m;
    return m;
}

std::vector<int64_t> split_min_max(const std::vector<double> &times, int64_t microbatches) {
    const auto counts_at = [&](double limit) {
        std::vector<int64_t> counts(times.size());
        for (size_t i = 0; i < times.size(); ++i)
            counts[i] = std::max<int64_t>(1, microbatches_within(limit, times[i], microbatches));
        return counts;
    };
    const auto count = [&](double limit) {
        int64_t sum = 0;
        for (const int64_t each : counts_at(limit)) sum += each;
        return sum;
    };
    const double high = *std::max_element(times.begin(), times.end()) * static_cast<double>(microbatches);
    std::vector<int64_t> counts = counts_at(level(0.0, high, microbatches, count));
    settle(counts, microbatches, [&](size_t i, int64_t m) { return static_cast<double>(m) * times[i]; });
    return counts;
}

std::vector<int64_t> split_least_variance(const std::vector<double> &times, int64_t microbatches) {
    int exponent = 0;  // squares of times near 1 do not overflow, and powers of two change no comparison
    std::frexp(*std::max_element(times.begin(), times.end()), &exponent);
    std::vector<double> scaled;
    for (const double time : times) scaled.push_back(std::ldexp(time, -exponent));
    return LeastVariance(scaled, microbatches).solve();
}

}  // namespace interlace
