// Order of the jobs of a step: one sequence for all lanes. Every rank takes its part of it.
//
// Virtual time. d(node) counts the changes of lane on the longest path from a node to a node without readers, over
// links of this step. A chunk without readers has its index k in its replica as its place. Any other chunk extends from
// the first to the last place of the chunks that read it, directly or not. With a period of 2 and a hop of 1, FORWARD
// happens at 2 * k_first - d, BACKWARD at 2 * k_last + d + 1.
//
// Along a dependency time never decreases, and if the lane changes it increases:
// - FORWARD to a FORWARD that reads it: k_first of the producer is no later, its d is no smaller and, on another lane,
//   larger by one or more;
// - FORWARD to its own BACKWARD: 2 * k_first - d < 2 * k_last + d + 1;
// - BACKWARD to the BACKWARD of its input: k_last of that is no earlier, its d as above.
// Steps of one time on one lane run in topological order, producers' FORWARD first, consumers' BACKWARD first (a
// FORWARD and a BACKWARD of one time never need each other). So the sequence by time respects every dependency for any
// chunks. Lists that are parts of one such sequence cannot deadlock: the earliest remaining step can always run.
//
// If all modules have equally many chunks, side by side, this is the textbook's 1F1B: d + 1 forwards, then one backward
// and one forward in turn.
//
// A split backward is a BACKWARD_INPUT at the BACKWARD's place, followed by the BACKWARD_WEIGHT. Backwards are split
// only if a node has trainable weights. Otherwise a BACKWARD is only the input half, and stays one piece.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/step_graph.h"

namespace interlace {

// A compute action of a job: 4 * job + its op.
using Step = int32_t;
constexpr int32_t STEPS_PER_JOB = 4;
inline Step step_of(ActionOp op, int32_t job) { return STEPS_PER_JOB * job + static_cast<int32_t>(op); }
inline int32_t job_of(Step step) { return step / STEPS_PER_JOB; }
inline ActionOp op_of(Step step) { return static_cast<ActionOp>(step % STEPS_PER_JOB); }
// True if it makes the gradients that are sent; true if it is the last use of the forward's activations.
inline bool hands_back(Step step) {
    return op_of(step) == ActionOp::BACKWARD || op_of(step) == ActionOp::BACKWARD_INPUT;
}
inline bool releases(Step step) {
    return op_of(step) == ActionOp::BACKWARD || op_of(step) == ActionOp::BACKWARD_WEIGHT;
}

// True if a split schedule has two halves of the job's backward.
inline bool splits(const StepGraph &graph, int32_t job) {
    return graph.backward[job] && graph.stages.node_trains[graph.job_node[job]];
}
// The op that hands back the job's gradients.
inline Step backward_of(const StepGraph &graph, int32_t job, bool split) {
    return step_of(split && splits(graph, job) ? ActionOp::BACKWARD_INPUT : ActionOp::BACKWARD, job);
}

// Per node: d. Per chunk: the first and the last place.
struct Places {
    std::vector<int32_t> distance, first, last;
};
Places find_places(const StepGraph &graph);

// All steps by virtual time: FORWARD at period * k_first - hop * d, backwards at period * k_last + hop * d + 1.
std::vector<Step> timed_order(const StepGraph &graph, const Places &places, int64_t period, int64_t hop, bool split);

// Split 1F1B as in the textbook's ZB-H1. The weight half of a chunk follows the input half that comes D - d chunks
// later on the node, where D is the largest d. So every node holds up to D + 1 forwards, like the first node of 1F1B.
// The further a node is from the first, the more weight halves are left to fill its end.
std::vector<Step> zb_h1_order(const StepGraph &graph, const Places &places);

// All forwards by virtual time, then all backwards by virtual time.
std::vector<Step> gpipe_order(const StepGraph &graph);

// Virtual time for pipelines that visit their lanes several times: interleaved 1F1B as in the textbook (Megatron-LM,
// arXiv 2104.04473, section 2.2) for P lanes and v laps. Chunks run in groups of P: P of them through lap 0, the same P
// through lap 1, and so on. Let n be the place of a forward in this order and i that of its lane. FORWARD happens at
// 2 * (n + i). With n counted from the last lap, BACKWARD happens at 2 * (n + P - 1 - i) + 2 * (v * P - 1) + 1, that
// is, not before the chunk's last forward. So lane i runs 2 * (P - 1 - i) + (v - 1) * P forwards, then one forward and
// one backward in turn. Modules that feed this one, or read it, follow its chunks, each hop one turn (2) away.
// The laps are those of the last module, in the order of data, whose pipelines have the most laps. Without laps, this
// is timed_order.
std::vector<Step> interleaved_order(const StepGraph &graph, const Places &places, bool split);

// The maximum number of forwards that each node holds until its gradients are handed back, if steps run in this order.
std::vector<int32_t> most_in_flight(const StepGraph &graph, const std::vector<Step> &order);

// Peak memory of each rank if steps run in this order, by the rules of `check`. bytes: of every job.
std::vector<double> peaks_of(const StepGraph &graph, const std::vector<Step> &order, const std::vector<double> &bytes);

// Seconds until the last step finishes if every rank runs its part of the sequence in order; transfers take none.
// seconds: of every step.
double span(const StepGraph &graph, const std::vector<Step> &order, const std::vector<double> &seconds);

// A step that a sequence must not have at this place. other: a step that it needs and that has not come before, or the
// step itself if it does not belong to the sequence at all or comes twice. at: its index; the length if `step` is
// missing.
struct Misplaced {
    int64_t at;
    Step step, other;
};
// The first fault of a sequence: it must have all steps of the graph once, each after those that it needs.
std::optional<Misplaced> misplaced(const StepGraph &graph, const std::vector<Step> &order);

}  // namespace interlace
