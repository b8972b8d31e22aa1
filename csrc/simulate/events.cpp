#include "simulate/events.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <unordered_map>

namespace interlace {

EventSimulator::EventSimulator(const ActionLists &lists)
    : lists_(lists), channel_(lists.size, -1), member_(lists.size, -1), met_(lists.lanes + lists.meetings),
      leading_(lists.lanes, -1), link_(lists.reductions), clocks_(lists.ranks), reached_(lists.ranks) {
    std::unordered_map<uint64_t, int32_t> numbers;
    int64_t senders = 0, receivers = 0;
    for (int64_t rank = 0; rank < lists.ranks; ++rank) {
        for (int64_t i = lists.first[rank]; i < lists.first[rank + 1]; ++i) {
            poll_();
            const ActionOp op = lists.op(i);
            if (op == ActionOp::DISPATCH) dispatches_.emplace_back(static_cast<int32_t>(rank), i);
            if (op != ActionOp::SEND && op != ActionOp::RECV) continue;
            const int32_t own = lists.lane[i], peer = lists.row(i).peer;
            const int32_t source = op == ActionOp::SEND ? own : peer, target = op == ActionOp::SEND ? peer : own;
            const auto [entry, fresh] =
                numbers.emplace(static_cast<uint64_t>(source) << 32 | target, static_cast<int32_t>(channels_.size()));
            if (fresh) {
                channels_.push_back({source, target, senders, receivers, 0});
                senders += lists.lane_size(source);
                receivers += lists.lane_size(target);
                sent_.resize(senders, 0);
            }
            const Channel &channel = channels_[entry->second];
            channel_[i] = entry->second;
            member_[i] =
                (op == ActionOp::SEND ? channel.first_sender : channel.first_receiver) + lists.place(own, rank);
            if (op == ActionOp::SEND) ++sent_[member_[i]];
        }
    }
    int64_t messages = 0;
    for (Channel &channel : channels_) {
        channel.first_message = messages;
        const auto begin = sent_.begin() + channel.first_sender;
        messages += *std::max_element(begin, begin + lists.lane_size(channel.source));
    }
    arrivals_.resize(messages);
    parts_.resize(messages);
    taken_.resize(receivers);
    awaits_.resize(receivers);
    free_.resize(senders);
    order_.reserve(lists.size);

    std::map<std::vector<int32_t>, int32_t> sets;
    for (int64_t r = 0; r < lists.reductions; ++r) {
        poll_();
        const std::vector<int32_t> ranks(lists.reduction_rank + lists.reduction_first[r],
                                         lists.reduction_rank + lists.reduction_first[r + 1]);
        link_[r] = sets.emplace(ranks, static_cast<int32_t>(sets.size())).first->second;
        if (!ranks.empty()) ordered_.push_back(static_cast<int32_t>(r));
    }
    links_ = static_cast<int32_t>(sets.size());
    // All ranks of a set have the same order, so any of them can be used.
    const auto row = [&](int32_t r) { return lists.reduction_row[lists.reduction_first[r]]; };
    std::sort(ordered_.begin(), ordered_.end(), [&](int32_t a, int32_t b) {
        const bool first = lists.reduction_tied[a] != 0, second = lists.reduction_tied[b] != 0;
        return first != second ? second : row(a) < row(b) || (row(a) == row(b) && a < b);
    });
}

bool EventSimulator::receive(int64_t row, const double *seconds, double &clock) {
    const Channel &channel = channels_[channel_[row]];
    const int64_t receiver = member_[row];
    const int64_t message = channel.first_message + taken_[receiver];
    const int64_t end = &channel == &channels_.back() ? static_cast<int64_t>(parts_.size())
                                                      : channels_[channel_[row] + 1].first_message;
    if (message == end || parts_[message] < lists_.lane_size(channel.source)) {
        awaits_[receiver] = 1;
        return false;
    }
    ++taken_[receiver];
    clock = std::max(arrivals_[message], clock) + seconds[row];
    return true;
}

void EventSimulator::send(int64_t row, const double *seconds, const double *transfer, double &clock) {
    const Channel &channel = channels_[channel_[row]];
    const int64_t sender = member_[row];
    clock += seconds[row];
    free_[sender] = std::max(free_[sender], clock) + transfer[row];
    const int64_t message = channel.first_message + sent_[sender]++;
    arrivals_[message] = std::max(arrivals_[message], free_[sender]);
    if (++parts_[message] < lists_.lane_size(channel.source)) return;
    for (int32_t place = 0; place < lists_.lane_size(channel.target); ++place) {
        char &awaits = awaits_[channel.first_receiver + place];
        if (!awaits) continue;
        awaits = 0;
        todo_.push_back(lists_.lane_rank[lists_.lane_first[channel.target] + place]);
    }
}

// True if the ranks that have joined run the same action: of a lane the same action, of a meeting the same op.
// Otherwise they hang.
bool EventSimulator::alike(const std::vector<int32_t> &ranks) {
    bool same = true;
    for (const int32_t rank : ranks) {
        const int64_t row = reached_[rank];
        int64_t &leading = leading_[lists_.lane[row]];
        if (leading < 0) leading = row;
        const ActionRow &own = lists_.row(row), &its = lists_.row(leading);
        same = same && own.op == lists_.op(reached_[ranks.front()]) && own.op == its.op && own.module == its.module &&
               own.stage == its.stage && own.chunk == its.chunk;
    }
    for (const int32_t rank : ranks) leading_[lists_.lane[reached_[rank]]] = -1;
    return same;
}

bool EventSimulator::meet(int64_t row, int32_t rank, const double *seconds, double *start, double *finish,
                          double &clock) {
    const int64_t group = lists_.group(row);
    std::vector<int32_t> &ranks = met_[group];
    ranks.push_back(rank);
    clocks_[rank] = clock;
    reached_[rank] = row;
    if (static_cast<int32_t>(ranks.size()) < lists_.group_size(group) || !alike(ranks)) return false;
    double longest = 0.0;
    for (const int32_t other : ranks) {
        clock = std::max(clock, clocks_[other]);
        longest = std::max(longest, seconds[reached_[other]]);
    }
    start[row] = clock;
    for (const int32_t other : ranks) {
        if (other == rank) continue;
        start[reached_[other]] = clock;
        finish[reached_[other]] = clocks_[other] = clock + longest;
        order_.push_back(reached_[other]++);
        todo_.push_back(other);
    }
    clock += longest;
    ranks.clear();
    return true;
}

bool EventSimulator::reduce(const double *seconds, const double *start, double *finish) {
    constexpr double NEVER = std::numeric_limits<double>::infinity();
    std::vector<double> link_free(links_, 0.0), rank_free(lists_.ranks, 0.0);  // rank_free: of untied reductions
    bool complete = true;
    for (const int32_t r : ordered_) {
        poll_();
        double begin = link_free[link_[r]], longest = 0.0;
        for (int32_t at = lists_.reduction_first[r]; at < lists_.reduction_first[r + 1]; ++at) {
            const int64_t row = lists_.reduction_row[at], rank = lists_.reduction_rank[at];
            const bool here = row >= 0 && row - lists_.first[rank] < reached_[rank];
            begin = std::max(begin, here ? start[row] : NEVER);
            longest = std::max(longest, here ? seconds[row] : 0.0);
            if (lists_.reduction_tied[r]) begin = std::max(begin, rank_free[rank]);
        }
        bool listed = false;
        for (int32_t at = lists_.reduction_first[r]; at < lists_.reduction_first[r + 1]; ++at)
            listed = listed || lists_.reduction_row[at] >= 0;
        if (!listed) continue;  // this step does not have it
        const double end = begin + longest;
        complete = complete && end < NEVER;
        link_free[link_[r]] = end;
        for (int32_t at = lists_.reduction_first[r]; at < lists_.reduction_first[r + 1]; ++at) {
            if (lists_.reduction_row[at] >= 0) finish[lists_.reduction_row[at]] = end;
            double &free = rank_free[lists_.reduction_rank[at]];
            if (!lists_.reduction_tied[r]) free = std::max(free, end);
        }
    }
    return complete;
}

bool EventSimulator::dispatch(const double *seconds, const double *start, double *finish) {
    constexpr double NEVER = std::numeric_limits<double>::infinity();
    if (dispatches_.empty()) return true;
    double begin = static_cast<int64_t>(dispatches_.size()) == lists_.ranks ? 0.0 : NEVER, longest = 0.0;
    for (const auto &[rank, row] : dispatches_) {
        const bool here = row - lists_.first[rank] < reached_[rank];
        begin = std::max(begin, here ? start[row] : NEVER);
        longest = std::max(longest, here ? seconds[row] : 0.0);
    }
    for (const auto &[rank, row] : dispatches_) finish[row] = begin + longest;
    return begin < NEVER;
}

bool EventSimulator::run(const double *seconds, const double *transfer, double *start, double *finish) {
    std::fill(sent_.begin(), sent_.end(), 0);
    std::fill(taken_.begin(), taken_.end(), 0);
    std::fill(awaits_.begin(), awaits_.end(), 0);
    std::fill(free_.begin(), free_.end(), 0.0);
    std::fill(arrivals_.begin(), arrivals_.end(), 0.0);
    std::fill(parts_.begin(), parts_.end(), 0);
    std::fill(clocks_.begin(), clocks_.end(), 0.0);
    for (auto &ranks : met_) ranks.clear();
    std::copy(lists_.first, lists_.first + lists_.ranks, reached_.begin());
    order_.clear();
    todo_.resize(lists_.ranks);
    std::iota(todo_.begin(), todo_.end(), 0);

    while (!todo_.empty()) {
        poll_();
        const int32_t rank = todo_.back();
        todo_.pop_back();
        double clock = clocks_[rank];
        const int64_t end = lists_.first[rank + 1];
        int64_t i = reached_[rank];
        for (; i < end; ++i) {
            poll_();
            const ActionOp op = lists_.op(i);
            start[i] = clock;
            if (op == ActionOp::RECV) {
                if (!receive(i, seconds, clock)) break;
            } else if (op == ActionOp::SEND) {
                send(i, seconds, transfer, clock);
            } else if (is_compute(op) && lists_.group_size(lists_.group(i)) > 1) {
                if (!meet(i, rank, seconds, start, finish, clock)) break;
            } else if (op != ActionOp::REDUCE_GRAD && op != ActionOp::DISPATCH) {
                clock += seconds[i];
            }
            finish[i] = clock;
            order_.push_back(i);
        }
        reached_[rank] = i;
        clocks_[rank] = clock;
    }
    for (int64_t rank = 0; rank < lists_.ranks; ++rank) reached_[rank] -= lists_.first[rank];
    const bool reduced = reduce(seconds, start, finish), dispatched = dispatch(seconds, start, finish);
    return reduced && dispatched && static_cast<int64_t>(order_.size()) == lists_.size;
}

}  // namespace interlace
