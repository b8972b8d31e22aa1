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

    std::vector<int32_t> rank_of(lists.size);
    for (int64_t rank = 0; rank < lists.ranks; ++rank)
        std::fill(rank_of.begin() + lists.offsets[rank], rank_of.begin() + lists.offsets[rank + 1],
                  static_cast<int32_t>(rank));
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
        const int32_t rank = rank_of[action];
        const Op op = static_cast<Op>(lists.op[action]);
        if (op == Op::reduce_grad) throw std::invalid_argument("a replay has no REDUCE_GRAD");
        if (op == Op::send) {
            Channel &channel = channels
                                   .emplace(std::make_pair(rank, lists.peer[action]),
                                            Channel{static_cast<int32_t>(channels.size()), {}})
                                   .first->second;
            channel.slots.push_back(slots);
            steps_.push_back({rank, -1, slots++, channel.link});
        } else if (op == Op::recv) {
            Channel &channel = channels.at({lists.peer[action], rank});
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
