#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "common/limits.h"

namespace interlace {

// Tournament tree: the minimum of a fixed number of keys (no NaN); one key changes at a time. Flat and binary: every
// node holds the lesser of its two children (ties: the lower index). A change replays one path to the root without
// data-dependent branches, which is several times faster than a heap's pop and push. Masks ensure this: compilers turn
// a conditional into a branch, which is mispredicted at every second level if keys are fractions.
class Tournament {
  public:
    static constexpr double OUT = INF;  // key of a removed entry

    Tournament(int64_t entries, double key) {
        while (leaves_ < entries) leaves_ *= 2;
        nodes_.resize(2 * leaves_);
        const uint64_t first = ordered(key), none = ordered(OUT);
        for (int64_t i = 0; i < leaves_; ++i) nodes_[leaves_ + i] = {i < entries ? first : none, i};
        for (int64_t node = leaves_ - 1; node >= 1; --node) {
            const Node &left = nodes_[2 * node], &right = nodes_[2 * node + 1];
            nodes_[node] = left.key <= right.key ? left : right;
        }
    }

    int32_t index() const { return static_cast<int32_t>(nodes_[1].index); }
    double key() const { return number(nodes_[1].key); }
    double key(int64_t entry) const { return number(nodes_[leaves_ + entry].key); }

    void set(int64_t entry, double key) {
        int64_t node = leaves_ + entry;
        uint64_t least = ordered(key);
        int64_t index = entry;
        nodes_[node] = {least, index};
        for (; node > 1; node /= 2) {
            const Node sibling = nodes_[node ^ 1];
            // The left child has the lower indices and wins a tie. (No key is 0.)
            const uint64_t lost = -static_cast<uint64_t>(sibling.key - (node & 1) < least);
            least = sibling.key < least ? sibling.key : least;  // no mask here: one level waits for the other
            index ^= (index ^ sibling.index) & static_cast<int64_t>(lost);
            nodes_[node / 2] = {least, index};
        }
    }

  private:
    struct Node {
        uint64_t key;
        int64_t index;
    };

    // Doubles as integers of the same order, so that a comparison gives a mask.
    static uint64_t ordered(double key) {
        key += 0.0;  // -0.0 equals 0.0
        uint64_t bits;
        std::memcpy(&bits, &key, sizeof bits);
        return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
    }

    static double number(uint64_t bits) {
        bits = bits >> 63 ? bits & ~(uint64_t{1} << 63) : ~bits;
        double key;
        std::memcpy(&key, &bits, sizeof key);
        return key;
    }

    int64_t leaves_ = 1;
    std::vector<Node> nodes_;
};

}  // namespace interlace
