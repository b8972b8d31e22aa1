#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace interlace {

// The least of a fixed number of keys, of which one changes at a time: a flat binary tree in which every node holds the
// lesser of its two children (ties: the lower index). A change replays one path to the root without a branch that
// depends on data, which beats a heap's pop and push several times over.
class Tournament {
public:
    static constexpr double out = std::numeric_limits<double>::infinity();  // the key of an entry that left

    Tournament(int64_t entries, double key) {
        while (leaves_ < entries) leaves_ *= 2;
        nodes_.assign(2 * leaves_, {out, 0});
        for (int64_t i = 0; i < leaves_; ++i)
            nodes_[leaves_ + i] = {i < entries ? key : out, static_cast<int32_t>(i)};
        for (int64_t node = leaves_ - 1; node >= 1; --node) nodes_[node] = lesser(2 * node);
    }

    int32_t index() const { return nodes_[1].index; }
    double key() const { return nodes_[1].key; }
    double key(int64_t entry) const { return nodes_[leaves_ + entry].key; }

    void set(int64_t entry, double key) {
        int64_t node = leaves_ + entry;
        Node current = {key, static_cast<int32_t>(entry)};
        nodes_[node] = current;
        for (; node > 1; node /= 2) {
            const Node sibling = nodes_[node ^ 1];
            // The left child has the lower indices.
            const bool right = node & 1;
            const bool keep = right ? current.key < sibling.key : current.key <= sibling.key;
            current.key = keep ? current.key : sibling.key;
            current.index = keep ? current.index : sibling.index;
            nodes_[node / 2] = current;
        }
    }

private:
    struct Node {
        double key;
        int32_t index;
    };

    Node lesser(int64_t left) const {
        return nodes_[left].key <= nodes_[left + 1].key ? nodes_[left] : nodes_[left + 1];
    }

    int64_t leaves_ = 1;
    std::vector<Node> nodes_;
};

}  // namespace interlace
