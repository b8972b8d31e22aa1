#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Batches that are packed outside attention and padded within it (ConvTransformer; OrchMLLM appendix A). A batch of b
// members costs sum(length) + b * max(attention). The start is the best of OrchMLLM's Algorithm 5 (limited to the
// number of bins), its Algorithm 1 refined, LPT on length + attention, and contiguous runs of the sorted items. Then
// the costliest and the cheapest bins move and exchange items while that helps. Never worse than Algorithm 5 or 1 as
// printed.
std::vector<int32_t> convolution_batches(const std::vector<double> &lengths, const std::vector<double> &attention,
                                         int64_t bins);

}  // namespace interlace
