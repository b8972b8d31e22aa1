#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

struct Instantiation {
    std::vector<int32_t> counts;        // pipelines made from each template; empty if no combination is feasible
    std::vector<int64_t> microbatches;  // per pipeline, templates in order
    double time;                        // the slowest pipeline's
};

// The combination of pipeline templates with the best throughput (dissertation 2.4.2): all nodes are used, there are at
// least `pipelines` pipelines, each has a microbatch or more, and the slowest finishes as early as any combination
// allows. Where the paper lists all combinations, which are exponentially many, this searches the time t: template j
// can run floor(t / times[j]) microbatches, and an unbounded knapsack over nodes, of the templates that no smaller ones
// replace, says whether some combination runs them all. Only where that makes more pipelines than there are
// microbatches does a probe need the most that so many pipelines run, a power in the (max, +) algebra:
// O(nodes^2 log microbatches). About 15 to 40 probes.
//
// sizes: nodes per template, distinct; times: seconds per microbatch of its pipeline, positive.
Instantiation best_instantiation(const std::vector<int64_t> &sizes, const std::vector<double> &times, int64_t nodes,
                                 int64_t pipelines, int64_t microbatches);

}  // namespace interlace
