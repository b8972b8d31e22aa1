#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Entrain 4.3: samples by falling encoder cost (ties: lower index), each to the replica with the least LLM cost so far
// (ties: lower index). equal_counts: every replica takes n / replicas samples, n % replicas of them one more.
// O(n log n + n log replicas).
std::vector<int32_t> assign_replicas(const std::vector<double> &encoder, const std::vector<double> &llm,
                                     int64_t replicas, bool equal_counts);

struct Deferral {
    int64_t count = 0;                  // K_eff
    std::vector<int32_t> encoder_of;    // per sample: microbatch, in the order of execution
    std::vector<int32_t> llm_of;        // per sample: the same or the next microbatch
    std::vector<double> encoder_loads;  // per microbatch
    std::vector<double> llm_loads;
    double threshold = 0.0;  // of the bottleneck matching: the heaviest LLM microbatch
};

// min(microbatches, floor(sum / max)) of the encoder costs, at least 1 and at most the number of samples.
int64_t effective_microbatches(const std::vector<double> &encoder, int64_t microbatches);

// Entrain algorithm 4, lines 3 to 16, for the samples of one replica and `count` microbatches. Three points are left
// open or wrong in the printed algorithm:
// - S_c is the half of the samples with the larger LLM cost.
// - Samples without encoder cost (text alone) would all go to the same lightest encoder microbatch. Here they go to the
//   one with the least LLM cost. Ties in encoder load are resolved by LLM load, then by index.
// - With an odd number of microbatches the middle one counts as overloaded, so it may stay alone. As an underloaded one
//   it could be left without a partner while above the threshold.
// Unless as_printed, samples are exchanged between lines 6 and 7: `refine` lowers the encoder's bottleneck, then
// `even_llm_loads` the LLM's below one of three limits on the encoder's. Results that are worse than the printed one in
// either bottleneck are discarded. Of the others, the one whose worse bottleneck is nearest to an equal share is taken.
Deferral assign_microbatches(const std::vector<double> &encoder, const std::vector<double> &llm, int64_t count,
                             bool as_printed);

struct DeferralCosts {
    std::vector<double> cost;   // [overloaded, underloaded]: the heavier of both after the transfer (equation 4.3)
    std::vector<double> moved;  // [overloaded, underloaded]: transferred LLM cost
};

// For every pair of an overloaded microbatch (its samples' LLM costs) and an underloaded one (its load): the subset
// whose transfer is closest to half the difference. One table of subset sums per overloaded microbatch is used for all
// its partners.
DeferralCosts deferral_costs(const std::vector<std::vector<double>> &overloaded,
                             const std::vector<double> &underloaded);

}  // namespace interlace
