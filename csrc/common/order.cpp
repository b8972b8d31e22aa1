#include "common/order.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

namespace {

struct Heavier {
    const std::vector<double> &weights;
    bool operator()(int32_t a, int32_t b) const { return weights[a] != weights[b] ? weights[a] > weights[b] : a < b; }
};

}  // namespace

std::vector<int32_t> descending_order(const std::vector<double> &weights) {
    const size_t n = weights.size();
    std::vector<int32_t> order(n);
    const Heavier heavier = {weights};
    if (n < 256) {
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), heavier);
        return order;
    }

    constexpr int PASSES = 3;
    constexpr std::array<int, PASSES> SHIFT = {32, 42, 52};  // 10 + 10 + 11 bits: the sign bit is never set
    constexpr std::array<int, PASSES> BUCKETS = {1024, 1024, 2048};
    std::vector<uint64_t> keys(n), moved(n);
    std::array<std::vector<uint32_t>, PASSES> starts;
    for (int pass = 0; pass < PASSES; ++pass) starts[pass].assign(BUCKETS[pass], 0);
    uint64_t lower = 0;
    check_interrupt();
    for (size_t i = 0; i < n; ++i) {
        const double weight = weights[i] + 0.0;  // -0.0 sorts as 0.0
        uint64_t bits;
        std::memcpy(&bits, &weight, sizeof bits);
        lower |= bits & UINT32_MAX;
        keys[i] = ((0x7FFFFFFFu - (bits >> 32)) << 32) | i;  // complement: the heaviest comes first
        for (int pass = 0; pass < PASSES; ++pass) ++starts[pass][(keys[i] >> SHIFT[pass]) & (BUCKETS[pass] - 1)];
    }
    for (int pass = 0; pass < PASSES; ++pass) {
        uint32_t *start = starts[pass].data();
        const uint64_t mask = BUCKETS[pass] - 1;
        if (start[(keys[0] >> SHIFT[pass]) & mask] == n) continue;  // all keys are in one bucket
        uint32_t sum = 0;
        for (int b = 0; b < BUCKETS[pass]; ++b) {
            const uint32_t count = start[b];
            start[b] = sum;
            sum += count;
        }
        check_interrupt();
        for (const uint64_t key : keys) moved[start[(key >> SHIFT[pass]) & mask]++] = key;
        keys.swap(moved);
    }
    for (size_t i = 0; i < n; ++i) order[i] = static_cast<int32_t>(keys[i] & UINT32_MAX);
    if (lower == 0) return order;

    Poll poll;
    for (size_t begin = 0, end; begin < n; begin = end) {
        poll();
        for (end = begin + 1; end < n && keys[end] >> 32 == keys[begin] >> 32;) ++end;
        if (end - begin > 1) interruptible_sort(order.begin() + begin, order.begin() + end, heavier);
    }
    return order;
}

bool is_descending(const std::vector<double> &weights, const std::vector<int32_t> &order) {
    return std::is_sorted(order.begin(), order.end(), Heavier{weights});
}

bool exactly_whole(const std::vector<double> &weights) {
    double total = 0.0;
    for (const double weight : weights) {
        if (weight != std::floor(weight)) return false;
        total += weight;
    }
    return total < EXACT_INTEGERS;
}

}  // namespace interlace
