#include "balance/batches/packed.h"

#include <algorithm>
#include <utility>

#include "balance/bins/lpt.h"
#include "common/order.h"
#include "balance/bins/refine.h"

namespace interlace {

std::vector<int32_t> packed_batches(const std::vector<double> &lengths, const std::vector<double> &attention,
                                    int64_t bins) {
    const int64_t n = static_cast<int64_t>(lengths.size());
    const std::vector<int32_t> order = descending_order(lengths);
    if (std::all_of(attention.begin(), attention.end(), [](double work) { return work == 0; }))
        return refine(lengths, order, lpt(lengths, order, bins, n), bins, n);

    std::vector<double> costs(n);
    for (int64_t i = 0; i < n; ++i) costs[i] = lengths[i] + attention[i];
    // Like `order`, except for ties due to rounding and for items of several sequences each.
    const std::vector<int32_t> by_cost = is_descending(costs, order) ? order : descending_order(costs);
    std::vector<int32_t> best = refine(costs, by_cost, lpt(costs, order, bins, n), bins, n);
    double least = makespan(costs, best, bins);
    double total = 0.0;
    for (const double cost : costs) total += cost;
    const double bound = std::max(total / static_cast<double>(bins), costs[by_cost[0]]);
    if (least <= bound) return best;
    // Close to the bound, refinement is useless, but the printed algorithm must not be better by the rest.
    const bool near = least <= bound * GOOD_ENOUGH;
    for (const std::vector<double> *key : {&lengths, &attention}) {
        std::vector<int32_t> candidate = lpt(*key, order, bins, n);
        if (!near) candidate = refine(costs, by_cost, std::move(candidate), bins, n);
        const double reached = makespan(costs, candidate, bins);
        if (reached < least) {
            best = std::move(candidate);
            least = reached;
        }
    }
    return best;
}

}  // namespace interlace
