#pragma once

#include <cstdint>
#include <vector>

#include "simulate/events.h"

namespace interlace {

// The makespan of the same lists under many different costs, for searches. The order in which the event simulator ran
// the actions once is valid for all costs, so a replay needs no queues and no waiting. The arithmetic is that of
// EventSimulator. Only for lists of compute and messages, on lanes of one rank.
class Replay {
  public:
    // Throws std::invalid_argument if the lists deadlock or hold anything else.
    explicit Replay(const ActionLists &lists);

    // seconds: of every compute action, at its place in the lists. transfer: of every message. finish: if given, filled
    // for compute actions. Does not allocate.
    double makespan(const double *seconds, double transfer, double *finish = nullptr);

  private:
    struct Step {
        int32_t rank;
        int32_t action;  // compute action whose seconds it takes; -1: it sends or receives
        int32_t slot;    // the message that it sends or receives
        int32_t link;    // link over which it sends; -1: it receives
    };
    std::vector<Step> steps_;
    std::vector<double> clocks_, arrivals_, free_;
};

}  // namespace interlace
