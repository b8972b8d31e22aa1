// Proves that lists can run: complete, in order, free of deadlock, within memory.
//
// The checker does not depend on how the lists were made. It takes the required actions from the StepGraph, compares,
// and replays the lists like the executor:
// - A compute action waits for all ranks of its lane. If weights are gathered layer by layer, it also waits for all
//   ranks of the lanes that share them: see Meetings.
// - Sends never block. A receive takes the oldest message from its peer lane. It waits until all ranks there have sent
//   it.
// - A REDUCE_GRAD starts a sum and does not wait.
// - An UNSHARD starts a gather and does not wait. An action that computes with its weights, or releases them, waits
//   until all ranks of the gather have started it.
// - A DISPATCH starts an exchange of all ranks and does not wait. Nothing in the same step waits for it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/step_graph.h"

namespace interlace {

enum class FaultKind {
    TIMES,            // `row` occurs `count` times
    BESIDES,          // `row` is a part of the BACKWARD `other`, which occurs too
    LACKS,            // `row` is missing
    HALF,             // `row`, the other half of `other`, is missing
    EXTRA,            // `row` is not needed
    LANE_ORDER,       // `row` is at the position where rank `other_rank` of the lane has `other`
    AFTER_REDUCTION,  // `row` adds to a gradient that `other` has already summed
    AFTER_TIED,       // `row` after `other`, which is of a tied weight
    REDUCTION_ORDER,  // `row` before `other`: no common order of all reductions and gathers holds on every rank
    TWO_WAYS,         // `row`, while rank `other_rank` has `other`, which gathers the same weights in another way
    MEETING_ORDER,    // rank `other_rank`, which gathers layer by layer with it, has `other` there instead of `row`
    MESSAGE_ORDER,    // `row` receives a message that is not the oldest, `other`
    SEND_FORWARD,     // `row` before the forward that produces it
    SEND_BACKWARD,    // `row` before the backward `other` that produces it
    NO_FORWARD,       // `row` before its forward
    NO_INPUT_HALF,    // `row` before its BACKWARD_INPUT
    NO_OUTPUT,        // `row` before it has the output of the forward `other`
    NO_GRADIENT,      // `row` before it has the gradient from the backward `other`
    NO_UNSHARD,       // `row` before `other`, which gathers the weights that it uses or releases
    AFTER_RESHARD,    // `row` after `other`, which has released weights that it uses
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
    std::vector<int64_t> at{};  // of a deadlock: position of each rank in its list
};

struct CheckResult {
    std::optional<Fault> fault;
    std::vector<int32_t> peak_in_flight;  // per rank, the maximum number of forwards whose backward is still to come
    std::vector<double> peak_bytes;
};

// rows: of all ranks, one after the other; first: where each rank's begins. dispatch: true if every rank has a
// DISPATCH, false if none has. activation_bytes: of every job, or empty. memory_limit: of every rank, or empty.
CheckResult check_lists(const StepGraph &graph, const std::vector<ActionRow> &rows, const std::vector<int64_t> &first,
                        bool reduce_grad, bool dispatch, const std::vector<double> &activation_bytes,
                        const std::vector<double> &memory_limit);

}  // namespace interlace
