#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Batches that are packed outside attention and padded within it (ConvTransformer; OrchMLLM appendix A): a batch of b
// members costs sum(length) + b * max(attention). The best of OrchMLLM's Algorithm 5 (with no more batches than bins),
// its Algorithm 1 refined, LPT on length + attention, and contiguous runs of the sorted items; then moves and exchanges
// between the costliest and the cheapest bins while they help. Never worse than Algorithm 5 or 1 as printed.
std::vector<int32_t> convolution_batches(const std::vector<double> &lengths, const std::vector<double> &attention,
                                         int64_t bins);

}  // namespace interlace
