#include "balance/microbatches/bottleneck_match.h"

#include <algorithm>
#include <cmath>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

namespace {

int lowest_bit(uint64_t value) { return __builtin_ctzll(value); }

// Bit i is set if value i (of up to 64) is at most the threshold. Compilers do not generate the movemask by themselves.
uint64_t at_most(const double *values, int64_t count, double threshold) {
    uint64_t bits = 0;
    int64_t i = 0;
#if defined(__SSE2__)
    const __m128d limit = _mm_set1_pd(threshold);
    for (; i + 4 <= count; i += 4) {
        const int low = _mm_movemask_pd(_mm_cmple_pd(_mm_loadu_pd(values + i), limit));
        const int high = _mm_movemask_pd(_mm_cmple_pd(_mm_loadu_pd(values + i + 2), limit));
        bits |= static_cast<uint64_t>(low | high << 2) << i;
    }
#endif
    for (; i < count; ++i) bits |= static_cast<uint64_t>(values[i] <= threshold) << i;
    return bits;
}

// Keeps the values with low < value < high, in order. Branchless, since the outcomes are not predictable.
void keep_between(std::vector<double> &values, double low, double high) {
    size_t kept = 0;
    constexpr size_t PIECE = 1 << 20;
    for (size_t start = 0; start < values.size(); start += PIECE) {
        check_interrupt();
        for (size_t i = start; i < std::min(values.size(), start + PIECE); ++i) {
            const double value = values[i];
            values[kept] = value;
            kept += (value > low) & (value < high);
        }
    }
    values.resize(kept);
}

// A value near the median: the median of at most 513 of the values.
double near_median(const std::vector<double> &values) {
    std::vector<double> sample;
    const size_t step = values.size() / 512 + 1;
    for (size_t i = step / 2; i < values.size(); i += step) sample.push_back(values[i]);
    const auto middle = sample.begin() + static_cast<std::ptrdiff_t>(sample.size() / 2);
    std::nth_element(sample.begin(), middle, sample.end());
    return *middle;
}

class Matcher {
  public:
    Matcher(const std::vector<double> &cost, const std::vector<double> &alone, int64_t columns)
        : cost_(cost), alone_(alone), rows_(static_cast<int64_t>(alone.size())), columns_(columns),
          words_((columns + 63) / 64), allowed_(rows_ * words_), column_of(rows_, -1), row_of(columns, -1),
          layer_(rows_), unseen_(words_) {}

    // True if every row whose alone cost is above the threshold gets a column within it. Earlier matches are kept if
    // they are within the threshold. column_of and row_of hold the matching found, complete or not.
    bool feasible(double threshold) {
        std::vector<int32_t> unmatched;
        for (int64_t row = 0; row < rows_; ++row) {
            poll_(1 + words_);
            if (alone_[row] <= threshold) {
                release(row);
                continue;
            }
            const double *const costs = &cost_[row * columns_];
            for (int64_t word = 0; word < words_; ++word) {
                const int64_t count = std::min<int64_t>(64, columns_ - word * 64);
                allowed_[row * words_ + word] = at_most(costs + word * 64, count, threshold);
            }
            if (column_of[row] >= 0 && costs[column_of[row]] > threshold) release(row);
        }
        for (int64_t row = 0; row < rows_; ++row) {
            if (alone_[row] <= threshold || column_of[row] >= 0) continue;
            poll_(1 + words_);
            if (!take_free_column(row)) unmatched.push_back(static_cast<int32_t>(row));
        }
        while (!unmatched.empty()) {  // a phase: shortest augmenting paths that share no row
            if (!layers(unmatched)) return false;
            std::fill(unseen_.begin(), unseen_.end(), ~uint64_t{0});
            std::vector<int32_t> left;
            for (const int32_t row : unmatched)
                if (!augment(row)) left.push_back(row);
            unmatched.swap(left);
        }
        return true;
    }

    void forget() {
        std::fill(column_of.begin(), column_of.end(), -1);
        std::fill(row_of.begin(), row_of.end(), -1);
    }

  private:
    const std::vector<double> &cost_, &alone_;
    const int64_t rows_, columns_, words_;
    std::vector<uint64_t> allowed_;  // [rows, words]: columns within the threshold

  public:
    std::vector<int32_t> column_of, row_of;

  private:
    std::vector<int32_t> layer_;    // per row: steps from an unmatched row, -1 = not reached
    std::vector<uint64_t> unseen_;  // columns not yet visited by this search
    int32_t last_ = 0;              // the layer whose rows see a free column

    void release(int64_t row) {
        if (column_of[row] < 0) return;
        row_of[column_of[row]] = -1;
        column_of[row] = -1;
    }

    bool take_free_column(int64_t row) {
        for (int64_t word = 0; word < words_; ++word) {
            for (uint64_t bits = allowed_[row * words_ + word]; bits != 0; bits &= bits - 1) {
                const int64_t column = word * 64 + lowest_bit(bits);
                if (row_of[column] >= 0) continue;
                row_of[column] = static_cast<int32_t>(row);
                column_of[row] = static_cast<int32_t>(column);
                return true;
            }
        }
        return false;
    }

    // Breadth first from the unmatched rows over allowed columns to the rows that hold them, until a column is free.
    bool layers(const std::vector<int32_t> &unmatched) {
        std::fill(layer_.begin(), layer_.end(), -1);
        std::fill(unseen_.begin(), unseen_.end(), ~uint64_t{0});
        for (const int32_t row : unmatched) layer_[row] = 0;
        std::vector<int32_t> current = unmatched, next;
        bool found = false;
        for (last_ = 0; !current.empty() && !found; ++last_) {
            next.clear();
            for (const int32_t row : current) {
                poll_(1 + words_);
                for (int64_t word = 0; word < words_; ++word) {
                    uint64_t bits = allowed_[row * words_ + word] & unseen_[word];
                    unseen_[word] &= ~bits;
                    for (; bits != 0; bits &= bits - 1) {
                        const int32_t holder = row_of[word * 64 + lowest_bit(bits)];
                        if (holder < 0) {
                            found = true;
                        } else if (layer_[holder] < 0) {
                            layer_[holder] = last_ + 1;
                            next.push_back(holder);
                        }
                    }
                }
            }
            current.swap(next);
        }
        --last_;
        return found;
    }

    // Depth first along the layers. A column that was used, or led to no free column, is not tried again in this phase.
    // The depth can reach the number of rows, so an explicit stack avoids overflow of the thread's stack.
    bool augment(int32_t root) {
        std::vector<int32_t> &path = path_;
        path.assign(1, root);
        while (!path.empty()) {
            poll_(1 + words_);
            const int32_t row = path.back();
            int64_t column = -1;
            for (int64_t word = 0; word < words_ && column < 0; ++word) {
                for (uint64_t bits = allowed_[row * words_ + word] & unseen_[word]; bits != 0; bits &= bits - 1) {
                    const int64_t candidate = word * 64 + lowest_bit(bits);
                    const int32_t holder = row_of[candidate];
                    const bool leads = holder < 0 ? layer_[row] == last_ : layer_[holder] == layer_[row] + 1;
                    if (!leads) continue;
                    column = candidate;
                    break;
                }
            }
            if (column < 0) {
                path.pop_back();
                if (!tried_.empty()) tried_.pop_back();
                continue;
            }
            unseen_[column / 64] &= ~(uint64_t{1} << (column % 64));
            tried_.push_back(static_cast<int32_t>(column));
            if (row_of[column] >= 0) {
                path.push_back(row_of[column]);
                continue;
            }
            for (size_t i = 0; i < path.size(); ++i) {
                column_of[path[i]] = tried_[i];
                row_of[tried_[i]] = path[i];
            }
            tried_.clear();
            return true;
        }
        return false;
    }

    std::vector<int32_t> path_, tried_;  // rows, and the column that each goes to
    Poll poll_;
};

}  // namespace

BottleneckMatch bottleneck_match(const std::vector<double> &cost, const std::vector<double> &alone, int64_t columns) {
    const int64_t rows = static_cast<int64_t>(alone.size());
    Matcher matcher(cost, alone, columns);

    // No row can be below its own minimum.
    double least = -INF;
    Poll poll;
    for (int64_t row = 0; row < rows; ++row) {
        poll(columns / 16 + 1);
        double best = alone[row];
        for (int64_t column = 0; column < columns; ++column) best = std::min(best, cost[row * columns + column]);
        least = std::max(least, best);
    }
    BottleneckMatch result{least, std::vector<int32_t>(rows, -1)};
    if (least == INF) return result;

    if (!matcher.feasible(least)) {
        // The smallest feasible value, above the infeasible `low` and at most the feasible `threshold`.
        double low = least, threshold = INF;
        std::vector<double> values = cost;
        values.insert(values.end(), alone.begin(), alone.end());
        keep_between(values, low, threshold);
        std::vector<int32_t> columns_kept = matcher.column_of, rows_kept = matcher.row_of;
        while (!values.empty()) {
            const double probed = near_median(values);
            if (matcher.feasible(probed)) {
                threshold = probed;
                matcher.column_of = columns_kept;
                matcher.row_of = rows_kept;
            } else {
                low = probed;
                columns_kept = matcher.column_of;
                rows_kept = matcher.row_of;
            }
            keep_between(values, low, threshold);
        }
        result.threshold = threshold;
        if (threshold == INF) return result;
    }
    matcher.forget();
    matcher.feasible(result.threshold);
    result.partner = matcher.column_of;
    return result;
}

}  // namespace interlace
