// The schedules by name: which order, which limits, and the best of what these give.
//
// - GPIPE: all forwards, then all backwards.
// - ONE_F_ONE_B: see order.h; a node holds at most as many forwards as d + 1 or, if that is more, as the order holds.
// - INTERLEAVED: the same for pipelines in laps, in the textbook's own order or by a play within what that holds.
// - ZB_H1, ZB_H2 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2): split backwards. H1 has
//   1F1B's warm-up, in the textbook's own order or by a play, and no rank keeps more than the fullest one under 1F1B;
//   H2 has a warm-up twice as deep (2 d + 1 forwards) and as much memory as that takes.
// - ZB_V (section 6 there): for two laps, down and up again. It has no warm-up of its own: forwards run as early as the
//   fullest rank of 1F1B on the same layout has room for.
// - AUTOMATIC: the best of all of these and of plays of their orders with other limits and weight halves earlier,
//   played again by what is urgent in it as long as that makes it shorter; of what keeps within the limits or, without
//   any, of what has no rank hold more than the fullest one under 1F1B.
//
// With limits from outside a schedule's own give way to these: as many forwards run ahead as they allow (eager
// forward).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/order.h"

namespace interlace {

enum class Generator : int32_t { GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_H2, ZB_V, AUTOMATIC, COUNT };

struct Limits {
    std::vector<double> bytes;   // job -> what its forward holds until its last use; empty: 1 each
    std::vector<double> memory;  // rank -> what it may hold; empty: nothing said
    int32_t in_flight = 0;       // what a stage may hold, in forwards; 0: nothing said
};

// The order by which lists are made. seconds: of every step; empty: nominal ones, by which a forward and each half of a
// backward take a round and a whole backward two, and stages of one rank share a round. With seconds a schedule is
// played by these and by the nominal ones, and the faster order counts (transfers left out). Encoders that share ranks
// with what they feed, and encode everything in one chunk, have their backwards last where that is faster.
//
// Throws std::invalid_argument where no order that was tried keeps within the limits, naming a rank and its bytes, or a
// stage and its forwards.
std::vector<Step> generate(const StepGraph &graph, Generator generator, const std::vector<double> &seconds,
                           const Limits &limits);

// No list of these jobs, of whole or split backwards, ends earlier: for every rank the longest wait before anything of
// it can start, all of its work, and the shortest way from something of it to the end; and the longest path of all.
double lower_bound_of(const StepGraph &graph, const std::vector<double> &seconds);

}  // namespace interlace
