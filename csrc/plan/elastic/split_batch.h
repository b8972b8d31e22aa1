#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Number of microbatches of each pipeline: at least 1 each, `microbatches` in total; pipeline i takes times[i] > 0 per
// microbatch. Both functions need 1 <= pipelines <= microbatches. Ties go to the pipeline with the lower index.

// Minimizes the time of the slowest pipeline (then of the second slowest, and so on). The counts equal those of a
// greedy method that gives each microbatch to the pipeline that would finish it first. O(60 n + n log n).
std::vector<int64_t> split_min_max(const std::vector<double> &times, int64_t microbatches);

// The dissertation's eq. 2.6: least sum of squared differences from the mean pipeline time, exactly. For a fixed centre
// mu instead of the mean the problem is separable and convex, so a greedy method solves it. The minimum over mu is the
// minimum of eq. 2.6. The relaxation to real counts gives a starting mu and limits its distance from the best one. A
// walk over the exchanges between these ends visits every candidate. If times differ by many orders of magnitude, there
// are very many exchanges, and their sums are inaccurate: a ratio of at most 1e6 is assumed.
std::vector<int64_t> split_least_variance(const std::vector<double> &times, int64_t microbatches);

// Largest m with m * time <= limit in double precision, at most `most`.
int64_t microbatches_within(double limit, double time, int64_t most);

}  // namespace interlace
