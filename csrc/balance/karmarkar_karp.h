#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// The largest differencing method for any number of bins (Karmarkar and Karp 1982): every item is a partial solution of
// one filled and bins - 1 empty bins; the two partial solutions with the largest spreads are merged, the heaviest bin
// of one with the lightest of the other, until one is left. With `even`, it starts from solutions of `bins` consecutive
// items by falling weight instead (balanced differencing), so that the counts of two bins differ by at most one. Only
// filled bins are stored: O(n) memory, O(n bins log bins) time. order: descending_order(weights).
std::vector<int32_t> karmarkar_karp(const std::vector<double> &weights, const std::vector<int32_t> &order, int64_t bins,
                                    bool even);

}  // namespace interlace
