// Makes the lists of ranks from a sequence of steps: adds messages, reductions and operations on shards.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/generator/order.h"

namespace interlace {

struct RankLists {
    std::vector<ActionRow> rows;  // of all ranks, one after the other
    std::vector<int64_t> first;   // where each rank's begins, and the end
};

// The lists of all ranks. Every rank of a lane has all actions of that lane.
//
// A SEND follows the action that produced its content, of a split backward the input half. A RECV comes right before
// the first action that needs it. Messages from one lane to another arrive in the order in which they were sent, so
// those sent earlier are received first even if they are needed later. That adds no waiting: a wait for a message is
// also a wait for those sent before it. Sends never block, so the lists are as free of deadlock as the sequence.
//
// REDUCE_GRAD starts a sum that is awaited at the end of the list. All ranks have these in one order, by the last
// backward (or weight half) of all members. Tied weights come after all others, since they are summed from the results
// of the others. On a rank each comes as early as that order allows: after the rank's own last action that adds to it.
//
// UNSHARD starts a gather of weights that is awaited by the first forward that uses them. All UNSHARDs come first, in
// the order of the shards, so that gathers overlap with the compute of the first modules. RESHARD follows the rank's
// last use of the weights, or the UNSHARDs if there is no use.
//
// DISPATCH, if used, begins every list: the items of the coming step then have all of this step for their transfer.
//
// UNSHARD_LAYERS replaces UNSHARD if the weights can be gathered layer by layer. All nodes of a shard must run equally
// many forwards and backwards in one order. The checker must also find no fault in lists whose ranks wait for each
// other there: an order of steps by virtual time does not guarantee it for all layouts. If it finds a fault, modules
// are tested one after the other, and those without a fault are kept. A single gather is always correct.
RankLists make_lists(const StepGraph &graph, const std::vector<Step> &order, bool reduce_grad, bool dispatch);

}  // namespace interlace
