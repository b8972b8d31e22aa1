#include "plan/partition/partition.h"

#include <algorithm>

#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

namespace {

// Result of one greedy pass with a limit on the pieces' cost.
struct Probe {
    bool feasible;
    double costliest;   // feasible: cost of the costliest piece made, <= limit
    double next_limit;  // infeasible: the smallest limit that would change any of the cuts
};

class Row {
  public:
    Row(const std::vector<double> &costs, int64_t parts, int64_t most)
        : n_(static_cast<int64_t>(costs.size())), parts_(parts), most_(most), prefix_(costs.size() + 1, 0.0) {
        for (int64_t i = 0; i < n_; ++i) prefix_[i + 1] = prefix_[i] + costs[i];
    }

    double optimum() const {
        // `high` is feasible, nothing below `low` is. Rounded subtraction is monotone in both ends, so greedy pieces
        // are correct for any limit, and each probe moves one end onto a cost that some piece really has.
        double low = prefix_[n_] / static_cast<double>(parts_) * (1.0 - 1e-15);  // margin for the rounded differences
        for (int64_t i = 0; i < n_; ++i) low = std::max(low, cost(i, i + 1));
        double high = probe(prefix_[n_]).costliest;
        while (low < high) {
            double middle = low + (high - low) / 2;
            if (!(middle < high)) middle = low;  // adjacent doubles: their mean rounds to one of them
            const Probe result = probe(middle);
            if (result.feasible)
                high = result.costliest;
            else
                low = result.next_limit;
        }
        return high;
    }

    std::vector<int32_t> even_cuts(double limit) const {
        // earliest[r]: the earliest begin of the last r pieces.
        std::vector<int64_t> earliest(parts_ + 1, n_);
        for (int64_t r = 1; r <= parts_; ++r) {
            poll_();
            earliest[r] = nearest_start(earliest[r - 1], limit);
        }

        std::vector<int32_t> cuts{0};
        for (int64_t left = parts_ - 1, start = 0; left > 0; --left) {
            poll_();
            const int64_t low = std::max(start + 1, earliest[left]);
            const int64_t high = std::min(furthest_end(start, limit), n_ - left);
            const double share = prefix_[start] + cost(start, n_) / static_cast<double>(left + 1);
            int64_t end = std::lower_bound(prefix_.begin() + low, prefix_.begin() + high, share) - prefix_.begin();
            if (end > low && share - prefix_[end - 1] <= prefix_[end] - share) --end;
            cuts.push_back(static_cast<int32_t>(end));
            start = end;
        }
        cuts.push_back(static_cast<int32_t>(n_));
        return cuts;
    }

  private:
    double cost(int64_t start, int64_t end) const { return prefix_[end] - prefix_[start]; }

    int64_t furthest_end(int64_t start, double limit) const {
        const int64_t stop = std::min(n_, most_ < n_ - start ? start + most_ : n_);
        const auto fits = [&](double value) { return value - prefix_[start] <= limit; };
        return std::partition_point(prefix_.begin() + start, prefix_.begin() + stop + 1, fits) - prefix_.begin() - 1;
    }

    int64_t nearest_start(int64_t end, double limit) const {
        const int64_t stop = most_ < end ? end - most_ : 0;
        const auto too_costly = [&](double value) { return prefix_[end] - value > limit; };
        return std::partition_point(prefix_.begin() + stop, prefix_.begin() + end, too_costly) - prefix_.begin();
    }

    Probe probe(double limit) const {
        Probe result{false, 0.0, INF};
        for (int64_t part = 0, start = 0; part < parts_; ++part) {
            poll_();
            const int64_t end = furthest_end(start, limit);
            result.costliest = std::max(result.costliest, cost(start, end));
            if (end == n_) {
                result.feasible = true;
                return result;
            }
            if (end - start < most_) result.next_limit = std::min(result.next_limit, cost(start, end + 1));
            start = end;
        }
        return result;
    }

    int64_t n_, parts_, most_;
    std::vector<double> prefix_;
    mutable Poll poll_;
};

}  // namespace

std::vector<int32_t> min_bottleneck_partition(const std::vector<double> &costs, int64_t parts, int64_t most) {
    const Row row(costs, parts, most);
    return row.even_cuts(row.optimum());
}

}  // namespace interlace
