// A list scheduler: which step each lane starts next, on clocks, within limits.
#pragma once

#include <vector>

#include "schedule/order.h"

namespace interlace {

// What lanes may start. An empty list limits nothing.
struct Rules {
    std::vector<int32_t> in_flight;  // node -> forwards whose gradients it has not handed back
    std::vector<int32_t> kept;       // node -> forwards whose last use is still to come
    std::vector<double> bytes;       // job -> what its forward holds until its last use
    std::vector<double> limit;       // rank -> what it may hold
    bool weights_first = false;      // a BACKWARD_WEIGHT goes before a FORWARD; else it fills what would be idle
    bool by_place = false;           // of whatever is ready the one that stands first in the order, of any kind
};

// The order in which lanes start their steps if each takes, whenever all of its ranks are idle, a backward (or its
// input half) that is ready, else a forward that is ready and within the limits, else a BACKWARD_WEIGHT; of several the
// one that stands first in `order`. Every node takes its forwards, its backwards and its weight halves in that order.
//
// order: a sequence that respects every dependency. seconds: of every step.
//
// A forward that runs before others of its ranks that `order` has earlier leaves room for all of them. So within limits
// that `order` itself keeps to it never gets stuck: of the steps left take the earliest in `order`; all that it needs
// is done. Backwards and their halves may run at any time. A forward is the next of its node. If nothing later holds
// memory of its ranks, they hold no more than at this place of `order` (less, what is held for weight halves alone,
// which may run now); and if something does, it has left room for this one. Within tighter limits it may get stuck:
// then the earliest step runs all the same, and whoever asked finds the limits broken.
std::vector<Step> play(const StepGraph &graph, const std::vector<Step> &order, const Rules &rules,
                       const std::vector<double> &seconds);

}  // namespace interlace
