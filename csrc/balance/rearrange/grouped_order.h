#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Items grouped by two keys: sorted by (first, second, item number), by two counting sorts. Keys are in 0 .. keys - 1.
// O(n + keys).
std::vector<int32_t> grouped_order(const std::vector<int32_t> &first, const std::vector<int32_t> &second, int64_t keys);

}  // namespace interlace
