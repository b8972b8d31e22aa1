#include "balance/bins/lower_bound.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

double assignment_lower_bound(std::vector<double> weights, int64_t bins, int64_t capacity) {
    const int64_t n = static_cast<int64_t>(weights.size());
    interruptible_sort(weights.begin(), weights.end(), std::greater<double>());

    std::vector<double> prefix(n + 1, 0.0);
    for (int64_t i = 0; i < n; ++i) prefix[i + 1] = prefix[i] + weights[i];
    double bound = prefix[n] / static_cast<double>(bins);
    const bool whole = prefix[n] < EXACT_INTEGERS &&
                       std::all_of(weights.begin(), weights.end(), [](double w) { return w == std::floor(w); });
    if (whole) bound = std::ceil(bound);

    const int64_t least = std::max<int64_t>(0, n - capacity * (bins - 1));
    for (int64_t h = 0; h * bins < n; ++h) {
        const int64_t top = h * bins + 1;
        const double held = prefix[top] - prefix[top - h - 1];
        const int64_t others = std::clamp<int64_t>(least - h - 1, 0, n - top);
        bound = std::max(bound, held + (prefix[n] - prefix[n - others]));
    }
    return bound;
}

}  // namespace interlace
