#include "balance/lpt.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace interlace {

namespace {

using Bin = std::pair<double, int32_t>;  // load, index; the order of pairs breaks ties by index

// Restores the min-heap after its root grew: one descent instead of a pop and a push.
void sift_root_down(std::vector<Bin> &heap, size_t size) {
    const Bin moved = heap[0];
    size_t hole = 0;
    for (size_t child = 1; child < size; child = 2 * hole + 1) {
        if (child + 1 < size && heap[child + 1] < heap[child]) ++child;
        if (!(heap[child] < moved)) break;
        heap[hole] = heap[child];
        hole = child;
    }
    heap[hole] = moved;
}

}  // namespace

std::vector<int32_t> lpt(const std::vector<double> &weights, int64_t bins, int64_t capacity) {
    std::vector<int32_t> order(weights.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
    });

    std::vector<Bin> heap(bins);  // equal loads, rising indices: a heap already
    for (int64_t bin = 0; bin < bins; ++bin) heap[bin] = {0.0, static_cast<int32_t>(bin)};
    std::vector<int64_t> items(bins, 0);
    std::vector<int32_t> bin_of(weights.size());
    size_t open = heap.size();
    for (const int32_t item : order) {
        const int32_t bin = heap[0].second;
        bin_of[item] = bin;
        heap[0].first += weights[item];
        if (++items[bin] == capacity) heap[0] = heap[--open];  // full: leaves the heap
        sift_root_down(heap, open);
    }
    return bin_of;
}

}  // namespace interlace
