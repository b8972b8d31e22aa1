#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/interrupt.h"
#include "simulate/replay.h"

namespace interlace {

// DistTrain algorithm 2 as printed: samples by rising cost, each to the group with the least so far. LPT uses falling
// cost. Kept as a baseline: reorder_samples must never be worse. capacity: most samples of a group.
std::vector<int32_t> assign_ascending(const std::vector<double> &costs, int64_t groups, int64_t capacity);

// Seconds of every microbatch on every stage, [microbatches, stages]; stage s runs on rank s % ranks, so that stages /
// ranks chunks of the model are interleaved (1: plain 1F1B).
struct PipelineCosts {
    int64_t microbatches, stages, ranks;
    const double *forward, *backward;
    double transfer;  // seconds of every message between ranks
};

// The (interleaved) 1F1B lists of Megatron-LM (arXiv 2104.04473, section 2.2) with their SENDs and RECVs. Computes
// their end time for a given order of microbatches. Interleaved: requires microbatches % ranks == 0.
class OneForwardOneBackward {
  public:
    explicit OneForwardOneBackward(const PipelineCosts &costs);

    // Seconds until the last rank finishes. If an order is shorter than the lists, the places after it cost nothing.
    double makespan(const std::vector<int32_t> &order);

    // Forward time that fits into the gaps of the first rank where the forwards of the next place will be, given the
    // order of the places before it (algorithm 3's interval; section 6.2 sums over the chunks). For place 1 it is the
    // gap before the first backward, which all places below `ranks` share.
    double interval(const std::vector<int32_t> &order);

  private:
    const PipelineCosts costs_;
    std::vector<int64_t> offsets_;
    std::vector<int8_t> op_;
    std::vector<int32_t> stage_, place_, peer_;  // place: in the order of microbatches
    std::vector<double> seconds_, finish_;
    std::vector<int32_t> first_rank_;  // the compute actions of rank 0
    std::unique_ptr<Replay> replay_;
    Poll poll_;

    void build();
    void make_replay();
    void price(const std::vector<int32_t> &order);
};

// DistTrain algorithm 3 as printed, but its loop ends with the last microbatch (the print runs ranks - 2 rounds more).
std::vector<int32_t> reorder_as_printed(const PipelineCosts &costs);

// Lower bound of the time of any order: the busiest rank with the cheapest path to it and from it; each microbatch
// alone.
double pipeline_bound(const PipelineCosts &costs);

struct Reordered {
    std::vector<int32_t> order;
    double seconds, printed_seconds, bound;
    int64_t evaluations;
};

// Candidates: the printed order, the given one, the rising and the falling one. Then all permutations if there are
// enough evaluations; otherwise an iterated local search from the best order, until the bound is reached or the
// evaluations are used up. Ties go to the earlier candidate.
Reordered reorder_microbatches(const PipelineCosts &costs, int64_t evaluations);

}  // namespace interlace
