#include "balance/zigzag.h"

namespace interlace {

std::vector<int32_t> zigzag(int64_t items, int64_t bins) {
    std::vector<int32_t> bin_of(items);
    const int64_t chunks = 2 * bins;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int32_t bin = static_cast<int32_t>(chunk < bins ? chunk : chunks - 1 - chunk);
        for (int64_t item = items * chunk / chunks; item < items * (chunk + 1) / chunks; ++item) bin_of[item] = bin;
    }
    return bin_of;
}

}  // namespace interlace
