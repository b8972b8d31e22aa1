#include "balance/volume.h"

namespace interlace {

void transpose(Volume &volume) {
    const int64_t d = volume.instances;
    volume.column_start.assign(d + 1, 0);
    for (const Volume::Entry &entry : volume.rows) ++volume.column_start[entry.other + 1];
    for (int64_t j = 0; j < d; ++j) volume.column_start[j + 1] += volume.column_start[j];
    std::vector<int64_t> next(volume.column_start.begin(), volume.column_start.end() - 1);
    volume.columns.resize(volume.rows.size());
    for (int64_t i = 0; i < d; ++i)
        for (int64_t at = volume.row_start[i]; at < volume.row_start[i + 1]; ++at)
            volume.columns[next[volume.rows[at].other]++] = {static_cast<int32_t>(i), volume.rows[at].value};
}

}  // namespace interlace
