#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// MULTIFIT (Coffman, Garey and Johnson 1978): bisection for the least limit under which first fit by falling weight
// packs all items into the bins. Starts from LPT's answer and never returns a worse one; without a cap the heaviest bin
// is also at most 13/11 of the optimum (Yue 1990), up to the bisection's last step of 1e-9. O(n log bins) for each of
// up to 40 probes. order: descending_order(weights); capacity: most items a bin may take.
std::vector<int32_t> multifit(const std::vector<double> &weights, const std::vector<int32_t> &order, int64_t bins,
                              int64_t capacity);

}  // namespace interlace
