#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Evens out the second of two loads of microbatches. The microbatch with the heaviest LLM load moves one sample to one
// of the lightest, or exchanges one. It takes the choice that brings their LLM loads closest while no encoder load
// rises above `most_encoder`. Microbatches without such a choice are unchanged. The heaviest LLM load never rises. An
// exchange looks up the best partner of each sample. Work is limited to some milliseconds in total (a count, so that
// every rank gets the same result).
std::vector<int32_t> even_llm_loads(const std::vector<double> &encoder, const std::vector<double> &llm,
                                    std::vector<int32_t> microbatch_of, int64_t count, double most_encoder);

}  // namespace interlace
