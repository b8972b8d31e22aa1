#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Brings two loads of replicas closer to each other by exchanging samples, one for one, so that counts stay: any two
// replicas make the exchange after which the squares of their distances in both loads, each in parts of its mean, add
// up to least. Pairs go by their distance in the LLM load, those that differ most first. That sum over all replicas
// never rises. Work is bounded by a count, so that every rank finds the same.
std::vector<int32_t> even_replicas(const std::vector<double> &encoder, const std::vector<double> &llm,
                                   std::vector<int32_t> replica_of, int64_t replicas);

}  // namespace interlace
