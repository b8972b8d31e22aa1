#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// The codes of schedule.Op, in the order of its members.
enum class Op : int8_t {
    forward,
    backward,
    backward_input,
    backward_weight,
    send,
    recv,
    dispatch,
    unshard,
    reshard,
    reduce_grad,
    optimizer_step,
    count
};

inline bool is_compute(Op op) { return op <= Op::backward_weight; }

// The lists of all ranks, one after the other: those of rank r are offsets[r] .. offsets[r + 1]. Views, not owned.
struct ActionLists {
    int64_t ranks = 0;
    int64_t size = 0;
    const int64_t *offsets = nullptr;
    const int8_t *op = nullptr;
    const int32_t *stage = nullptr;       // which stage a REDUCE_GRAD reduces
    const int32_t *microbatch = nullptr;  // keeps the reductions of one stage apart
    const int32_t *peer = nullptr;        // the other rank of a SEND or RECV
    const int32_t *copies = nullptr;      // per stage: ranks that a REDUCE_GRAD of it waits for
};

// Plays fixed lists on clocks, as simulate/reference.py does, with the same arithmetic in the same order: a SEND leaves
// its rank at once and travels behind the messages sent before it to the same rank; a RECV takes the oldest message of
// its peer and waits for it; a REDUCE_GRAD starts when all copies of its stage have reached it; anything else takes its
// seconds. Since no choice is ever open, times do not depend on the order in which ranks are visited. O(actions).
class EventSimulator {
  public:
    // lists: checked (ops known, peers and stages in range). It must outlive the simulator.
    explicit EventSimulator(const ActionLists &lists);

    // seconds: of every action (for SEND and RECV: what the rank itself spends). transfer: of the message of every
    // SEND; other entries are not read. start, finish: filled for what ran. False: a deadlock, `reached` says where.
    bool run(const double *seconds, const double *transfer, double *start, double *finish);

    // Per rank, how many of its actions ran.
    const std::vector<int64_t> &reached() const { return reached_; }

    // The actions in the order in which they ran.
    const std::vector<int64_t> &order() const { return order_; }

  private:
    const ActionLists lists_;
    std::vector<int32_t> link_;                  // per action: its channel (SEND, RECV) or its barrier (REDUCE_GRAD)
    std::vector<int64_t> first_;                 // per channel: where its arrivals begin
    std::vector<double> arrivals_;               // of all channels
    std::vector<int64_t> sent_, taken_;          // per channel
    std::vector<char> awaited_;                  // per channel: its receiver waits for it
    std::vector<double> free_;                   // per channel: when the link has delivered all it was given
    std::vector<std::vector<int32_t>> members_;  // per barrier: ranks that have reached it
    std::vector<int32_t> needed_;                // per barrier
    std::vector<double> clocks_;
    std::vector<int64_t> reached_, order_;
};

}  // namespace interlace
