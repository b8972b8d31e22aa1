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
// can run floor(t / times[j]) microbatches, and an unbounded knapsack over nodes says whether some combination runs
// them all. About 25 knapsacks of O(nodes * templates that no smaller ones replace * pipelines).
//
// sizes: nodes per template, distinct; times: seconds per microbatch of its pipeline, positive.
// pipelines <= microbatches.
Instantiation best_instantiation(const std::vector<int64_t> &sizes, const std::vector<double> &times, int64_t nodes,
                                 int64_t pipelines, int64_t microbatches);

// Entries of the knapsack's table where at most `most` pipelines fit the nodes.
int64_t instantiation_states(int64_t nodes, int64_t most, int64_t pipelines, int64_t microbatches);

}  // namespace interlace
