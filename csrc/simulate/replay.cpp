#include "simulate/replay.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

#include "common/interrupt.h"

namespace interlace {

Replay::Replay(const ActionLists &lists) : clocks_(lists.ranks) {
    std::vector<double> zeros(lists.size, 0.0), start(lists.size), finish(lists.size);
    EventSimulator simulator(lists);
    if (!simulator.run(zeros.data(), zeros.data(), start.data(), finish.data()))
        throw std::invalid_argument("the lists never finish");

    for (int32_t lane = 0; lane < lists.lanes; ++lane)
        if (lists.lane_size(lane) != 1) throw std::invalid_argument("a replay has lanes of one rank");
    const auto rank_of = [&](int32_t lane) { return lists.lane_rank[lists.lane_first[lane]]; };
    struct Channel {
        int32_t link;
        std::vector<int32_t> slots;
        size_t taken = 0;
    };
    std::map<std::pair<int32_t, int32_t>, Channel> channels;
    int32_t slots = 0;
    steps_.reserve(lists.size);
    Poll poll;
    for (const int64_t action : simulator.order()) {
        poll();
        const ActionOp op = lists.op(action);
        if (!is_compute(op) && op != ActionOp::SEND && op != ActionOp::RECV)
            throw std::invalid_argument("a replay has compute and messages only");
        const int32_t lane = lists.lane[action], peer = lists.row(action).peer, rank = rank_of(lane);
        if (op == ActionOp::SEND) {
            Channel &channel =
                channels.emplace(std::make_pair(lane, peer), Channel{static_cast<int32_t>(channels.size()), {}})
                    .first->second;
            channel.slots.push_back(slots);
            steps_.push_back({rank, -1, slots++, channel.link});
        } else if (op == ActionOp::RECV) {
            Channel &channel = channels.at({peer, lane});
            steps_.push_back({rank, -1, channel.slots[channel.taken++], -1});
        } else {
            steps_.push_back({rank, static_cast<int32_t>(action), -1, -1});
        }
    }
    arrivals_.resize(slots);
    free_.resize(channels.size());
}

double Replay::makespan(const double *seconds, double transfer, double *finish) {
    std::fill(clocks_.begin(), clocks_.end(), 0.0);
    std::fill(free_.begin(), free_.end(), 0.0);
    for (const Step &step : steps_) {
        double &clock = clocks_[step.rank];
        if (step.action >= 0) {
            clock += seconds[step.action];
            if (finish != nullptr) finish[step.action] = clock;
        } else if (step.link < 0) {
            clock = std::max(clock, arrivals_[step.slot]);
        } else {
            free_[step.link] = std::max(free_[step.link], clock) + transfer;
            arrivals_[step.slot] = free_[step.link];
        }
    }
    return *std::max_element(clocks_.begin(), clocks_.end());
}

}  // namespace interlace
