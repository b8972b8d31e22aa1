// A list scheduler: simulates clocks and selects the step that each lane starts next, within limits.
#pragma once

#include <vector>

#include "schedule/generator/order.h"

namespace interlace {

// Limits on what lanes may start. An empty list is no limit.
struct Rules {
    std::vector<int32_t> in_flight;  // node -> max. forwards whose gradients it has not handed back
    std::vector<int32_t> kept;       // node -> max. forwards whose last use is still to come
    std::vector<double> bytes;       // job -> bytes that its forward holds until its last use
    std::vector<double> limit;       // rank -> max. bytes
    bool weights_first = false;      // a BACKWARD_WEIGHT precedes a FORWARD; otherwise it fills idle time
    bool by_place = false;           // of all ready steps of any kind, the first one in the order starts
};

// The order in which lanes start their steps. When all ranks of a lane are idle, it takes a ready backward (or input
// half), else a ready forward within the limits, else a BACKWARD_WEIGHT; of several, the first one in `order`. Every
// node takes its forwards, its backwards and its weight halves in that order.
//
// order: a sequence that respects every dependency. seconds: of every step.
//
// A forward that runs before other forwards of its ranks that are earlier in `order` leaves room for all of them. So it
// never gets stuck within limits that `order` itself respects. Proof: take the earliest remaining step in `order`; all
// its dependencies are done. Backwards and their halves may run at any time. A forward is the next one of its node. If
// nothing later holds memory of its ranks, they hold no more than at this place of `order` (except for pending weight
// halves, which may run now). If something later does, it has left room for this forward. Within tighter limits it may
// get stuck. Then the earliest step runs anyway, and the caller finds the limits exceeded.
std::vector<Step> play(const StepGraph &graph, const std::vector<Step> &order, const Rules &rules,
                       const std::vector<double> &seconds);

}  // namespace interlace
