#include "balance/microbatches/reorder.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "common/limits.h"

namespace interlace {

std::vector<int32_t> assign_ascending(const std::vector<double> &costs, int64_t groups, int64_t capacity) {
    std::vector<int32_t> order(costs.size());
    std::iota(order.begin(), order.end(), 0);
    interruptible_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return costs[a] != costs[b] ? costs[a] < costs[b] : a < b; });
    using Group = std::pair<double, int32_t>;
    std::vector<Group> heap(groups);
    for (int64_t group = 0; group < groups; ++group) heap[group] = {0.0, static_cast<int32_t>(group)};
    std::vector<int64_t> counts(groups, 0);
    std::vector<int32_t> group_of(costs.size());
    Poll poll;
    for (const int32_t sample : order) {
        poll();
        std::pop_heap(heap.begin(), heap.end(), std::greater<Group>());
        const int32_t group = heap.back().second;
        group_of[sample] = group;
        heap.back().first += costs[sample];
        if (++counts[group] == capacity)
            heap.pop_back();
        else
            std::push_heap(heap.begin(), heap.end(), std::greater<Group>());
    }
    return group_of;
}

OneForwardOneBackward::OneForwardOneBackward(const PipelineCosts &costs) : costs_(costs) {
    build();
    seconds_.assign(op_.size(), 0.0);
    finish_.assign(op_.size(), 0.0);
    make_replay();
    for (int64_t i = 0; i < offsets_[1]; ++i)
        if (is_compute(static_cast<ActionOp>(op_[i]))) first_rank_.push_back(static_cast<int32_t>(i));
}

// One lane per rank.
void OneForwardOneBackward::make_replay() {
    std::vector<ActionRow> rows(op_.size());
    std::vector<int32_t> lane(op_.size()), ranks(costs_.ranks), starts(costs_.ranks + 1);
    std::iota(ranks.begin(), ranks.end(), 0);
    std::iota(starts.begin(), starts.end(), 0);
    for (int64_t rank = 0; rank < costs_.ranks; ++rank)
        std::fill(lane.begin() + offsets_[rank], lane.begin() + offsets_[rank + 1], static_cast<int32_t>(rank));
    for (size_t i = 0; i < op_.size(); ++i)
        rows[i] = {static_cast<ActionOp>(op_[i]), 0, stage_[i], place_[i], -1, peer_[i], 0};
    ActionLists lists;
    lists.ranks = lists.lanes = costs_.ranks;
    lists.size = static_cast<int64_t>(op_.size());
    lists.first = offsets_.data();
    lists.rows = rows.data();
    lists.lane = lane.data();
    lists.lane_first = starts.data();
    lists.lane_rank = ranks.data();
    replay_ = std::make_unique<Replay>(lists);
}

void OneForwardOneBackward::build() {
    struct Compute {
        ActionOp op;
        int32_t stage, place;
    };
    const int64_t ranks = costs_.ranks, count = costs_.microbatches, stages = costs_.stages, chunks = stages / ranks;
    std::vector<std::vector<Compute>> compute(ranks);
    Poll poll;
    for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t total = count * chunks;
        const int64_t ahead = chunks == 1 ? ranks - rank - 1 : 2 * (ranks - rank - 1) + (chunks - 1) * ranks;
        const int64_t group = chunks == 1 ? 1 : ranks;  // microbatches that pass a chunk before the next one begins
        const auto nth = [&](ActionOp op, int64_t n) {
            const int64_t chunk = n % (group * chunks) / group;
            const int64_t stage = (op == ActionOp::FORWARD ? chunk : chunks - 1 - chunk) * ranks + rank;
            const int64_t place = n / (group * chunks) * group + n % group;
            return Compute{op, static_cast<int32_t>(stage), static_cast<int32_t>(place)};
        };
        for (int64_t n = 0; n < total + ahead; ++n) {
            poll();
            if (n < total) compute[rank].push_back(nth(ActionOp::FORWARD, n));
            if (n >= ahead && n - ahead < total) compute[rank].push_back(nth(ActionOp::BACKWARD, n - ahead));
        }
    }

    // Messages between two ranks arrive in the order in which they were sent. So a rank that needs a later one receives
    // the earlier ones first. Keyed by the stage that produced the activation, in both directions.
    const auto key = [&](int64_t producer, int64_t place, bool gradient) {
        return (producer * count + place) * 2 + gradient;
    };
    struct Wire {
        std::vector<int64_t> sent;
        std::unordered_map<int64_t, int64_t> at;
        int64_t taken = 0;
    };
    std::map<std::pair<int64_t, int64_t>, Wire> wires;
    const auto target = [&](const Compute &work) -> int64_t {  // rank that needs the result; -1: none or the same
        const int64_t stage = work.op == ActionOp::FORWARD ? work.stage + 1 : work.stage - 1;
        if (stage < 0 || stage == stages || ranks == 1) return -1;
        return stage % ranks;
    };
    for (int64_t rank = 0; rank < ranks; ++rank) {
        for (const Compute &work : compute[rank]) {
            poll();
            if (target(work) < 0) continue;
            Wire &wire = wires[{rank, target(work)}];
            const bool gradient = work.op == ActionOp::BACKWARD;
            const int64_t message = key(work.stage - gradient, work.place, gradient);
            wire.at[message] = static_cast<int64_t>(wire.sent.size());
            wire.sent.push_back(message);
        }
    }
    const auto add = [&](ActionOp op, int64_t stage, int64_t place, int64_t peer) {
        op_.push_back(static_cast<int8_t>(op));
        stage_.push_back(static_cast<int32_t>(stage));
        place_.push_back(static_cast<int32_t>(place));
        peer_.push_back(static_cast<int32_t>(peer));
    };
    offsets_.push_back(0);
    for (int64_t rank = 0; rank < ranks; ++rank) {
        for (const Compute &work : compute[rank]) {
            poll();
            const bool gradient = work.op == ActionOp::BACKWARD;
            const int64_t source = gradient ? work.stage + 1 : work.stage - 1;
            if (source >= 0 && source < stages && ranks > 1) {
                Wire &wire = wires.at({source % ranks, rank});
                const int64_t needed = wire.at.at(key(gradient ? work.stage : source, work.place, gradient));
                for (; wire.taken <= needed; ++wire.taken) {
                    const int64_t message = wire.sent[wire.taken] / 2;
                    add(ActionOp::RECV, message / count, message % count, source % ranks);
                }
            }
            add(work.op, work.stage, work.place, -1);
            if (target(work) >= 0) add(ActionOp::SEND, work.stage - gradient, work.place, target(work));
        }
        offsets_.push_back(static_cast<int64_t>(op_.size()));
    }
}

void OneForwardOneBackward::price(const std::vector<int32_t> &order) {
    poll_(static_cast<int64_t>(op_.size()) / 64 + 1);
    const int64_t placed = static_cast<int64_t>(order.size());
    for (size_t i = 0; i < op_.size(); ++i) {
        const ActionOp op = static_cast<ActionOp>(op_[i]);
        if (!is_compute(op)) continue;
        const double *const table = op == ActionOp::FORWARD ? costs_.forward : costs_.backward;
        seconds_[i] = place_[i] < placed ? table[order[place_[i]] * costs_.stages + stage_[i]] : 0.0;
    }
}

double OneForwardOneBackward::makespan(const std::vector<int32_t> &order) {
    price(order);
    return replay_->makespan(seconds_.data(), costs_.transfer);
}

double OneForwardOneBackward::interval(const std::vector<int32_t> &order) {
    price(order);
    replay_->makespan(seconds_.data(), costs_.transfer, finish_.data());
    const int32_t place = static_cast<int32_t>(order.size());
    double volume = 0.0, busy = 0.0;
    for (size_t i = 1; i + 1 < first_rank_.size(); ++i) {
        const int32_t action = first_rank_[i], next = first_rank_[i + 1];
        busy += seconds_[action];
        const bool last_forward = static_cast<ActionOp>(op_[next]) == ActionOp::BACKWARD;
        if (place == 1 && last_forward)  // all forwards before the first backward
            return std::max(0.0, finish_[next] - seconds_[next] - finish_[first_rank_[0]] - busy);
        if (place_[action] == place && static_cast<ActionOp>(op_[action]) == ActionOp::FORWARD)
            volume += std::max(0.0, finish_[next] - seconds_[next] - finish_[first_rank_[i - 1]]);
    }
    return volume;
}

std::vector<int32_t> reorder_as_printed(const PipelineCosts &costs) {
    const int64_t count = costs.microbatches, stages = costs.stages, ranks = costs.ranks;
    std::vector<double> size(count, 0.0), forward(count, 0.0);  // in all; on the first rank
    for (int64_t k = 0; k < count; ++k) {
        for (int64_t s = 0; s < stages; ++s) {
            size[k] += costs.forward[k * stages + s] + costs.backward[k * stages + s];
            if (s % ranks == 0) forward[k] += costs.forward[k * stages + s];
        }
    }
    std::vector<int32_t> left(count);  // by rising size, ties by index
    std::iota(left.begin(), left.end(), 0);
    std::stable_sort(left.begin(), left.end(), [&](int32_t a, int32_t b) { return size[a] < size[b]; });
    std::vector<int32_t> order{left.front()};
    left.erase(left.begin());
    const int64_t behind = std::min<int64_t>(ranks - 1, static_cast<int64_t>(left.size()));
    const std::vector<int32_t> rear(left.begin(), left.begin() + behind);
    left.erase(left.begin(), left.begin() + behind);
    if (left.empty()) {
        order.insert(order.end(), rear.begin(), rear.end());
        return order;
    }
    OneForwardOneBackward pipeline(costs);
    Poll poll;
    while (!left.empty()) {
        double volume = pipeline.interval(order);
        int64_t wanted = order.size() == 1 ? std::max<int64_t>(1, ranks - 1) : 1;
        // Several microbatches share the first interval: each is the one closest to an equal part of the rest.
        for (; wanted > 0 && !left.empty(); --wanted) {
            poll(static_cast<int64_t>(left.size()));
            const double part = volume / static_cast<double>(wanted);
            const auto closest = std::min_element(left.begin(), left.end(), [&](int32_t a, int32_t b) {
                return std::abs(forward[a] - part) < std::abs(forward[b] - part);
            });
            volume -= forward[*closest];
            order.push_back(*closest);
            left.erase(closest);
        }
    }
    order.insert(order.end(), rear.begin(), rear.end());
    return order;
}

double pipeline_bound(const PipelineCosts &costs) {
    const int64_t count = costs.microbatches, stages = costs.stages, ranks = costs.ranks;
    const double hop = ranks > 1 ? costs.transfer : 0.0;
    double bound = 0.0;
    Poll poll;
    for (int64_t k = 0; k < count; ++k) {
        double alone = 2.0 * hop * static_cast<double>(stages - 1);
        for (int64_t s = 0; s < stages; ++s) alone += costs.forward[k * stages + s] + costs.backward[k * stages + s];
        bound = std::max(bound, alone);
    }
    for (int64_t rank = 0; rank < ranks; ++rank) {
        double work = 0.0;
        // The rank begins after some microbatch has passed the stages before it. It ends before another one (or the
        // same, if there is only one) has passed back through them.
        double first[2] = {INF, INF}, back[2] = {INF, INF};
        int64_t first_of = -1, back_of = -1;
        for (int64_t k = 0; k < count; ++k) {
            poll(stages);
            double head = hop * static_cast<double>(rank), tail = head;
            for (int64_t s = 0; s < stages; ++s) {
                const double f = costs.forward[k * stages + s], b = costs.backward[k * stages + s];
                if (s < rank) head += f, tail += b;
                if (s % ranks == rank) work += f + b;
            }
            if (head < first[0]) {
                first[1] = first[0], first[0] = head, first_of = k;
            } else {
                first[1] = std::min(first[1], head);
            }
            if (tail < back[0]) {
                back[1] = back[0], back[0] = tail, back_of = k;
            } else {
                back[1] = std::min(back[1], tail);
            }
        }
        double way = first[0] + back[0];
        if (first_of == back_of && count > 1) way = std::min(first[1] + back[0], first[0] + back[1]);
        bound = std::max(bound, work + way);
    }
    return bound;
}

Reordered reorder_microbatches(const PipelineCosts &costs, int64_t evaluations) {
    const int64_t count = costs.microbatches;
    OneForwardOneBackward pipeline(costs);
    Reordered best;
    best.order = reorder_as_printed(costs);
    best.bound = pipeline_bound(costs);
    best.printed_seconds = best.seconds = pipeline.makespan(best.order);
    best.evaluations = 1;
    const auto done = [&] { return best.evaluations >= evaluations || best.seconds <= best.bound * (1.0 + 1e-12); };

    std::vector<double> size(count, 0.0);
    for (int64_t i = 0; i < count * costs.stages; ++i) size[i / costs.stages] += costs.forward[i] + costs.backward[i];
    std::vector<int32_t> order(count);
    for (const int direction : {0, 1, -1}) {
        if (done()) break;
        std::iota(order.begin(), order.end(), 0);
        if (direction != 0)
            std::stable_sort(order.begin(), order.end(),
                             [&](int32_t a, int32_t b) { return direction * size[a] < direction * size[b]; });
        const double seconds = pipeline.makespan(order);
        ++best.evaluations;
        if (seconds < best.seconds) best.seconds = seconds, best.order = order;
    }

    // All permutations if there are enough evaluations: then the result is the optimum.
    int64_t permutations = 1;
    for (int64_t k = 2; k <= count && permutations <= evaluations; ++k)
        permutations = k > evaluations / permutations ? evaluations + 1 : permutations * k;
    if (done()) return best;
    if (permutations <= evaluations - best.evaluations) {
        std::iota(order.begin(), order.end(), 0);
        do {
            const double seconds = pipeline.makespan(order);
            ++best.evaluations;
            if (seconds < best.seconds) best.seconds = seconds, best.order = order;
        } while (!done() && std::next_permutation(order.begin(), order.end()));
        return best;
    }

    // Neighbours of an order: every microbatch moved to every other place, and every swap of two. A stride coprime to
    // their number visits each once per round in a scattered order, so that a short search is not limited to the first
    // places. Equal times are accepted too: one change rarely shortens the longest path. If no neighbour is better, the
    // search restarts from the best order with a few random swaps, until the evaluations are used up.
    const int64_t moves = count * (count - 1), neighbours = moves + moves / 2;
    if (neighbours == 0) return best;
    int64_t stride = std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(neighbours) * 0.381966));
    while (std::gcd(stride, neighbours) != 1) ++stride;  // terminates: neighbours + 1 is coprime
    uint64_t state = 0;
    const auto random = [&](int64_t below) {  // splitmix64: the same numbers on every platform
        uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return static_cast<int64_t>((z ^ (z >> 31)) % static_cast<uint64_t>(below));
    };
    std::vector<int32_t> tried(count);
    order = best.order;
    double current = best.seconds;
    int64_t at = 0, unchanged = 0;
    while (!done()) {
        if (unchanged == neighbours) {
            order = best.order;
            for (int swap = 0; swap < 3; ++swap) std::swap(order[random(count)], order[random(count)]);
            current = pipeline.makespan(order);
            ++best.evaluations;
            unchanged = 0;
            continue;
        }
        const bool move = at < moves;
        const int64_t pair = move ? at : at - moves;
        // Swaps: all pairs at distance 1, then 2, ..., on a circle.
        const int64_t i = pair % count, j = (i + pair / count + 1) % count;
        tried = order;
        if (!move)
            std::swap(tried[i], tried[j]);
        else if (i < j)
            std::rotate(tried.begin() + i, tried.begin() + i + 1, tried.begin() + j + 1);
        else
            std::rotate(tried.begin() + j, tried.begin() + i, tried.begin() + i + 1);
        at = (at + stride) % neighbours;
        const double seconds = pipeline.makespan(tried);
        ++best.evaluations;
        ++unchanged;
        if (seconds > current) continue;
        order.swap(tried);
        if (seconds < current) unchanged = 0;
        current = seconds;
        if (seconds < best.seconds) best.seconds = seconds, best.order = order;
    }
    return best;
}

}  // namespace interlace
