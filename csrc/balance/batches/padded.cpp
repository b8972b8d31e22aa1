#include "balance/batches/padded.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

namespace {

// Items by rising padded cost.
struct Rising {
    std::vector<double> padded;
    std::vector<double> own_before;  // prefix sums

    int64_t size() const { return static_cast<int64_t>(padded.size()); }
    double cost(int64_t begin, int64_t end) const {
        return batch_cost(own_before[end] - own_before[begin], end - begin, padded[end - 1]);
    }
};

struct Probe {
    bool fits;
    double reached;  // costliest run
    double next;     // the lowest limit above the probed one for which a run would be longer
    std::vector<int64_t> cuts;
};

// The longest runs under the limit, with items sorted by rising cost.
Probe runs_within(const Rising &rising, int64_t bins, double limit) {
    const int64_t n = rising.size();
    Probe probe = {false, 0.0, INF, {0}};
    int64_t begin = 0;
    Poll poll;
    for (int64_t bin = 0; bin < bins && begin < n; ++bin) {
        poll();
        int64_t good = begin, bad = n + 1;  // cost(begin, good) <= limit < cost(begin, bad)
        for (int64_t step = 1; begin + step <= n; step *= 2) {
            if (rising.cost(begin, begin + step) > limit) {
                bad = begin + step;
                break;
            }
            good = begin + step;
        }
        while (bad - good > 1) {
            const int64_t middle = good + (bad - good) / 2;
            (middle <= n && rising.cost(begin, middle) <= limit ? good : bad) = middle;
        }
        if (good < n) probe.next = std::min(probe.next, rising.cost(begin, good + 1));
        if (good == begin) return probe;  // a single item costs too much
        probe.reached = std::max(probe.reached, rising.cost(begin, good));
        probe.cuts.push_back(good);
        begin = good;
    }
    probe.fits = begin == n;
    return probe;
}

}  // namespace

double batch_cost(double own, int64_t members, double padded) { return own + static_cast<double>(members) * padded; }

std::vector<int32_t> padded_batches(const std::vector<double> &own, const std::vector<double> &padded,
                                    const std::vector<int32_t> &order, int64_t bins) {
    const int64_t n = static_cast<int64_t>(padded.size());
    Rising rising = {std::vector<double>(n), std::vector<double>(n + 1, 0.0)};
    double total = 0.0;
    Poll poll;
    for (int64_t i = 0; i < n; ++i) {
        poll();
        const int32_t item = order[n - 1 - i];
        rising.padded[i] = padded[item];
        rising.own_before[i + 1] = rising.own_before[i] + own[item];
        total += own[item] + padded[item];
    }
    // Equal counts reach `high`; nothing goes below `low`, which a failed probe raises to the next value that changes
    // it.
    double low = std::max(rising.padded.back(), total / static_cast<double>(bins)) * (1 - 1e-12);
    const int64_t each = (n + bins - 1) / bins;
    double equal_counts = 0.0;
    for (int64_t begin = 0; begin < n; begin += each)
        equal_counts = std::max(equal_counts, rising.cost(begin, std::min(n, begin + each)));
    Probe best = runs_within(rising, bins, equal_counts);
    double high = best.reached;
    for (double limit = low; low < high; limit = low + (high - low) / 2) {
        if (limit >= high) limit = low;  // adjacent doubles
        Probe probe = runs_within(rising, bins, limit);
        if (probe.fits) {
            best = std::move(probe);
            if (limit <= low) break;
            high = best.reached;
        } else {
            low = probe.next;
            if (low >= high) break;
        }
    }

    // Halving a run never raises its cost. So the costliest runs are halved to fill empty bins.
    using Run = std::pair<double, std::pair<int64_t, int64_t>>;  // cost, (-begin, -end): ties to the first run
    std::priority_queue<Run> queue;
    std::vector<std::pair<int64_t, int64_t>> runs;
    const auto enqueue = [&](int64_t begin, int64_t end) {
        if (end - begin > 1)
            queue.push({rising.cost(begin, end), {-begin, -end}});
        else
            runs.push_back({begin, end});
    };
    for (size_t i = 0; i + 1 < best.cuts.size(); ++i) enqueue(best.cuts[i], best.cuts[i + 1]);
    while (!queue.empty() && static_cast<int64_t>(queue.size() + runs.size()) < bins) {
        poll();
        const auto [begin, end] = queue.top().second;
        queue.pop();
        const int64_t middle = -begin + (end - begin) / -2;
        enqueue(-begin, middle);
        enqueue(middle, -end);
    }
    for (; !queue.empty(); queue.pop()) {
        poll();
        runs.push_back({-queue.top().second.first, -queue.top().second.second});
    }
    interruptible_sort(runs.begin(), runs.end(), std::less<>());

    std::vector<int32_t> bin_of(n);
    for (size_t bin = 0; bin < runs.size(); ++bin)
        for (int64_t i = runs[bin].first; i < runs[bin].second; ++i) {
            poll();
            bin_of[order[n - 1 - i]] = static_cast<int32_t>(bin);
        }
    return bin_of;
}

}  // namespace interlace
