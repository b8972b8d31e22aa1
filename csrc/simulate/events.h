#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/interrupt.h"
#include "schedule/step_graph.h"

namespace interlace {

// The lists of all ranks, one after the other: those of rank r are rows first[r] .. first[r + 1]. Views, not owned.
struct ActionLists {
    int64_t ranks = 0;
    int64_t size = 0;
    const int64_t *first = nullptr;
    const ActionRow *rows = nullptr;
    const int32_t *lane = nullptr;  // per row: lane for which the rank computes, sends or receives; others unused
    int64_t lanes = 0;
    const int32_t *lane_first = nullptr;  // [lanes + 1]: start of each lane's ranks in lane_rank
    const int32_t *lane_rank = nullptr;
    int64_t reductions = 0;
    const int32_t *reduction_first = nullptr;  // [reductions + 1]: likewise in reduction_rank, which is ascending
    const int32_t *reduction_rank = nullptr;
    const int64_t *reduction_row = nullptr;   // parallel to reduction_rank: its row in that rank's list; -1: none
    const int32_t *reduction_tied = nullptr;  // per reduction: true if it sums a tied weight
    const int32_t *meeting =
        nullptr;           // per row: the meeting (schedule/meetings.h) in which the rank computes; -1: none
    int64_t meetings = 0;  // 0: no row has one
    const int32_t *meeting_size = nullptr;  // per meeting: number of its ranks

    const ActionRow &row(int64_t i) const { return rows[i]; }
    ActionOp op(int64_t i) const { return rows[i].op; }
    int32_t lane_size(int32_t lane) const { return lane_first[lane + 1] - lane_first[lane]; }

    // The group of a compute row: the number of its lane or, numbered after all lanes, its meeting.
    int64_t group(int64_t i) const { return meetings > 0 && meeting[i] >= 0 ? lanes + meeting[i] : lane[i]; }
    int32_t group_size(int64_t group) const {
        return group < lanes ? lane_size(static_cast<int32_t>(group)) : meeting_size[group - lanes];
    }

    // Index of a rank in the lane; -1: not a member.
    int32_t place(int32_t lane, int64_t rank) const {
        for (int32_t at = lane_first[lane]; at < lane_first[lane + 1]; ++at)
            if (lane_rank[at] == rank) return at - lane_first[lane];
        return -1;
    }
};

// Plays fixed lists on simulated clocks, like tests/simulate/reference.py, with the same arithmetic in the same order:
// - a compute action starts when all ranks of its lane have reached it, and takes the longest of their seconds;
// - if weights are gathered layer by layer, it likewise starts when all ranks of its meeting have reached theirs;
// - a SEND leaves its rank at once. It is transferred after earlier messages of this rank from that lane to the same
//   lane;
// - a RECV takes the oldest message of its lane from the lane it names, and waits until all ranks there have sent it;
// - a REDUCE_GRAD leaves its rank at once. It starts when all its ranks have reached it, and earlier ones of the same
//   ranks have ended (they share links). If it is of a tied weight, all untied ones of these ranks must also have
//   ended. It takes its seconds from there;
// - a DISPATCH leaves its rank at once. It ends the longest of its ranks' seconds after every rank has reached its own,
//   on separate links: its bytes are for the next step, so only the end of the step waits for it;
// - any other action takes its seconds.
// All choices are fixed, so times do not depend on the order in which ranks are visited. No action waits for
// reductions, so their ends are computed last. O(actions).
class EventSimulator {
  public:
    // lists: checked (ops, lanes and reductions exist; each rank is in the lanes of its rows). It must outlive this.
    explicit EventSimulator(const ActionLists &lists);

    // seconds: of every action (for SEND and RECV: time spent by the rank itself). transfer: of the message of every
    // SEND; other entries are not read. start, finish: filled for actions that ran; a reduction that lacks a rank never
    // finishes (infinity). Returns false if something never finishes; `reached` tells where ranks stopped.
    bool run(const double *seconds, const double *transfer, double *start, double *finish);

    // Per rank, the number of its actions that ran.
    const std::vector<int64_t> &reached() const { return reached_; }

    // The actions in the order in which they ran.
    const std::vector<int64_t> &order() const { return order_; }

  private:
    // From one lane to another. Members of both have separate numbers, starting at first_sender and first_receiver.
    struct Channel {
        int32_t source, target;
        int64_t first_sender, first_receiver, first_message;
    };

    bool receive(int64_t row, const double *seconds, double &clock);
    void send(int64_t row, const double *seconds, const double *transfer, double &clock);
    bool meet(int64_t row, int32_t rank, const double *seconds, double *start, double *finish, double &clock);
    bool alike(const std::vector<int32_t> &ranks);
    bool reduce(const double *seconds, const double *start, double *finish);
    bool dispatch(const double *seconds, const double *start, double *finish);

    const ActionLists lists_;
    Poll poll_;
    std::vector<Channel> channels_;
    std::vector<int32_t> channel_;           // per row: of a SEND or RECV
    std::vector<int64_t> member_;            // per row: the number of this rank as sender or receiver
    std::vector<int64_t> sent_, taken_;      // per sender and per receiver: messages so far
    std::vector<char> awaits_;               // per receiver: true if it waits for its next message
    std::vector<double> free_;               // per sender: time at which its link has delivered all messages
    std::vector<double> arrivals_;           // per message: arrival of the last part sent so far
    std::vector<int32_t> parts_;             // per message: ranks that have sent their part
    std::vector<std::vector<int32_t>> met_;  // per lane, then per meeting: ranks that wait there for the others
    std::vector<int64_t> leading_;           // per lane, while ranks are compared: row of the first of them, or -1
    std::vector<int32_t> ordered_;           // reductions, those of the same ranks in the order of the lists, tied last
    std::vector<int32_t> link_;              // per reduction: number of its set of ranks
    int32_t links_ = 0;
    std::vector<std::pair<int32_t, int64_t>> dispatches_;  // (rank, row)
    std::vector<double> clocks_;
    std::vector<int64_t> reached_, order_;
    std::vector<int32_t> todo_;
};

}  // namespace interlace
