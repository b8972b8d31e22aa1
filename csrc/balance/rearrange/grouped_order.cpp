#include "balance/rearrange/grouped_order.h"

#include <numeric>

#include "common/interrupt.h"

namespace interlace {

namespace {

std::vector<int32_t> stable_by(const std::vector<int32_t> &key, const std::vector<int32_t> &order, int64_t keys) {
    std::vector<int64_t> start(keys + 1, 0);
    Poll poll;
    for (const int32_t value : key) {
        poll();
        ++start[value + 1];
    }
    std::partial_sum(start.begin(), start.end(), start.begin());
    std::vector<int32_t> sorted(order.size());
    for (const int32_t item : order) {
        poll();
        sorted[start[key[item]]++] = item;
    }
    return sorted;
}

}  // namespace

std::vector<int32_t> grouped_order(const std::vector<int32_t> &first, const std::vector<int32_t> &second,
                                   int64_t keys) {
    std::vector<int32_t> order(first.size());
    std::iota(order.begin(), order.end(), 0);
    return stable_by(first, stable_by(second, order, keys), keys);
}

}  // namespace interlace
