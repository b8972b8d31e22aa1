#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

struct Instantiation {
    std::vector<int32_t> counts;        // pipelines made from each template; empty if no combination is feasible
    std::vector<int64_t> microbatches;  // per pipeline, templates in order
    double time;                        // of the slowest pipeline
};

// The combination of pipeline templates with the best throughput (dissertation 2.4.2). It uses all nodes and has at
// least `pipelines` pipelines, each with a microbatch or more. The slowest pipeline finishes as early as any
// combination allows. The paper lists all combinations, which are exponentially many. This searches the time t instead:
// template j can run floor(t / times[j]) microbatches. An unbounded knapsack over nodes, of the templates that no
// smaller ones can replace, tells if some combination runs them all. If that gives more pipelines than microbatches, a
// probe also needs the maximum for a limited number of pipelines, a power in the (max, +) algebra: O(nodes^2 log
// microbatches). About 15 to 40 probes.
//
// sizes: nodes per template, distinct; times: seconds per microbatch of its pipeline, positive.
Instantiation best_instantiation(const std::vector<int64_t> &sizes, const std::vector<double> &times, int64_t nodes,
                                 int64_t pipelines, int64_t microbatches);

}  // namespace interlace
