// What the checker proves of the order of rows before it replays them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/check.h"
#include "schedule/meetings.h"
#include "schedule/read_rows.h"

namespace interlace {

// The lists, with what each row is.
struct Lists {
    const StepGraph &graph;
    const std::vector<ActionRow> &rows;
    const std::vector<int64_t> &first;
    std::vector<Meaning> meanings;

    int32_t ranks() const { return graph.stages.ranks; }
};

// Each gives the first fault that it finds.

// All ranks of a lane have its compute actions in one order.
std::optional<Fault> check_lanes(const Lists &lists);

// On every rank a sum begins when all that adds to it is over, tied weights last.
std::optional<Fault> check_sums(const Lists &lists);

// Weights are used while they are whole, and given up once.
std::optional<Fault> check_shards(const Lists &lists);

// All ranks of a shard gather it once, or all layer by layer. by_layer: filled, of each shard.
std::optional<Fault> check_ways(const Lists &lists, std::vector<char> &by_layer);

// The nodes of a meeting run equally many forwards and backwards in one order: each gathers as often as the others.
std::optional<Fault> check_meetings(const Lists &lists, const Meetings &meetings);

// Some order of all reductions and gathers holds on every rank: then each is begun by all its ranks before anybody has
// to wait for it. What meetings compute has its place in that order too, because it gathers and sums.
std::optional<Fault> check_reduction_order(const Lists &lists, const Meetings &meetings);

}  // namespace interlace
