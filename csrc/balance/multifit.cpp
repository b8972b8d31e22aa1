#include "balance/multifit.h"

#include <algorithm>

#include "balance/lpt.h"
#include "balance/refine.h"
#include "balance/tournament.h"
#include "common/interrupt.h"

namespace interlace {

namespace {

// The lowest bin that an item fits, by the least load of each half of the bins.
class FirstFit {
  public:
    explicit FirstFit(int64_t bins) {
        while (leaves_ < bins) leaves_ *= 2;
        least_.assign(2 * leaves_, Tournament::OUT);
        std::fill_n(least_.begin() + leaves_, bins, 0.0);
        for (int64_t node = leaves_ - 1; node >= 1; --node)
            least_[node] = std::min(least_[2 * node], least_[2 * node + 1]);
    }

    int64_t find(double weight, double limit) const {
        if (!(least_[1] + weight <= limit)) return -1;
        int64_t node = 1;
        while (node < leaves_) node = 2 * node + !(least_[2 * node] + weight <= limit);
        return node - leaves_;
    }

    double load(int64_t bin) const { return least_[leaves_ + bin]; }

    void set(int64_t bin, double load) {
        int64_t node = leaves_ + bin;
        least_[node] = load;
        for (node /= 2; node >= 1; node /= 2) least_[node] = std::min(least_[2 * node], least_[2 * node + 1]);
    }

  private:
    int64_t leaves_ = 1;
    std::vector<double> least_;
};

}  // namespace

std::vector<int32_t> multifit(const std::vector<double> &weights, const std::vector<int32_t> &order, int64_t bins,
                              int64_t capacity) {
    std::vector<int32_t> best = lpt(weights, order, bins, capacity);
    double high = makespan(weights, best, bins);
    double total = 0.0;
    for (const double weight : weights) total += weight;
    double low = std::max(total / static_cast<double>(bins), weights[order[0]]);

    std::vector<int32_t> trial(weights.size());
    std::vector<int64_t> items(bins);
    const FirstFit empty(bins);
    double limit = low;
    Poll poll;
    for (int probe = 0; probe < 40 && low < high * (1 - 1e-9); ++probe) {
        FirstFit fit = empty;
        std::fill(items.begin(), items.end(), 0);
        bool packed = true;
        for (const int32_t item : order) {
            poll();
            const int64_t bin = fit.find(weights[item], limit);
            packed = bin >= 0;
            if (!packed) break;
            trial[item] = static_cast<int32_t>(bin);
            fit.set(bin, ++items[bin] == capacity ? Tournament::OUT : fit.load(bin) + weights[item]);
        }
        const double reached = packed ? makespan(weights, trial, bins) : high;
        if (packed && reached < high) {
            best = trial;
            high = reached;
        }
        if (packed)
            high = std::min(high, limit);
        else
            low = limit;
        if (packed && limit <= low) break;
        limit = low + (high - low) / 2;
    }
    return best;
}

}  // namespace interlace
