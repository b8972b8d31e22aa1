#include "balance/bins/deal.h"

#include <numeric>
#include <utility>

#include "common/interrupt.h"

namespace interlace {

namespace {

uint64_t splitmix64(uint64_t &state) {
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// Uniform in 0..bound: draws beyond the largest multiple of bound are rejected.
uint64_t below(uint64_t &state, uint64_t bound) {
    const uint64_t reject = (UINT64_MAX % bound + 1) % bound;
    uint64_t draw;
    do draw = splitmix64(state);
    while (draw > UINT64_MAX - reject);
    return draw % bound;
}

}  // namespace

std::vector<int32_t> deal_ring(int64_t items, int64_t bins) {
    std::vector<int32_t> bin_of;
    bin_of.reserve(items);
    for (int64_t bin = 0; bin < bins && static_cast<int64_t>(bin_of.size()) < items; ++bin)
        bin_of.insert(bin_of.end(), items / bins + (bin < items % bins), static_cast<int32_t>(bin));
    return bin_of;
}

std::vector<int32_t> deal_random(int64_t items, int64_t bins, uint64_t seed) {
    std::vector<int32_t> shuffled(items);
    std::iota(shuffled.begin(), shuffled.end(), 0);
    Poll poll;
    for (int64_t i = items - 1; i > 0; --i) {
        poll();
        std::swap(shuffled[i], shuffled[below(seed, i + 1)]);
    }
    std::vector<int32_t> bin_of(items);
    for (int64_t i = 0; i < items; ++i) {
        poll();
        bin_of[shuffled[i]] = static_cast<int32_t>(i % bins);
    }
    return bin_of;
}

}  // namespace interlace
