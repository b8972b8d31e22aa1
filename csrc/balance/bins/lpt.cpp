#include "balance/bins/lpt.h"

#include "common/tournament.h"
#include "common/interrupt.h"

namespace interlace {

std::vector<int32_t> lpt(const std::vector<double> &weights, const std::vector<int32_t> &order, int64_t bins,
                         int64_t capacity) {
    Tournament lightest(bins, 0.0);
    std::vector<int32_t> items(bins, 0);
    std::vector<int32_t> bin_of(weights.size());
    Poll poll;
    for (const int32_t item : order) {
        poll();
        const int32_t bin = lightest.index();
        bin_of[item] = bin;
        lightest.set(bin, ++items[bin] == capacity ? Tournament::OUT : lightest.key() + weights[item]);
    }
    return bin_of;
}

std::vector<int32_t> grouped_lpt(const std::vector<double> &weights, const std::vector<int32_t> &order, int64_t bins,
                                 int64_t capacity, int64_t groups) {
    const int64_t row_length = static_cast<int64_t>(weights.size()) / groups;
    std::vector<double> loads(bins, 0.0);
    std::vector<int32_t> items(groups * bins, 0);
    std::vector<int32_t> bin_of(weights.size());
    Poll poll;
    for (const int32_t item : order) {
        poll(bins);
        int32_t *held = items.data() + item / row_length * bins;
        int64_t best = -1;
        for (int64_t bin = 0; bin < bins; ++bin)
            if (held[bin] < capacity && (best < 0 || loads[bin] < loads[best])) best = bin;
        bin_of[item] = static_cast<int32_t>(best);
        ++held[best];
        loads[best] += weights[item];
    }
    return bin_of;
}

}  // namespace interlace
