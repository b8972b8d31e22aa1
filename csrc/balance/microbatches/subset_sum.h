#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Weights as whole multiples of a unit.
struct Units {
    std::vector<int64_t> counts;  // per weight
    int64_t total = 0;
    double unit = 1.0;
    bool exact = true;  // counts * unit are the weights
};

// Integer weights whose table stays small enough. If their greatest common divisor works as unit, the result is exact.
// Otherwise the unit is `resolution` (if 0: total / buckets), and weights are rounded to the nearest multiple.
Units to_units(const std::vector<double> &weights, double resolution, int64_t buckets);

// Possible sums 0 .. limit of subsets of whole numbers: one bit per sum, so that an item costs limit / 64 steps. Items
// are added by rising size (ties: lower index), so that early ones touch few sums.
class SubsetSums {
  public:
    // traced: keep the data that `items` needs. wanted: the `ideal` sums of all targets that will be requested. The
    // work ends when more items cannot bring any of them closer, often after a few.
    SubsetSums(const std::vector<int64_t> &counts, int64_t limit, bool traced, std::vector<int64_t> wanted);

    // The possible sum nearest to target, in multiples of unit (both of one measure). Ties: the smaller sum, or the
    // larger one with prefer_larger.
    int64_t nearest(double target, double unit, bool prefer_larger = false) const;

    // The sum closest to target that could be possible at all.
    static int64_t ideal(double target, double unit, int64_t limit, bool prefer_larger = false);

    // Items, by rising index, with this possible sum. Items that count 0 are never included.
    std::vector<int32_t> items(int64_t sum) const;

  private:
    using Bits = std::vector<uint64_t>;

    int64_t limit_;
    const std::vector<int64_t> &counts_;
    Bits bits_;
    std::vector<int32_t> used_;  // the added items, in this order
    int64_t stride_ = 0;         // items between two snapshots
    Bits snapshots_;             // the bits before item 0, stride, 2 stride, ... of used_

    // Adds an item. reach: the largest sum that may be possible afterwards.
    static void add(uint64_t *bits, int64_t count, int64_t reach);
};

// The items, by rising index, whose weights have the sum nearest to target; ties go to the smaller sum. Weights of zero
// are excluded. Exact if to_units is exact. Otherwise the rounded optimum, then improved by moving single items in or
// out while that helps. O(n min(total, 2 target, 2 (total - target)) / 64) steps in units.
std::vector<int32_t> subset_sum(const std::vector<double> &weights, double target, double resolution);

}  // namespace interlace
