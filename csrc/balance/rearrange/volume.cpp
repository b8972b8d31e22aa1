#include "balance/rearrange/volume.h"

#include <algorithm>
#include <cmath>

#include "balance/rearrange/grouped_order.h"
#include "common/interrupt.h"

namespace interlace {

Volume volume_of_items(const std::vector<int32_t> &source, const std::vector<int32_t> &destination,
                       const std::vector<double> &sizes, int64_t instances, int64_t per_node) {
    Volume volume;
    volume.instances = instances;
    volume.per_node = per_node;
    volume.row_start.assign(instances + 1, 0);
    volume.row_sum.assign(instances, 0.0);
    int32_t row = -1;
    Poll poll;
    for (const int32_t item : grouped_order(source, destination, instances)) {
        poll();
        if (sizes[item] == 0) continue;
        const bool more = source[item] == row && volume.rows.back().other == destination[item];
        if (more) {
            volume.rows.back().value += sizes[item];
        } else {
            volume.rows.push_back({destination[item], sizes[item]});
        }
        row = source[item];
        volume.row_start[row + 1] = static_cast<int64_t>(volume.rows.size());
    }
    for (int64_t i = 0; i < instances; ++i) {
        volume.row_start[i + 1] = std::max(volume.row_start[i + 1], volume.row_start[i]);
        for (int64_t at = volume.row_start[i]; at < volume.row_start[i + 1]; ++at)
            volume.row_sum[i] += volume.rows[at].value;
    }
    transpose(volume);
    return volume;
}

void transpose(Volume &volume) {
    const int64_t d = volume.instances;
    volume.column_start.assign(d + 1, 0);
    Poll poll;
    for (const Volume::Entry &entry : volume.rows) ++volume.column_start[entry.other + 1];
    for (int64_t j = 0; j < d; ++j) volume.column_start[j + 1] += volume.column_start[j];
    std::vector<int64_t> next(volume.column_start.begin(), volume.column_start.end() - 1);
    volume.columns.resize(volume.rows.size());
    for (int64_t i = 0; i < d; ++i) {
        poll(volume.row_start[i + 1] - volume.row_start[i]);
        for (int64_t at = volume.row_start[i]; at < volume.row_start[i + 1]; ++at)
            volume.columns[next[volume.rows[at].other]++] = {static_cast<int32_t>(i), volume.rows[at].value};
    }
}

int normalise(Volume &volume) {
    int exponent = 0;
    std::frexp(*std::max_element(volume.row_sum.begin(), volume.row_sum.end()), &exponent);
    for (double &sum : volume.row_sum) sum = std::ldexp(sum, -exponent);
    for (std::vector<Volume::Entry> *entries : {&volume.rows, &volume.columns})
        for (Volume::Entry &entry : *entries) entry.value = std::ldexp(entry.value, -exponent);
    return exponent;
}

}  // namespace interlace
