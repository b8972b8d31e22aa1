#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Packed batches that cost the sum of length + attention over their members, attention growing with the square of the
// length. The best of three greedy assignments: every item, by falling length, to the bin that is lightest by true
// cost, by length alone, or by attention alone; refined on the true cost, the last two only where the first has not
// come near the lower bound. These two are what OrchMLLM's Algorithm 4 does where its tolerance is 0 or unlimited. In
// between its comparison is not transitive, so that what it does is undefined. O(n log n).
std::vector<int32_t> packed_batches(const std::vector<double> &lengths, const std::vector<double> &attention,
                                    int64_t bins);

}  // namespace interlace
