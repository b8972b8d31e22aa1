// Properties of the order of rows that the checker proves before it replays them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/checker/check.h"
#include "schedule/meetings.h"
#include "schedule/checker/read_rows.h"

namespace interlace {

// The lists, with the meaning of each row.
struct Lists {
    const StepGraph &graph;
    const std::vector<ActionRow> &rows;
    const std::vector<int64_t> &first;
    std::vector<Meaning> meanings;

    int32_t ranks() const { return graph.stages.ranks; }
};

// Each function returns the first fault that it finds.

// All ranks of a lane have its compute actions in one order.
std::optional<Fault> check_lanes(const Lists &lists);

// On every rank a sum begins after all actions that add to it, tied weights last.
std::optional<Fault> check_sums(const Lists &lists);

// Weights are used only while they are gathered, and released once.
std::optional<Fault> check_shards(const Lists &lists);

// All ranks of a shard gather it once, or all layer by layer. by_layer: filled, of each shard.
std::optional<Fault> check_ways(const Lists &lists, std::vector<char> &by_layer);

// The nodes of a meeting run equally many forwards and backwards in one order, so each gathers as often as the others.
std::optional<Fault> check_meetings(const Lists &lists, const Meetings &meetings);

// Some order of all reductions and gathers holds on every rank. Then every rank starts each of them before any rank
// must wait for it. Compute actions of meetings are included in that order, because they gather and sum.
std::optional<Fault> check_reduction_order(const Lists &lists, const Meetings &meetings);

}  // namespace interlace
