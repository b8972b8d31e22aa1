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

// Whole weights whose table stays affordable: their greatest common divisor is the unit, which is exact. Otherwise the
// unit is `resolution` or, where that is 0, total / buckets, and weights are rounded to the nearest multiple.
Units to_units(const std::vector<double> &weights, double resolution, int64_t buckets);

// Which sums 0 .. limit subsets of whole numbers can have: one bit per sum, so that an item costs limit / 64 steps.
class SubsetSums {
public:
    // traced: also remember, per sum, the first item that made it, which `items` needs.
    SubsetSums(const std::vector<int64_t> &counts, int64_t limit, bool traced);

    // The possible sum nearest to target, in multiples of unit (both of one measure). Ties: the smaller sum, or the
    // larger one with prefer_larger.
    int64_t nearest(double target, double unit, bool prefer_larger = false) const;

    // Items, rising, that have this possible sum. Items that count 0 are never among them.
    std::vector<int32_t> items(int64_t sum) const;

private:
    int64_t limit_;
    const std::vector<int64_t> &counts_;
    std::vector<uint64_t> bits_;
    std::vector<int32_t> first_;
};

// The items, rising, whose weights have the sum nearest to target; ties go to the smaller sum. Weights of zero are left
// out. Exact where to_units is; otherwise the rounded optimum, then improved by moving single items in or out while
// that helps. O(n min(total, 2 target, 2 (total - target)) / 64) steps in units.
std::vector<int32_t> subset_sum(const std::vector<double> &weights, double target, double resolution);

}  // namespace interlace
