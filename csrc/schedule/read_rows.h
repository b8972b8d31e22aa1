// Which job, message, reduction or shard each row of the lists is.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/check.h"

namespace interlace {

// id: job, message, or place in StageArrays::reduction_ranks.items, or in shard_ranks.items; of a DISPATCH its rank.
// place: of the rank in its lane.
struct Meaning {
    int32_t id, place;
};

// Every reduction and shard that is active, every message that travels, every job: exactly once on each rank that it
// concerns, a BACKWARD in one piece or in two; with `dispatch` a DISPATCH on each rank. Otherwise the first fault; else
// meanings holds one entry per row.
std::optional<Fault> read_rows(const StepGraph &graph, const std::vector<ActionRow> &rows,
                               const std::vector<int64_t> &first, bool reduce_grad, bool dispatch,
                               std::vector<Meaning> &meanings);

}  // namespace interlace
