#include "balance/batches/convolution.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "balance/bins/lpt.h"
#include "common/order.h"
#include "balance/batches/padded.h"
#include "balance/bins/refine.h"
#include "common/tournament.h"
#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr int PARTNERS = 8;
constexpr size_t MOST_PAIRS = 1 << 14;  // larger pairs of bins try moves only

struct Batch {
    double sum = 0.0;
    std::vector<int32_t> members;  // longest first
};

class Batches {
  public:
    Batches(const std::vector<double> &lengths, const std::vector<double> &attention, const std::vector<int32_t> &order,
            int64_t bins)
        : lengths_(lengths), attention_(attention), order_(order), rank_(order.size()), batches_(bins) {
        for (size_t i = 0; i < order.size(); ++i) rank_[order[i]] = static_cast<int32_t>(i);
    }

    double reset(const std::vector<int32_t> &bin_of) {
        for (Batch &batch : batches_) batch = {};
        Poll poll;
        for (const int32_t item : order_) {
            poll();
            batches_[bin_of[item]].members.push_back(item);
            batches_[bin_of[item]].sum += lengths_[item];
        }
        double most = 0.0;
        for (const Batch &batch : batches_) most = std::max(most, cost(batch, -1, -1));
        return most;
    }

    // Moves and exchanges between the costliest and the cheapest batch, while they lower the higher cost.
    std::vector<int32_t> improve() {
        const int64_t bins = static_cast<int64_t>(batches_.size());
        Tournament costliest(bins, 0.0), cheapest(bins, 0.0);
        const auto update = [&](int32_t bin) {
            const double now = cost(batches_[bin], -1, -1);
            costliest.set(bin, -now);
            cheapest.set(bin, now);
        };
        for (int32_t bin = 0; bin < bins; ++bin) update(bin);
        for (int64_t step = 0; step < 4 * bins + 100; ++step) {
            const int32_t from = costliest.index();
            std::vector<int32_t> tried;
            bool improved = false;
            while (!improved && static_cast<int>(tried.size()) < PARTNERS && cheapest.key() < -costliest.key()) {
                const int32_t to = cheapest.index();
                improved = to != from && exchange(batches_[from], batches_[to], -costliest.key());
                if (improved) {
                    update(from);
                    update(to);
                } else {
                    tried.push_back(to);
                    cheapest.set(to, Tournament::OUT);
                }
            }
            for (const int32_t bin : tried) update(bin);
            if (!improved) break;
        }
        std::vector<int32_t> bin_of(order_.size());
        for (int64_t bin = 0; bin < bins; ++bin)
            for (const int32_t item : batches_[bin].members) bin_of[item] = static_cast<int32_t>(bin);
        return bin_of;
    }

  private:
    // Cost of the batch without one member and with another item (-1: none).
    double cost(const Batch &batch, int32_t without, int32_t with) const {
        double sum = batch.sum;
        int64_t members = static_cast<int64_t>(batch.members.size());
        size_t first = 0;
        if (without >= 0) {
            sum -= lengths_[without];
            --members;
            if (batch.members[0] == without) first = 1;
        }
        double most = first < batch.members.size() ? attention_[batch.members[first]] : 0.0;
        if (with >= 0) {
            sum += lengths_[with];
            ++members;
            most = std::max(most, attention_[with]);
        }
        return batch_cost(sum, members, most);
    }

    // Applies the best move or exchange after which both batches cost less than `limit`.
    bool exchange(Batch &heavy, Batch &light, double limit) {
        double best = limit;
        int32_t give = -1, take = -1;
        const bool pairs = heavy.members.size() * light.members.size() <= MOST_PAIRS;
        for (const int32_t given : heavy.members) {
            poll_(pairs ? 1 + static_cast<int64_t>(light.members.size()) : 1);
            const auto consider = [&](int32_t taken) {
                const double reached = std::max(cost(heavy, given, taken), cost(light, taken, given));
                if (reached < best) {
                    best = reached;
                    give = given;
                    take = taken;
                }
            };
            consider(-1);
            if (pairs)
                for (const int32_t taken : light.members) consider(taken);
        }
        if (give < 0) return false;
        shift(heavy, light, give);
        if (take >= 0) shift(light, heavy, take);
        return true;
    }

    void shift(Batch &from, Batch &to, int32_t item) {
        from.members.erase(std::find(from.members.begin(), from.members.end(), item));
        const auto longer = [&](int32_t a, int32_t b) { return rank_[a] < rank_[b]; };
        to.members.insert(std::lower_bound(to.members.begin(), to.members.end(), item, longer), item);
        for (Batch *batch : {&from, &to}) {  // recomputed, so that rounding errors do not accumulate
            batch->sum = 0.0;
            for (const int32_t member : batch->members) batch->sum += lengths_[member];
        }
    }

    const std::vector<double> &lengths_, &attention_;
    const std::vector<int32_t> &order_;
    std::vector<int32_t> rank_;
    std::vector<Batch> batches_;
    Poll poll_;
};

// Algorithm 5: runs by falling length within the bottleneck of Algorithm 1. The remaining items go to the shortest
// batch. The printed algorithm opens one batch more than there are instances.
std::vector<int32_t> printed_batches(const std::vector<double> &lengths, const std::vector<int32_t> &order,
                                     int64_t bins, double bound) {
    std::vector<int32_t> bin_of(lengths.size());
    Tournament shortest(bins, 0.0);
    int64_t bin = 0, members = 0;
    size_t i = 0;
    Poll poll;
    for (; i < order.size(); ++i) {
        poll();
        const double length = lengths[order[i]];
        if (static_cast<double>(members + 1) * length > bound) {
            if (bin + 1 == bins) break;
            ++bin;
            members = 0;
        }
        bin_of[order[i]] = static_cast<int32_t>(bin);
        shortest.set(bin, shortest.key(bin) + length);
        ++members;
    }
    for (; i < order.size(); ++i) {
        poll();
        bin_of[order[i]] = shortest.index();
        shortest.set(shortest.index(), shortest.key() + lengths[order[i]]);
    }
    return bin_of;
}

}  // namespace

std::vector<int32_t> convolution_batches(const std::vector<double> &lengths, const std::vector<double> &attention,
                                         int64_t bins) {
    const int64_t n = static_cast<int64_t>(lengths.size());
    const std::vector<int32_t> order = descending_order(lengths);
    std::vector<double> costs(n);
    for (int64_t i = 0; i < n; ++i) costs[i] = lengths[i] + attention[i];

    const std::vector<int32_t> greedy = lpt(lengths, order, bins, n);
    const std::vector<int32_t> candidates[] = {
        greedy,
        printed_batches(lengths, order, bins, makespan(lengths, greedy, bins)),
        refine(lengths, order, greedy, bins, n),
        lpt(costs, order, bins, n),
        padded_batches(lengths, attention, order, bins),
    };
    Batches batches(lengths, attention, order, bins);
    const std::vector<int32_t> *best = nullptr;
    double least = 0.0;
    for (const std::vector<int32_t> &candidate : candidates) {
        const double reached = batches.reset(candidate);
        if (best == nullptr || reached < least) {
            best = &candidate;
            least = reached;
        }
    }
    batches.reset(*best);
    return batches.improve();
}

}  // namespace interlace
