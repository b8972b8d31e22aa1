#include "balance/bins/zigzag.h"

namespace interlace {

std::vector<int32_t> zigzag(int64_t items, int64_t bins) {
    std::vector<int32_t> bin_of;
    bin_of.reserve(items);
    const int64_t chunks = 2 * bins;
    for (int64_t chunk = 0; static_cast<int64_t>(bin_of.size()) < items; ++chunk) {
        const int64_t bin = chunk < bins ? chunk : chunks - 1 - chunk;
        const int64_t count = items / chunks + (chunk < items % chunks);
        bin_of.insert(bin_of.end(), count, static_cast<int32_t>(bin));
    }
    return bin_of;
}

}  // namespace interlace
