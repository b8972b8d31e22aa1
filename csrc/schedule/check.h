// Proves that lists can run: complete, in order, free of deadlock, within memory.
//
// The checker knows nothing of how the lists were made. It takes from the StepGraph what has to happen, compares, and
// replays the lists the way the executor runs them: a compute action waits for all ranks of its lane; sends never
// block; a receive takes the oldest message from its peer lane, and waits until all of its ranks have sent it; a
// REDUCE_GRAD starts a sum and goes on; an UNSHARD starts a gather and goes on, and what computes with its weights, or
// gives them up, waits until all of its ranks have started it; a DISPATCH starts what every rank has one of, and goes
// on: nothing of the same step waits for it. Where weights are gathered layer by layer, a compute
// action waits for all ranks of the lanes that share them: see Meetings.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/step_graph.h"

namespace interlace {

enum class FaultKind {
    TIMES,            // `row` stands there `count` times
    BESIDES,          // `row` is a part of the BACKWARD `other`, which stands there too
    LACKS,            // no `row`
    HALF,             // no `row`, the other half of `other`
    EXTRA,            // nothing needs `row`
    LANE_ORDER,       // `row` stands where rank `other_rank` of the lane has `other`
    AFTER_REDUCTION,  // `row` adds to what `other` has summed
    AFTER_TIED,       // `row` after `other`, which is of a tied weight
    REDUCTION_ORDER,  // `row` before `other`: no order of all reductions and gathers holds on every rank
    TWO_WAYS,         // `row` where rank `other_rank` has `other`, which gathers the same weights in another way
    MEETING_ORDER,    // rank `other_rank`, which gathers with it layer by layer, has not `row` there but `other`
    MESSAGE_ORDER,    // `row` receives what is not the oldest message, `other`
    SEND_FORWARD,     // `row` before the forward that makes it
    SEND_BACKWARD,    // `row` before the backward `other` that makes it
    NO_FORWARD,       // `row` before its forward
    NO_INPUT_HALF,    // `row` before its BACKWARD_INPUT
    NO_OUTPUT,        // `row` before it has what the forward `other` makes
    NO_GRADIENT,      // `row` before it has what the backward `other` makes
    NO_UNSHARD,       // `row` before `other`, which makes the weights whole that it uses or gives up
    AFTER_RESHARD,    // `row` after `other`, which has given up weights that it uses
    DEADLOCK,         // see `stuck`
    MEMORY,           // `row` holds `bytes` of `count` forwards
};

struct Stuck {
    int32_t rank, waits_for;  // a rank
};

struct Fault {
    FaultKind kind;
    int32_t rank;
    ActionRow row;
    ActionRow other{};
    int32_t other_rank = -1;
    int64_t count = 0;
    double bytes = 0.0;
    std::vector<Stuck> stuck{};
    std::vector<int64_t> at{};  // of a deadlock: how far each rank got in its list
};

struct CheckResult {
    std::optional<Fault> fault;
    std::vector<int32_t> peak_in_flight;  // per rank, forwards whose backward is still to come
    std::vector<double> peak_bytes;
};

// rows: of all ranks, one after the other; first: where each rank's begins. dispatch: whether every rank has a
// DISPATCH, or none. activation_bytes: of every job, or empty. memory_limit: of every rank, or empty.
CheckResult check_lists(const StepGraph &graph, const std::vector<ActionRow> &rows, const std::vector<int64_t> &first,
                        bool reduce_grad, bool dispatch, const std::vector<double> &activation_bytes,
                        const std::vector<double> &memory_limit);

}  // namespace interlace
