#include <algorithm>
#include <cmath>
#include <functional>

#include "balance/rearrange/nodewise.h"
#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

namespace {

// The relaxation is: minimize t subject to
//     row_sum[i] - sum_j v[i, j] x[node(i), j] <= t,   sum_g x[g, j] <= 1,   sum_j x[g, j] <= c,   0 <= x <= 1.
// (v is not negative, so leaving a place empty never helps: equalities would give the same t.) With multipliers
// lambda >= 0 of sum 1 for the first and prices p >= 0 for the second group of constraints, the rest decomposes by
// node:
//     D = sum_i lambda_i row_sum[i] - sum_j p_j - sum_g (the c largest of max(0, sum_{i in g} lambda_i v[i, j] - p_j)).
class Dual {
  public:
    explicit Dual(const Volume &volume)
        : volume_(volume), score_(volume.instances, 0.0), rows_(volume.instances), columns_(volume.instances),
          is_touched_(volume.instances, 0) {}

    // Returns D; its subgradient is then in rows() and columns().
    double evaluate(const std::vector<double> &lambda, const std::vector<double> &price) {
        const int64_t c = volume_.per_node;
        double value = 0.0;
        for (int64_t j = 0; j < volume_.instances; ++j) {
            value -= price[j];
            columns_[j] = -1.0;
        }
        rows_ = volume_.row_sum;
        for (int64_t node = 0; node < volume_.nodes(); ++node) {
            touched_.clear();
            for (int64_t i = node * c; i < (node + 1) * c; ++i) {
                if (lambda[i] == 0) continue;
                poll_(1 + volume_.row_start[i + 1] - volume_.row_start[i]);
                value += lambda[i] * volume_.row_sum[i];
                for (int64_t at = volume_.row_start[i]; at < volume_.row_start[i + 1]; ++at) {
                    const auto [batch, held] = volume_.rows[at];
                    if (!is_touched_[batch]) touched_.push_back(batch);  // the score may still be 0: products underflow
                    is_touched_[batch] = 1;
                    score_[batch] += lambda[i] * held;
                }
            }
            poll_(1 + static_cast<int64_t>(touched_.size()));
            for (const int32_t batch : touched_) score_[batch] -= price[batch];
            const int64_t count = std::min<int64_t>(c, touched_.size());
            std::partial_sort(touched_.begin(), touched_.begin() + count, touched_.end(), [&](int32_t a, int32_t b) {
                return score_[a] != score_[b] ? score_[a] > score_[b] : a < b;
            });
            for (int64_t k = 0; k < count; ++k) {
                const int32_t batch = touched_[k];
                if (!(score_[batch] > 0)) break;
                value -= score_[batch];
                columns_[batch] += 1.0;
                const auto begin = volume_.columns.begin() + volume_.column_start[batch];
                const auto end = volume_.columns.begin() + volume_.column_start[batch + 1];
                auto at = std::lower_bound(begin, end, node * c,
                                           [](const Volume::Entry &entry, int64_t row) { return entry.other < row; });
                for (; at != end && at->other < (node + 1) * c; ++at) rows_[at->other] -= at->value;
            }
            for (const int32_t batch : touched_) {
                score_[batch] = 0.0;
                is_touched_[batch] = 0;
            }
        }
        return value;
    }

    const std::vector<double> &rows() const { return rows_; }
    const std::vector<double> &columns() const { return columns_; }

  private:
    const Volume &volume_;
    std::vector<double> score_, rows_, columns_;
    std::vector<int32_t> touched_;  // batches with a part on the node's instances
    std::vector<char> is_touched_;
    Poll poll_;
};

// The nearest point of {x >= 0, sum x = 1}.
void project_to_simplex(std::vector<double> &x) {
    std::vector<double> sorted = x;
    std::sort(sorted.begin(), sorted.end(), std::greater<double>());
    double sum = 0.0, shift = 0.0;
    for (size_t k = 0; k < sorted.size(); ++k) {
        sum += sorted[k];
        const double candidate = (sum - 1.0) / static_cast<double>(k + 1);
        if (sorted[k] <= candidate) break;
        shift = candidate;
    }
    double total = 0.0;
    for (double &value : x) total += value = std::max(0.0, value - shift);
    for (double &value : x) value /= total;
}

}  // namespace

double nodewise_bound(const Volume &volume, const std::vector<double> &sent, int64_t iterations) {
    const int64_t d = volume.instances;
    const double reached = *std::max_element(sent.begin(), sent.end());
    Dual dual(volume);
    std::vector<double> best_lambda(d, 0.0), best_price(d, 0.0);
    double best = nodewise_simple_bound(volume);

    // Prices are sums of lambda times volume, so their scale is the volume per unit of lambda.
    double squares = 0.0;
    for (const Volume::Entry &entry : volume.rows) squares += entry.value * entry.value;
    const double scale = std::sqrt(squares / static_cast<double>(std::max<size_t>(1, volume.rows.size())));
    // At the optimum only instances with the largest sent volume count. The tight ones of a placement approximate them.
    std::vector<double> lambda(d, 0.0), price(d, 0.0);
    for (int64_t i = 0; i < d; ++i) lambda[i] = sent[i] >= 0.97 * reached ? 1.0 : 0.0;
    project_to_simplex(lambda);
    best_lambda = lambda;
    double pace = 1.0, climbed = -INF;
    int64_t stale = 0;
    for (int64_t step = 0; step < iterations && best < reached * (1 - 1e-9); ++step) {
        const double value = dual.evaluate(lambda, price);
        best = std::max(best, value);
        if (value > climbed) {
            stale = value > climbed + 1e-3 * (reached - climbed) ? 0 : stale + 1;
            climbed = value;
            best_lambda = lambda;
            best_price = price;
        } else {
            ++stale;
        }
        if (stale >= 20) {
            pace /= 2;
            stale = 0;
            lambda = best_lambda;
            price = best_price;
            if (pace < 1e-3) break;
            continue;
        }
        double mean = 0.0, norm = 0.0;
        for (int64_t i = 0; i < d; ++i) mean += lambda[i] * dual.rows()[i];
        for (int64_t i = 0; i < d; ++i) {
            const double along = dual.rows()[i] - mean;
            if (lambda[i] > 0 || along > 0) norm += along * along;
            if (price[i] > 0 || dual.columns()[i] > 0) norm += scale * dual.columns()[i] * scale * dual.columns()[i];
        }
        if (norm == 0) break;
        const double length = pace * (reached - value) / norm;
        for (int64_t i = 0; i < d; ++i) {
            const double along = dual.rows()[i] - mean;
            if (lambda[i] > 0 || along > 0) lambda[i] += length * along;
            if (price[i] > 0 || dual.columns()[i] > 0)
                price[i] = std::max(0.0, price[i] + length * scale * scale * dual.columns()[i]);
        }
        project_to_simplex(lambda);
    }
    return best;
}

}  // namespace interlace
