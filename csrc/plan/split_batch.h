#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// How many microbatches each pipeline gets: at least 1 each, `microbatches` in all; pipeline i takes times[i] > 0 per
// microbatch. Both need 1 <= pipelines <= microbatches. Ties go to the pipeline with the lower index.

// The slowest pipeline is as fast as possible (and then the second slowest, and so on: counts are those of a greedy
// that gives each microbatch to the pipeline that would finish it first). O(60 n + n log n).
std::vector<int64_t> split_min_max(const std::vector<double> &times, int64_t microbatches);

// The dissertation's eq. 2.6: least sum of squared differences from the mean pipeline time, exactly. For a fixed centre
// mu instead of the mean the problem is separable and convex, so a greedy solves it, and the minimum over mu is the
// minimum of eq. 2.6. The relaxation to real counts gives a mu to start from and bounds how far from it the best one
// can lie, and a walk over the exchanges between these ends visits every candidate. The exchanges are many, and their
// sums say little, where times differ by many orders of magnitude: at most 1e6 is assumed.
std::vector<int64_t> split_least_variance(const std::vector<double> &times, int64_t microbatches);

// Largest m with m * time <= limit in double precision, at most `most`.
int64_t microbatches_within(double limit, double time, int64_t most);

}  // namespace interlace
