#include "balance/packed.h"

#include <algorithm>
#include <utility>

#include "balance/lpt.h"
#include "balance/order.h"
#include "balance/refine.h"

namespace interlace {

std::vector<int32_t> packed_batches(const std::vector<double> &lengths, const std::vector<double> &attention,
                                    int64_t bins) {
    const int64_t n = static_cast<int64_t>(lengths.size());
    const std::vector<int32_t> order = descending_order(lengths);
    if (std::all_of(attention.begin(), attention.end(), [](double work) { return work == 0; }))
        return refine(lengths, order, lpt(lengths, order, bins, n), bins, n);

    std::vector<double> costs(n);
    for (int64_t i = 0; i < n; ++i) costs[i] = lengths[i] + attention[i];
    const std::vector<int32_t> by_cost = descending_order(costs);  // as `order`, but for ties that rounding makes
    std::vector<int32_t> best;
    double least = 0.0;
    const std::vector<double> *const keys[] = {&costs, &lengths, &attention};
    for (const std::vector<double> *key : keys) {
        std::vector<int32_t> candidate = refine(costs, by_cost, lpt(*key, order, bins, n), bins, n);
        const double reached = makespan(costs, candidate, bins);
        if (best.empty() || reached < least) {
            best = std::move(candidate);
            least = reached;
        }
    }
    return best;
}

}  // namespace interlace
