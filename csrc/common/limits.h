// Numeric limits.
#pragma once

#include <limits>

namespace interlace {

constexpr double INF = std::numeric_limits<double>::infinity();
constexpr double EXACT_INTEGERS = 9007199254740992.0;  // 2^53: sums of integers below it are exact

}  // namespace interlace
