#include "plan/instantiate.h"

#include <algorithm>
#include <limits>

#include "plan/split_batch.h"

namespace interlace {

namespace {

// With more pipelines possible than microbatches, each count of pipelines is a state of its own; otherwise only "how many
// of the wanted ones" matters, and the last state stands for any number from there on.
bool counts_each(int64_t most, int64_t microbatches) { return most > microbatches; }

class Search {
public:
    Search(const std::vector<int64_t> &sizes, const std::vector<double> &times, int64_t nodes, int64_t pipelines,
           int64_t microbatches)
        : sizes_(sizes), times_(times), nodes_(nodes), pipelines_(pipelines), microbatches_(microbatches) {
        const int64_t most = nodes / *std::min_element(sizes.begin(), sizes.end());
        exact_ = counts_each(most, microbatches);
        states_ = instantiation_states(nodes, most, pipelines, microbatches) / (nodes + 1);
    }

    Instantiation solve() {
        Instantiation best{{}, {}, std::numeric_limits<double>::infinity()};
        double high = *std::max_element(times_.begin(), times_.end()) * static_cast<double>(microbatches_);
        double low = 0.0;
        if (!probe(high, best)) return best;
        high = best.time;
        while (low < high) {
            double middle = low + (high - low) / 2;
            if (!(middle < high)) middle = low;
            if (probe(middle, best)) {
                high = best.time;
            } else {
                low = std::numeric_limits<double>::infinity();  // the next time at which some template runs one more
                for (size_t j = 0; j < times_.size(); ++j)
                    if (runs_[j] < microbatches_) low = std::min(low, static_cast<double>(runs_[j] + 1) * times_[j]);
            }
        }
        return best;
    }

private:
    // Whether some combination runs all microbatches within the limit; if so, the one that could run most.
    bool probe(double limit, Instantiation &found) {
        runs_.clear();
        for (const double time : times_) runs_.push_back(microbatches_within(limit, time, microbatches_));
        const std::vector<size_t> items = exact_ ? runnable() : undominated();
        value_.assign((nodes_ + 1) * states_, -1);
        item_.resize(value_.size());
        from_.resize(value_.size());
        value_[0] = 0;
        for (int64_t node = 1; node <= nodes_; ++node) {
            for (const size_t j : items) {
                if (sizes_[j] > node) continue;
                for (int64_t state = 0; state < states_; ++state) {
                    const int64_t before = value_[(node - sizes_[j]) * states_ + state];
                    if (before < 0 || (exact_ && state + 1 == states_)) continue;
                    const int64_t next = std::min(state + 1, states_ - 1);
                    if (before + runs_[j] <= value_[node * states_ + next]) continue;
                    value_[node * states_ + next] = before + runs_[j];
                    item_[node * states_ + next] = static_cast<int32_t>(j);
                    from_[node * states_ + next] = static_cast<int32_t>(state);
                }
            }
        }
        int64_t state = -1;
        for (int64_t count = std::min(pipelines_, states_); count < states_; ++count)
            if (value_[nodes_ * states_ + count] >= microbatches_ &&
                (state < 0 || value_[nodes_ * states_ + count] > value_[nodes_ * states_ + state]))
                state = count;
        if (state < 0) return false;

        found.counts.assign(sizes_.size(), 0);
        for (int64_t node = nodes_; node > 0;) {
            const int64_t place = node * states_ + state;
            ++found.counts[item_[place]];
            node -= sizes_[item_[place]];
            state = from_[place];
        }
        std::vector<double> each;
        for (size_t j = 0; j < sizes_.size(); ++j) each.insert(each.end(), found.counts[j], times_[j]);
        found.microbatches = split_min_max(each, microbatches_);
        found.time = 0.0;
        for (size_t i = 0; i < each.size(); ++i)
            found.time = std::max(found.time, static_cast<double>(found.microbatches[i]) * each[i]);
        return true;
    }

    std::vector<size_t> runnable() const {
        std::vector<size_t> items;
        for (size_t j = 0; j < sizes_.size(); ++j)
            if (runs_[j] > 0) items.push_back(j);
        return items;
    }

    // Templates that run more than any combination of smaller ones on as many nodes. The others can be replaced, which
    // only adds pipelines.
    std::vector<size_t> undominated() const {
        std::vector<size_t> order = runnable(), items;
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes_[a] < sizes_[b]; });
        std::vector<int64_t> best(nodes_ + 1, -1);
        best[0] = 0;
        size_t next = 0;
        for (int64_t node = 1; node <= nodes_; ++node) {
            for (const size_t j : items)
                if (best[node - sizes_[j]] >= 0)
                    best[node] = std::max(best[node], best[node - sizes_[j]] + runs_[j]);
            if (next == order.size() || sizes_[order[next]] != node) continue;
            const size_t j = order[next++];
            if (runs_[j] <= best[node]) continue;
            best[node] = runs_[j];
            items.push_back(j);
        }
        return items;
    }

    const std::vector<int64_t> &sizes_;
    const std::vector<double> &times_;
    int64_t nodes_, pipelines_, microbatches_, states_;
    bool exact_;
    std::vector<int64_t> runs_, value_;
    std::vector<int32_t> item_, from_;
};

}  // namespace

int64_t instantiation_states(int64_t nodes, int64_t most, int64_t pipelines, int64_t microbatches) {
    return (nodes + 1) * ((counts_each(most, microbatches) ? microbatches : pipelines) + 1);
}

Instantiation best_instantiation(const std::vector<int64_t> &sizes, const std::vector<double> &times, int64_t nodes,
                                 int64_t pipelines, int64_t microbatches) {
    return Search(sizes, times, nodes, pipelines, microbatches).solve();
}

}  // namespace interlace
