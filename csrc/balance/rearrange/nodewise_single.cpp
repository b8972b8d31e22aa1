#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "balance/rearrange/nodewise.h"
#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr int64_t PASSES_PER_EFFORT = 20;
constexpr int ROOT_PASSES = 60, INNER_PASSES = 6;  // subgradient passes at the root of the tree and below

// Tests if c batches can bring all instances of a node strictly below a limit, if the node may choose first.
// Depth-first: the instance with the largest remainder, after what its best free batches could still do, must take one
// of its batches. A batch that was tried is closed to later branches. A branch ends if a weighted sum of the instances'
// remainders is more than the batches with the highest weighted sums can cover. The weights are multipliers, improved
// by subgradient steps from those of the branch before. Work is counted, so that the answer is the same on every rank.
class NodeSearch {
  public:
    NodeSearch(const Volume &volume, int64_t node, int64_t budget) : c_(volume.per_node), budget_(budget) {
        std::vector<int64_t> known(volume.instances, -1);
        for (int64_t row = 0; row < c_; ++row) {
            const int64_t instance = node * c_ + row;
            sums_.push_back(volume.row_sum[instance]);
            for (int64_t at = volume.row_start[instance]; at < volume.row_start[instance + 1]; ++at) {
                const auto [batch, value] = volume.rows[at];
                if (known[batch] < 0) {
                    known[batch] = static_cast<int64_t>(held_.size());
                    held_.emplace_back(c_, 0.0);
                }
                held_[known[batch]][row] = value;
            }
        }
        closed_.assign(held_.size(), 0);
        weight_.assign(c_, 1.0);
    }

    enum class Answer { possible, impossible, unknown };

    Answer below(double limit) {
        // Too many choices for the search to end, and a single step would take long.
        if (static_cast<int64_t>(held_.size()) * c_ > int64_t{1} << 16) return Answer::unknown;
        std::vector<double> excess(c_);
        for (int64_t row = 0; row < c_; ++row) excess[row] = sums_[row] - limit * (1 - 1e-9);
        return search(excess, c_, ROOT_PASSES);
    }

    int64_t left() const { return std::max<int64_t>(0, budget_); }

  private:
    // Sum of the `count` largest parts of open batches for one instance.
    double most(int64_t count, int64_t row) {
        poll_(1 + static_cast<int64_t>(held_.size()));
        scratch_.clear();
        for (size_t batch = 0; batch < held_.size(); ++batch)
            if (!closed_[batch]) scratch_.push_back({held_[batch][row], batch});
        count = std::min<int64_t>(count, scratch_.size());
        std::partial_sort(scratch_.begin(), scratch_.begin() + count, scratch_.end(), std::greater<Value>());
        double sum = 0.0;
        for (int64_t i = 0; i < count; ++i) sum += scratch_[i].first;
        return sum;
    }

    // True if some weights prove that `places` open batches cannot cover the remainder. Works in shares of it.
    bool hopeless(const std::vector<double> &excess, int64_t places, int passes) {
        double length = 0.5;
        std::vector<double> done(c_);
        for (int pass = 0; pass < passes; ++pass, length *= 0.93) {
            poll_(1 + static_cast<int64_t>(held_.size()) * c_);
            budget_ -= 1 + static_cast<int64_t>(held_.size()) * c_ / 1024;
            double needed = 0.0, possible = 0.0;
            for (int64_t row = 0; row < c_; ++row)
                if (excess[row] > 0) needed += weight_[row];
            scratch_.clear();
            for (size_t batch = 0; batch < held_.size(); ++batch) {
                if (closed_[batch]) continue;
                double sum = 0.0;
                for (int64_t row = 0; row < c_; ++row)
                    if (excess[row] > 0) sum += weight_[row] * std::min(1.0, held_[batch][row] / excess[row]);
                scratch_.push_back({sum, batch});
            }
            const int64_t taken = std::min<int64_t>(places, scratch_.size());
            std::partial_sort(scratch_.begin(), scratch_.begin() + taken, scratch_.end(), std::greater<Value>());
            for (int64_t i = 0; i < taken; ++i) possible += scratch_[i].first;
            if (possible < needed * (1 - 1e-9)) return true;
            // Rows that these batches do not cover get a higher weight, the others a lower one.
            std::fill(done.begin(), done.end(), 0.0);
            for (int64_t i = 0; i < taken; ++i)
                for (int64_t row = 0; row < c_; ++row)
                    if (excess[row] > 0) done[row] += std::min(1.0, held_[scratch_[i].second][row] / excess[row]);
            double total = 0.0;
            for (int64_t row = 0; row < c_; ++row) {
                if (excess[row] > 0) {
                    const double lack = std::clamp(1.0 - done[row], -1.0, 1.0);
                    weight_[row] = std::max(1e-6, weight_[row] * (1.0 + length * lack));
                }
                total += weight_[row];
            }
            for (double &weight : weight_) weight *= static_cast<double>(c_) / total;
        }
        return false;
    }

    Answer search(const std::vector<double> &excess, int64_t places, int passes) {
        if (*std::max_element(excess.begin(), excess.end()) <= 0) return Answer::possible;
        if (places == 0) return Answer::impossible;
        if (budget_ < 0) return Answer::unknown;
        int64_t tightest = -1;
        double tightness = 0.0;
        for (int64_t row = 0; row < c_; ++row) {
            if (excess[row] <= 0) continue;
            const double reach = most(places, row);
            if (reach < excess[row]) return Answer::impossible;
            if (excess[row] / reach > tightness) {
                tightness = excess[row] / reach;
                tightest = row;
            }
        }
        if (hopeless(excess, places, passes)) return Answer::impossible;

        std::vector<size_t> choices;
        for (size_t batch = 0; batch < held_.size(); ++batch)
            if (!closed_[batch] && held_[batch][tightest] > 0) choices.push_back(batch);
        std::stable_sort(choices.begin(), choices.end(),
                         [&](size_t a, size_t b) { return held_[a][tightest] > held_[b][tightest]; });
        // A batch fails if it covers no more for any instance than a batch that has failed.
        const auto no_better = [&](size_t batch, size_t other) {
            for (int64_t row = 0; row < c_; ++row)
                if (excess[row] > 0 && held_[batch][row] > held_[other][row] && held_[other][row] < excess[row])
                    return false;
            return true;
        };
        Answer answer = Answer::impossible;
        size_t tried = 0;
        for (; tried < choices.size() && answer == Answer::impossible; ++tried) {
            const size_t batch = choices[tried];
            closed_[batch] = 1;
            if (std::any_of(choices.begin(), choices.begin() + tried,
                            [&](size_t other) { return no_better(batch, other); }))
                continue;
            std::vector<double> left = excess;
            for (int64_t row = 0; row < c_; ++row) left[row] -= held_[batch][row];
            answer = search(left, places - 1, INNER_PASSES);
        }
        while (tried > 0) closed_[choices[--tried]] = 0;
        return answer;
    }

    const int64_t c_;
    int64_t budget_;
    std::vector<double> sums_;
    std::vector<std::vector<double>> held_;  // by batch, by instance of the node
    std::vector<char> closed_;
    std::vector<double> weight_;  // per instance
    using Value = std::pair<double, size_t>;
    std::vector<Value> scratch_;
    Poll poll_;
};

// Number of batches that an instance must keep to send less than a limit.
int64_t batches_needed(const Volume &volume, int64_t instance, double limit) {
    std::vector<double> held;
    for (int64_t at = volume.row_start[instance]; at < volume.row_start[instance + 1]; ++at)
        held.push_back(volume.rows[at].value);
    std::sort(held.begin(), held.end(), std::greater<double>());
    double sends = volume.row_sum[instance];
    int64_t count = 0;
    for (; count < static_cast<int64_t>(held.size()) && sends > limit * (1 - 1e-9); ++count) sends -= held[count];
    return count;
}

}  // namespace

double nodewise_single_bound(const Volume &volume, const std::vector<double> &sent, double bound, int64_t effort) {
    const double reached = *std::max_element(sent.begin(), sent.end());
    if (bound >= reached || effort == 0) return bound;
    int64_t budget = PASSES_PER_EFFORT * std::min(effort, int64_t{1} << 40);
    std::vector<int64_t> nodes;
    std::vector<double> heaviest(volume.nodes(), 0.0);
    std::vector<int64_t> needed(volume.nodes(), 0);
    for (int64_t i = 0; i < volume.instances; ++i) {
        const int64_t node = i / volume.per_node;
        heaviest[node] = std::max(heaviest[node], sent[i]);
        needed[node] += batches_needed(volume, i, reached);
    }
    for (int64_t node = 0; node < volume.nodes(); ++node)
        if (heaviest[node] > bound) nodes.push_back(node);
    // Nodes that must keep most come first: one of them usually holds the placement's bottleneck for good.
    std::stable_sort(nodes.begin(), nodes.end(), [&](int64_t a, int64_t b) {
        return needed[a] != needed[b] ? needed[a] > needed[b] : heaviest[a] > heaviest[b];
    });
    if (nodes.size() > 16) nodes.resize(16);
    for (const int64_t node : nodes) {
        const auto out_of_reach = [&](double limit) {
            NodeSearch search(volume, node, budget / 3);  // the first searches are the most informative
            const NodeSearch::Answer answer = search.below(limit);
            budget -= budget / 3 - search.left();
            return answer == NodeSearch::Answer::impossible;
        };
        double low = bound, high = heaviest[node];
        if (out_of_reach(high)) low = high * (1 - 1e-9);
        while (low < high * (1 - 1e-6)) {
            const double limit = low + (high - low) / 2;
            if (out_of_reach(limit))
                low = limit * (1 - 1e-9);
            else
                high = limit;
        }
        bound = std::max(bound, low);
    }
    return std::min(bound, reached);
}

}  // namespace interlace
