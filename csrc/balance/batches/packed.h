#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Packed batches that cost the sum of length + attention over their members; attention grows with the square of the
// length. The best of three greedy assignments: every item, by falling length, to the bin with the lowest true cost,
// the lowest length, or the lowest attention. All are refined on the true cost, the last two only if the first is not
// close to the lower bound. These two are what OrchMLLM's Algorithm 4 does with tolerance 0 or unlimited. In between,
// its comparison is not transitive, so its result is undefined. O(n log n).
std::vector<int32_t> packed_batches(const std::vector<double> &lengths, const std::vector<double> &attention,
                                    int64_t bins);

}  // namespace interlace
