#include "balance/bins/exact.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "balance/bins/lower_bound.h"
#include "balance/bins/lpt.h"
#include "common/order.h"
#include "balance/bins/refine.h"
#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr int64_t STEPS_BETWEEN_LOOKS = 1 << 16;  // between checks of the clock

class Search {
  public:
    Search(const std::vector<double> &weights, std::vector<int32_t> order, int64_t bins, int64_t capacity)
        : weights_(weights), order_(std::move(order)), bins_(bins), capacity_(capacity), whole_(exactly_whole(weights)),
          left_(weights.size() + 1, 0.0), loads_(bins, 0.0), items_(bins, 0), frames_(weights.size()) {
        for (size_t depth = weights.size(); depth-- > 0;) left_[depth] = left_[depth + 1] + weights_[order_[depth]];
    }

    // Improves `best`. Returns true if the tree was searched completely (or up to the bound).
    bool run(ExactAssignment &best, const int64_t most_nodes, double seconds) {
        const auto start = std::chrono::steady_clock::now();
        const auto out_of_time = [&] {
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds;
        };
        const size_t n = order_.size();
        size_t depth = 0;
        frames_[0] = {};
        int64_t nodes = most_nodes, steps = 0;
        while (nodes > 0) {
            if ((steps += bins_) >= STEPS_BETWEEN_LOOKS) {
                steps = 0;
                check_interrupt();
                if (out_of_time()) throw OutOfTime{most_nodes - nodes, best.makespan, best.bound};
            }
            Frame &frame = frames_[depth];
            if (frame.bin >= 0) take_back(frame);
            if (!place_next(depth, best.makespan)) {
                if (depth == 0) return true;
                --depth;
                continue;
            }
            --nodes;
            if (depth + 1 < n) {
                if (hopeless(depth + 1, best.makespan)) continue;
                frames_[++depth] = {};
                continue;
            }
            const double reached = *std::max_element(loads_.begin(), loads_.end());
            if (!(reached < best.makespan)) continue;
            best.makespan = reached;
            for (size_t d = 0; d < n; ++d) best.bin_of[order_[d]] = static_cast<int32_t>(frames_[d].bin);
            if (reached <= best.bound) return true;
        }
        return false;
    }

  private:
    struct Frame {
        int64_t bin = -1;   // bin of the item at this depth
        double before = 0;  // that bin's load without it
        double tried_load = -1;
        int64_t tried_items = -1;
    };

    void take_back(Frame &frame) {
        loads_[frame.bin] = frame.before;
        --items_[frame.bin];
        frame.bin = -1;
    }

    // The next lightest bin to try, by (load, items, number). Of bins equal in the first two, only one is tried.
    bool place_next(size_t depth, double best) {
        Frame &frame = frames_[depth];
        const double weight = weights_[order_[depth]];
        const bool twin = depth > 0 && weights_[order_[depth - 1]] == weight;
        int64_t chosen = -1;
        for (int64_t bin = twin ? frames_[depth - 1].bin : 0; bin < bins_; ++bin) {
            const double load = loads_[bin];
            if (items_[bin] == capacity_ || !(load + weight < best)) continue;
            if (load < frame.tried_load || (load == frame.tried_load && items_[bin] <= frame.tried_items)) continue;
            if (chosen < 0 || load < loads_[chosen] || (load == loads_[chosen] && items_[bin] < items_[chosen]))
                chosen = bin;
        }
        if (chosen < 0) return false;
        frame = {chosen, loads_[chosen], loads_[chosen], items_[chosen]};
        loads_[chosen] += weight;
        ++items_[chosen];
        return true;
    }

    bool hopeless(size_t depth, double best) const {
        const double smallest = weights_[order_.back()];
        double usable = 0.0;
        for (int64_t bin = 0; bin < bins_; ++bin) {
            if (!(loads_[bin] < best)) return true;  // a choice from before a new best
            const double room = best - loads_[bin] - (whole_ ? 1.0 : 0.0);
            if (items_[bin] < capacity_ && room >= smallest) usable += room;
        }
        return usable < left_[depth] * (1 - 1e-12);
    }

    const std::vector<double> &weights_;
    const std::vector<int32_t> order_;
    const int64_t bins_, capacity_;
    const bool whole_;
    std::vector<double> left_;  // weight of the items from a depth on
    std::vector<double> loads_;
    std::vector<int64_t> items_;
    std::vector<Frame> frames_;
};

}  // namespace

ExactAssignment exact_assignment(const std::vector<double> &weights, int64_t bins, int64_t capacity, int64_t nodes,
                                 double seconds) {
    std::vector<int32_t> order = descending_order(weights);
    ExactAssignment best;
    best.bin_of = refine(weights, order, lpt(weights, order, bins, capacity), bins, capacity);
    best.makespan = makespan(weights, best.bin_of, bins);
    best.bound = assignment_lower_bound(weights, bins, capacity);
    const double rounding = 1 + 1e-12;
    best.proven = best.makespan <= best.bound * rounding;
    if (!best.proven) best.proven = Search(weights, std::move(order), bins, capacity).run(best, nodes, seconds);
    best.makespan = makespan(weights, best.bin_of, bins);
    if (best.proven) best.bound = best.makespan;
    return best;
}

}  // namespace interlace
