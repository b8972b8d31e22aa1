#include "simulate/events.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "common/interrupt.h"

namespace interlace {

EventSimulator::EventSimulator(const ActionLists &lists)
    : lists_(lists), link_(lists.size, -1), clocks_(lists.ranks), reached_(lists.ranks) {
    std::unordered_map<uint64_t, int32_t> channels, barriers;
    std::vector<int64_t> counts;  // SENDs per channel
    Poll poll;
    for (int64_t rank = 0; rank < lists.ranks; ++rank) {
        for (int64_t i = lists.offsets[rank]; i < lists.offsets[rank + 1]; ++i) {
            poll();
            const Op op = static_cast<Op>(lists.op[i]);
            if (op == Op::send || op == Op::recv) {
                const uint64_t source = op == Op::send ? rank : lists.peer[i];
                const uint64_t target = op == Op::send ? lists.peer[i] : rank;
                const auto [entry, fresh] =
                    channels.emplace(source << 32 | target, static_cast<int32_t>(counts.size()));
                if (fresh) counts.push_back(0);
                counts[entry->second] += op == Op::send;
                link_[i] = entry->second;
            } else if (op == Op::reduce_grad) {
                const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(lists.stage[i])) << 32 |
                                     static_cast<uint32_t>(lists.microbatch[i]);
                const auto [entry, fresh] = barriers.emplace(key, static_cast<int32_t>(needed_.size()));
                if (fresh) needed_.push_back(lists.copies[lists.stage[i]]);
                link_[i] = entry->second;
            }
        }
    }
    first_.resize(counts.size() + 1, 0);
    std::partial_sum(counts.begin(), counts.end(), first_.begin() + 1);
    arrivals_.resize(first_.back());
    sent_.resize(counts.size());
    taken_.resize(counts.size());
    awaited_.resize(counts.size());
    free_.resize(counts.size());
    members_.resize(needed_.size());
    order_.reserve(lists.size);
}

bool EventSimulator::run(const double *seconds, const double *transfer, double *start, double *finish) {
    std::fill(sent_.begin(), sent_.end(), 0);
    std::fill(taken_.begin(), taken_.end(), 0);
    std::fill(awaited_.begin(), awaited_.end(), 0);
    std::fill(free_.begin(), free_.end(), 0.0);
    std::fill(clocks_.begin(), clocks_.end(), 0.0);
    for (auto &ranks : members_) ranks.clear();
    std::copy(lists_.offsets, lists_.offsets + lists_.ranks, reached_.begin());
    order_.clear();

    std::vector<int32_t> todo(lists_.ranks);
    std::iota(todo.begin(), todo.end(), 0);
    Poll poll;
    while (!todo.empty()) {
        poll();
        const int32_t rank = todo.back();
        todo.pop_back();
        double clock = clocks_[rank];
        const int64_t end = lists_.offsets[rank + 1];
        int64_t i = reached_[rank];
        for (; i < end; ++i) {
            poll();
            const Op op = static_cast<Op>(lists_.op[i]);
            start[i] = clock;
            if (op == Op::recv) {
                const int32_t channel = link_[i];
                if (taken_[channel] == sent_[channel]) {
                    awaited_[channel] = 1;
                    break;
                }
                clock = std::max(arrivals_[first_[channel] + taken_[channel]++], clock) + seconds[i];
            } else if (op == Op::send) {
                clock += seconds[i];
                const int32_t channel = link_[i];
                free_[channel] = std::max(free_[channel], clock) + transfer[i];
                arrivals_[first_[channel] + sent_[channel]++] = free_[channel];
                if (awaited_[channel]) {
                    awaited_[channel] = 0;
                    todo.push_back(lists_.peer[i]);
                }
            } else if (op == Op::reduce_grad) {
                std::vector<int32_t> &members = members_[link_[i]];
                members.push_back(rank);
                clocks_[rank] = clock;
                reached_[rank] = i;
                if (static_cast<int32_t>(members.size()) < needed_[link_[i]]) break;
                double longest = 0.0;
                for (const int32_t other : members) {
                    clock = std::max(clock, clocks_[other]);
                    longest = std::max(longest, seconds[reached_[other]]);
                }
                clock += longest;
                for (const int32_t other : members) {
                    if (other == rank) continue;
                    finish[reached_[other]] = clocks_[other] = clock;
                    order_.push_back(reached_[other]++);
                    todo.push_back(other);
                }
                members.clear();
            } else {
                clock += seconds[i];
            }
            finish[i] = clock;
            order_.push_back(i);
        }
        reached_[rank] = i;
        clocks_[rank] = clock;
    }
    for (int64_t rank = 0; rank < lists_.ranks; ++rank) reached_[rank] -= lists_.offsets[rank];
    return static_cast<int64_t>(order_.size()) == lists_.size;
}

}  // namespace interlace
