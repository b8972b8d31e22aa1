// The schedules by name: their orders and limits, and the selection of the best result.
//
// - GPIPE: all forwards, then all backwards.
// - ONE_F_ONE_B: see order.h. A node holds at most d + 1 forwards or, if that is more, as many as the order holds.
// - INTERLEAVED: the same for pipelines in laps, in the textbook's own order or by a play within the memory of that
//   order.
// - ZB_H1, ZB_H2 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2): split backwards. H1 has
//   1F1B's warm-up, in the textbook's own order or by a play, and no rank keeps more than the fullest one under 1F1B.
//   H2 has a warm-up twice as deep (2 d + 1 forwards) and the memory that this takes.
// - ZB_V (section 6 there): for two laps, down and up again. It has no warm-up of its own: forwards run as early as the
//   memory of the fullest rank of 1F1B on the same layout allows.
// - AUTOMATIC: the best of all of these and of plays of their orders with other limits and earlier weight halves. The
//   best is played again by its urgent steps as long as that makes it shorter. Only orders within the limits count or,
//   without limits, those in which no rank holds more than the fullest one under 1F1B.
//
// External limits replace a schedule's own: as many forwards run ahead as they allow (eager forward).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/generator/order.h"

namespace interlace {

enum class Generator : int32_t { GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_H2, ZB_V, AUTOMATIC, COUNT };

struct Limits {
    std::vector<double> bytes;   // job -> bytes that its forward holds until its last use; empty: 1 each
    std::vector<double> memory;  // rank -> bytes that it may hold; empty: no limit
    int32_t in_flight = 0;       // forwards that a stage may hold; 0: no limit
};

// The order from which lists are made. seconds: of every step; empty: nominal ones. With nominal seconds a forward and
// each half of a backward take one round, a whole backward takes two, and stages of one rank share a round. With given
// seconds a schedule is played with these and with the nominal ones, and the faster order wins (transfers are not
// counted). If encoders share ranks with their readers and encode everything in one chunk, their backwards run last if
// that is faster.
//
// Throws std::invalid_argument if no order that was tested keeps within the limits. Names a rank and its bytes, or a
// stage and its forwards.
std::vector<Step> generate(const StepGraph &graph, Generator generator, const std::vector<double> &seconds,
                           const Limits &limits);

// Lower bound of the end of any list of these jobs, with whole or split backwards. The maximum over ranks of a sum: the
// earliest possible start of any of its steps, all of its work, and the shortest path from any of its steps to the end.
// Also at least the longest path of all.
double lower_bound_of(const StepGraph &graph, const std::vector<double> &seconds);

}  // namespace interlace
