#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Brings two loads of replicas closer to each other by exchanging samples one for one, so counts are unchanged. Two
// replicas make the exchange that minimizes the sum of squared distances in both loads, each relative to its mean.
// Pairs are visited by their distance in the LLM load, largest first. The sum over all replicas never rises. Work is
// limited by a count, so that every rank gets the same result.
std::vector<int32_t> even_replicas(const std::vector<double> &encoder, const std::vector<double> &llm,
                                   std::vector<int32_t> replica_of, int64_t replicas);

}  // namespace interlace
