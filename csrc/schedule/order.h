// In which order the jobs of a step run: one sequence for all lanes, of which every rank takes its part.
//
// Virtual time. d(node) counts the changes of lane on the longest path from a node to one that nobody reads, over links
// of this step. A chunk that nobody reads stands at its index k in its replica; any other stretches from the first to
// the last place of the chunks that read it, directly or not. FORWARD happens at 2 * k_first - d, BACKWARD at
// 2 * k_last + d + 1.
//
// Along a dependency time never decreases, and where the lane changes it increases:
// - FORWARD to a FORWARD that reads it: k_first of what is read is no later, its d is no smaller and, on another lane,
//   larger by one or more;
// - FORWARD to its own BACKWARD: 2 * k_first - d < 2 * k_last + d + 1;
// - BACKWARD to the BACKWARD of what it read: k_last of that is no earlier, its d as above.
// Steps of one time on one lane run in topological order, producers' FORWARD first, consumers' BACKWARD first (a
// FORWARD and a BACKWARD of one time never need each other). So the sequence by time respects every dependency whatever
// the chunks, and lists that are parts of one such sequence cannot deadlock: of the steps left, the earliest can run.
//
// Where all modules have equally many chunks, side by side, this is 1F1B as in the textbook: d + 1 forwards, then one
// backward and one forward in turn.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/step_graph.h"

namespace interlace {

// 2 * job, and one more for its BACKWARD.
using Step = int32_t;
inline Step forward_step(int32_t job) { return 2 * job; }
inline Step backward_step(int32_t job) { return 2 * job + 1; }
inline int32_t job_of(Step step) { return step / 2; }
inline bool is_backward(Step step) { return step % 2 != 0; }

// All forwards by virtual time, then all backwards by virtual time.
std::vector<Step> gpipe_order(const StepGraph &graph);

// The order in which lanes start their steps if each takes, whenever all of its ranks are idle, a backward that is
// ready, else a forward that is ready and within its node's cap, the one of the smallest virtual time.
//
// seconds: of every step. Every node takes its forwards, and its backwards, by virtual time. A node may hold as many
// forwards as the larger of d + 1 and of what it holds where all run by virtual time. Then it never gets stuck: of the
// steps left take the earliest one, all that it needs is done. A backward may run at any time. A forward is the next of
// its node, whose forwards that are held now are also held at this place of the sequence by virtual time, and there it
// is within the cap.
std::vector<Step> one_f_one_b_order(const StepGraph &graph, const std::vector<double> &seconds);

// Seconds until the last step finishes if every rank runs its part of the sequence in order; transfers take none.
double span(const StepGraph &graph, const std::vector<Step> &order, const std::vector<double> &seconds);

}  // namespace interlace
