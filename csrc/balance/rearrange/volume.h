#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// The non-zero volumes of batch j on instance i, by instance and by batch. Instances c * g .. c * (g + 1) - 1 share
// node g.
struct Volume {
    struct Entry {
        int32_t other;  // the batch of an instance's entry, the instance of a batch's
        double value;
    };

    int64_t instances = 0, per_node = 1;
    std::vector<int64_t> row_start, column_start;
    std::vector<Entry> rows, columns;  // by rising number within each row and column
    std::vector<double> row_sum;

    int64_t nodes() const { return instances / per_node; }
};

// Volumes given by single items: a source (the instance), a destination (the batch) and a size each.
Volume volume_of_items(const std::vector<int32_t> &source, const std::vector<int32_t> &destination,
                       const std::vector<double> &sizes, int64_t instances, int64_t per_node);

// Fills in columns from rows.
void transpose(Volume &volume);

// Divides all values by the power of two above the largest sum of a row and returns the exponent. Exact, except for
// values that are negligible against the largest.
int normalise(Volume &volume);

}  // namespace interlace
