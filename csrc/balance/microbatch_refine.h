#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Evens out the second of two loads of microbatches: the one with the heaviest LLM load gives one sample to one of the
// lightest, or exchanges it for one, whichever brings their LLM loads closest while no encoder load rises above
// `most_encoder`; one that nobody can relieve is left as it is. The heaviest LLM load never rises. Work is bounded:
// an exchange looks up the best partner of each sample, until that has taken some milliseconds in all (counted, so that
// every rank finds the same).
std::vector<int32_t> even_llm_loads(const std::vector<double> &encoder, const std::vector<double> &llm,
                                    std::vector<int32_t> microbatch_of, int64_t count, double most_encoder);

}  // namespace interlace
