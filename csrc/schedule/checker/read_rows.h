// Assigns each row of the lists to its job, message, reduction or shard.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/checker/check.h"

namespace interlace {

// id: job, message, or place in StageArrays::reduction_ranks.items, or in shard_ranks.items; of a DISPATCH its rank.
// place: of the rank in its lane.
struct Meaning {
    int32_t id, place;
};

// Checks that each rank has everything that concerns it exactly once: every active reduction and shard, every message
// between lanes, every job (a BACKWARD in one piece or in two); with `dispatch` a DISPATCH on each rank. Returns the
// first fault, if any. Otherwise meanings holds one entry per row.
std::optional<Fault> read_rows(const StepGraph &graph, const std::vector<ActionRow> &rows,
                               const std::vector<int64_t> &first, bool reduce_grad, bool dispatch,
                               std::vector<Meaning> &meanings);

}  // namespace interlace
