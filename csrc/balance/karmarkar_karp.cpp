#include "balance/karmarkar_karp.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "common/interrupt.h"

namespace interlace {

namespace {

struct Bin {
    double load;
    int32_t head, tail;  // its items, a list linked by `next`
};

bool heavier(const Bin &a, const Bin &b) { return a.load != b.load ? a.load > b.load : a.head < b.head; }

struct Ranked {
    double spread;
    int32_t id;
    bool operator<(const Ranked &other) const { return spread != other.spread ? spread < other.spread : id > other.id; }
};

}  // namespace

std::vector<int32_t> karmarkar_karp(const std::vector<double> &weights, const std::vector<int32_t> &order, int64_t bins,
                                    bool even) {
    const int64_t n = static_cast<int64_t>(weights.size());
    std::vector<int32_t> next(n, -1);
    std::vector<std::vector<Bin>> solutions;  // filled bins, heaviest first
    std::priority_queue<Ranked> queue;
    const auto enqueue = [&](int64_t id) {
        const std::vector<Bin> &filled = solutions[id];
        const double least = static_cast<int64_t>(filled.size()) == bins ? filled.back().load : 0.0;
        queue.push({filled.front().load - least, static_cast<int32_t>(id)});
    };
    Poll poll;
    for (int64_t i = 0; i < n;) {
        poll();
        std::vector<Bin> filled;
        do {
            filled.push_back({weights[order[i]], order[i], order[i]});
            ++i;
        } while (even && i < n && static_cast<int64_t>(filled.size()) < bins);
        solutions.push_back(std::move(filled));
        enqueue(static_cast<int64_t>(solutions.size()) - 1);
    }
    while (queue.size() > 1) {
        poll(bins);
        const int32_t first = queue.top().id;
        queue.pop();
        const int32_t second = queue.top().id;
        queue.pop();
        // Position i of `a` meets position bins - 1 - i of `b`.
        std::vector<Bin> &a = solutions[first], b = std::move(solutions[second]);
        solutions[second] = {};
        for (int64_t j = 0; j < static_cast<int64_t>(b.size()); ++j) {
            const int64_t i = bins - 1 - j;
            if (i >= static_cast<int64_t>(a.size())) continue;
            next[a[i].tail] = b[j].head;
            a[i].tail = b[j].tail;
            a[i].load += b[j].load;
            b[j].head = -1;
        }
        for (const Bin &bin : b)
            if (bin.head >= 0) a.push_back(bin);
        std::sort(a.begin(), a.end(), heavier);
        enqueue(first);
    }
    std::vector<int32_t> bin_of(n);
    int32_t number = 0;
    for (const Bin &bin : solutions[queue.top().id]) {
        for (int32_t item = bin.head; item >= 0; item = next[item]) bin_of[item] = number;
        ++number;
    }
    return bin_of;
}

}  // namespace interlace
