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
    const int32_t *lane = nullptr;  // per row: as whose member the rank computes, sends or receives; others: not read
    int64_t lanes = 0;
    const int32_t *lane_first = nullptr;  // [lanes + 1], where the ranks of each lane begin in lane_rank
    const int32_t *lane_rank = nullptr;
    int64_t reductions = 0;
    const int32_t *reduction_first = nullptr;  // [reductions + 1], likewise in reduction_rank, which rises
    const int32_t *reduction_rank = nullptr;
    const int64_t *reduction_row = nullptr;   // beside reduction_rank: where it stands in that rank's list; -1: nowhere
    const int32_t *reduction_tied = nullptr;  // per reduction: whether it sums a tied weight
    const int32_t *meeting =
        nullptr;           // per row: the meeting (schedule/meetings.h) in which the rank computes; -1: none
    int64_t meetings = 0;  // 0: of no row
    const int32_t *meeting_size = nullptr;  // per meeting: its ranks

    const ActionRow &row(int64_t i) const { return rows[i]; }
    ActionOp op(int64_t i) const { return rows[i].op; }
    int32_t lane_size(int32_t lane) const { return lane_first[lane + 1] - lane_first[lane]; }

    // With whom the rank of a compute row computes: the number of its lane, or behind those of all lanes its meeting.
    int64_t group(int64_t i) const { return meetings > 0 && meeting[i] >= 0 ? lanes + meeting[i] : lane[i]; }
    int32_t group_size(int64_t group) const {
        return group < lanes ? lane_size(static_cast<int32_t>(group)) : meeting_size[group - lanes];
    }

    // Which member of the lane a rank is; -1: none.
    int32_t place(int32_t lane, int64_t rank) const {
        for (int32_t at = lane_first[lane]; at < lane_first[lane + 1]; ++at)
            if (lane_rank[at] == rank) return at - lane_first[lane];
        return -1;
    }
};

// Plays fixed lists on clocks, as simulate/reference.py does, with the same arithmetic in the same order:
// - a compute action starts when all ranks of its lane have reached it, and takes the longest of their seconds;
// - where weights are gathered layer by layer, when all ranks of its meeting have reached theirs, likewise;
// - a SEND leaves its rank at once, and travels behind what this rank sent before it from that lane to the same lane;
// - a RECV takes the oldest message of its lane from the lane it names, and waits until all ranks there have sent it;
// - a REDUCE_GRAD leaves its rank at once. It ends its seconds after all its ranks have reached it, earlier ones of the
//   same ranks have ended (they share links), and, if it is of a tied weight, all others of these ranks that are not;
// - a DISPATCH leaves its rank at once. It ends the longest of its ranks' seconds after every rank has reached its own,
//   on links of its own: its bytes are those of the step after, so that only the end of the step waits for it.
// - anything else takes its seconds.
// Since no choice is ever open, times do not depend on the order in which ranks are visited. Reductions hold up nobody,
// so their ends are computed after all else. O(actions).
class EventSimulator {
  public:
    // lists: checked (ops, lanes and reductions exist; each rank is in the lanes of its rows). It must outlive this.
    explicit EventSimulator(const ActionLists &lists);

    // seconds: of every action (for SEND and RECV: what the rank itself spends). transfer: of the message of every
    // SEND; other entries are not read. start, finish: filled for what ran; a reduction that lacks a rank never
    // finishes (infinity). False: something never finishes; `reached` says where ranks stopped.
    bool run(const double *seconds, const double *transfer, double *start, double *finish);

    // Per rank, how many of its actions ran.
    const std::vector<int64_t> &reached() const { return reached_; }

    // The actions in the order in which they ran.
    const std::vector<int64_t> &order() const { return order_; }

  private:
    // From one lane to another. Members of both have numbers of their own, from first_sender and first_receiver on.
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
    std::vector<char> awaits_;               // per receiver: it waits for its next message
    std::vector<double> free_;               // per sender: when its link has delivered all it was given
    std::vector<double> arrivals_;           // per message: of the last part that was sent so far
    std::vector<int32_t> parts_;             // per message: ranks that have sent their part
    std::vector<std::vector<int32_t>> met_;  // per lane, then per meeting: ranks that wait there for the others
    std::vector<int64_t> leading_;           // per lane, while ranks are compared: the row of the first of them, or -1
    std::vector<int32_t> ordered_;           // reductions, those of the same ranks in the order of the lists, tied last
    std::vector<int32_t> link_;              // per reduction: a number for its set of ranks
    int32_t links_ = 0;
    std::vector<std::pair<int32_t, int64_t>> dispatches_;  // (rank, row)
    std::vector<double> clocks_;
    std::vector<int64_t> reached_, order_;
    std::vector<int32_t> todo_;
};

}  // namespace interlace
