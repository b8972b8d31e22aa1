// From a sequence of steps to the lists of ranks: adds messages, reductions and what is sharded.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/order.h"

namespace interlace {

struct RankLists {
    std::vector<ActionRow> rows;  // of all ranks, one after the other
    std::vector<int64_t> first;   // where each rank's begins, and the end
};

// The lists of all ranks. Every rank of a lane has all actions of that lane.
//
// A SEND follows right after what produced its content, of a split backward the input half. A RECV stands right before
// the first action that needs it. Messages from one lane to another arrive in the order in which they were sent, so
// those sent earlier are received first even if they are needed later. That adds no waiting: who waits for a message
// also waits for those sent before it. Sends never block, so the lists are as free of deadlock as the sequence.
//
// REDUCE_GRAD starts a sum that is awaited at the end of the list. All ranks have these in one order, by the last
// backward, or weight half, of all members, tied weights after all others (they are summed from what the others leave).
// On a rank each stands as early as that order allows: after the rank's own last one that adds to it.
//
// UNSHARD starts a gather of weights that is awaited by the first forward that uses them. All stand before everything
// else, in the order of the shards: the gathers travel while modules that come first compute. RESHARD follows the
// rank's last use of them, or the UNSHARDs where it has none.
//
// DISPATCH, where there is one, begins every list: the items of the coming step have all of this one to travel.
//
// UNSHARD_LAYERS stands in its place where the weights can be gathered layer by layer: where all nodes of a shard run
// equally many forwards and backwards in one order, and the checker finds nothing against lists whose ranks wait for
// each other there. That it asks: no order of the steps by virtual time says it of all layouts. If it does, modules are
// tried one after the other, and those stay that it finds nothing against. To gather once is always right.
RankLists make_lists(const StepGraph &graph, const std::vector<Step> &order, bool reduce_grad, bool dispatch);

}  // namespace interlace
