#include "balance/volume.h"

#include <algorithm>
#include <cmath>

#include "common/interrupt.h"

namespace interlace {

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
