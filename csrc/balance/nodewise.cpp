#include "balance/nodewise.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "balance/order.h"
#include "balance/tournament.h"

namespace interlace {

namespace {

constexpr int64_t most_candidates = 64;  // batches that an instance asks for in one step
constexpr int most_visits = 300;  // of instances, while smoothing

class Placement {
public:
    explicit Placement(const Volume &volume)
        : volume_(volume),
          c_(volume.per_node),
          node_of_(volume.instances, -1),
          held_(volume.nodes()),
          outside_(volume.row_sum),
          worst_(volume.instances, 0.0) {}

    // Batches to nodes by falling volume kept there, instance i counting `weight[i]` times.
    void greedy(const std::vector<double> &weight) {
        struct Pair {
            int32_t batch, node;
        };
        std::vector<Pair> pairs;
        std::vector<double> gains;
        for (int64_t batch = 0; batch < volume_.instances; ++batch) {
            for (int64_t at = volume_.column_start[batch]; at < volume_.column_start[batch + 1];) {
                const int64_t node = volume_.columns[at].other / c_;
                double gain = 0.0;
                for (; at < volume_.column_start[batch + 1] && volume_.columns[at].other / c_ == node; ++at)
                    gain += weight[volume_.columns[at].other] * volume_.columns[at].value;
                pairs.push_back({static_cast<int32_t>(batch), static_cast<int32_t>(node)});
                gains.push_back(gain);
            }
        }
        for (const int32_t pair : descending_order(gains)) {
            const auto [batch, node] = pairs[pair];
            if (node_of_[batch] < 0 && static_cast<int64_t>(held_[node].size()) < c_) put(batch, node);
        }
        int64_t node = 0;
        for (int64_t batch = 0; batch < volume_.instances; ++batch) {
            if (node_of_[batch] >= 0) continue;
            while (static_cast<int64_t>(held_[node].size()) == c_) ++node;
            put(static_cast<int32_t>(batch), node);
        }
        for (int64_t i = 0; i < volume_.instances; ++i) worst_.set(i, -outside_[i]);
    }

    // Exchanges batches between the bottleneck's node and others while the bottleneck falls.
    void improve() {
        for (int64_t step = 0; step < 16 * volume_.instances; ++step)
            if (!improve_bottleneck()) return;
    }

    // Lowers sum(sent^16), a smooth stand-in for the bottleneck, by exchanges that start from instances near it: this
    // makes room elsewhere, so that the bottleneck can fall further.
    void smooth() {
        for (int visits = 0; visits < most_visits;) {
            const double limit = bottleneck();
            if (limit == 0) return;
            std::vector<int64_t> near;
            for (int64_t row = 0; row < volume_.instances; ++row)
                if (outside_[row] > 0.93 * limit) near.push_back(row);
            std::stable_sort(near.begin(), near.end(), [&](int64_t a, int64_t b) { return outside_[a] > outside_[b]; });
            bool any = false;
            for (const int64_t row : near) {
                any |= improve_row(row, limit);
                if (++visits == most_visits) break;
            }
            improve();
            if (!any) return;
        }
    }

    double bottleneck() const { return -worst_.key(); }

    std::vector<int32_t> ranks() const {
        std::vector<int32_t> rank_of(volume_.instances, -1);
        std::vector<double> own(c_);
        for (int64_t node = 0; node < volume_.nodes(); ++node) {
            std::vector<double> kept;
            for (const int32_t batch : held_[node]) {
                read(batch, node, own);
                kept.insert(kept.end(), own.begin(), own.end());
            }
            std::vector<char> taken(c_, 0);
            for (const int32_t pair : descending_order(kept)) {
                const int32_t batch = held_[node][pair / c_];
                if (rank_of[batch] >= 0 || taken[pair % c_]) continue;
                rank_of[batch] = static_cast<int32_t>(node * c_ + pair % c_);
                taken[pair % c_] = 1;
            }
        }
        return rank_of;
    }

private:
    static double power_16(double x) {
        x *= x;
        x *= x;
        x *= x;
        return x * x;
    }

    void put(int32_t batch, int64_t node) {
        node_of_[batch] = static_cast<int32_t>(node);
        held_[node].push_back(batch);
        for_each(batch, node, [&](int64_t row, double value) { outside_[node * c_ + row] -= value; });
    }

    template <typename Function>
    void for_each(int32_t batch, int64_t node, Function function) const {
        const auto begin = volume_.columns.begin() + volume_.column_start[batch];
        const auto end = volume_.columns.begin() + volume_.column_start[batch + 1];
        auto at = std::lower_bound(begin, end, node * c_,
                                   [](const Volume::Entry &entry, int64_t row) { return entry.other < row; });
        for (; at != end && at->other < (node + 1) * c_; ++at) function(at->other - node * c_, at->value);
    }

    // What each instance of the node holds of the batch.
    void read(int32_t batch, int64_t node, std::vector<double> &values) const {
        std::fill(values.begin(), values.end(), 0.0);
        for_each(batch, node, [&](int64_t row, double value) { values[row] = value; });
    }

    // The most that an instance of the node sends once it gives one batch for another.
    double after(int64_t node, const double *given, const double *taken, double limit) const {
        double most = 0.0;
        for (int64_t row = 0; row < c_; ++row) {
            const double sent = outside_[node * c_ + row] + given[row] - taken[row];
            if (sent >= limit) return sent;
            most = std::max(most, sent);
        }
        return most;
    }

    // Batches on other nodes of which an instance holds most.
    std::vector<Volume::Entry> wanted(int64_t row) const {
        std::vector<Volume::Entry> entries;
        for (int64_t at = volume_.row_start[row]; at < volume_.row_start[row + 1]; ++at)
            if (node_of_[volume_.rows[at].other] != row / c_) entries.push_back(volume_.rows[at]);
        const auto larger = [](const Volume::Entry &a, const Volume::Entry &b) {
            return a.value != b.value ? a.value > b.value : a.other < b.other;
        };
        const int64_t count = std::min<int64_t>(most_candidates, entries.size());
        std::partial_sort(entries.begin(), entries.begin() + count, entries.end(), larger);
        entries.resize(count);
        return entries;
    }

    // For every exchange of a batch of the instance's node for one that it wants more of: judge(slot, batch, other
    // node, given here, taken here, given there, read taken there).
    template <typename Judge>
    void for_each_exchange(int64_t row, Judge judge) {
        const int64_t node = row / c_;
        std::vector<double> ours(c_ * c_), taken_here(c_), given_there(c_), column(c_);
        for (int64_t slot = 0; slot < c_; ++slot) {
            read(held_[node][slot], node, column);
            std::copy(column.begin(), column.end(), ours.begin() + slot * c_);
        }
        for (const Volume::Entry &entry : wanted(row)) {
            const int64_t other = node_of_[entry.other];
            read(entry.other, node, taken_here);
            read(entry.other, other, given_there);
            for (int64_t slot = 0; slot < c_; ++slot)
                if (ours[slot * c_ + row - node * c_] < entry.value)
                    judge(slot, entry.other, other, ours.data() + slot * c_, taken_here.data(), given_there.data());
        }
    }

    bool improve_bottleneck() {
        const int64_t row = worst_.index(), node = row / c_;
        double best = outside_[row];
        int64_t best_slot = -1;
        int32_t best_batch = -1;
        std::vector<double> taken_there(c_);
        for_each_exchange(row, [&](int64_t slot, int32_t batch, int64_t other, const double *given_here,
                                   const double *taken_here, const double *given_there) {
            const double here = after(node, given_here, taken_here, best);
            if (here >= best) return;
            read(held_[node][slot], other, taken_there);
            const double most = std::max(here, after(other, given_there, taken_there.data(), best));
            if (most >= best) return;
            best = most;
            best_slot = slot;
            best_batch = batch;
        });
        if (best_batch < 0) return false;
        exchange(node, best_slot, best_batch);
        return true;
    }

    double potential(int64_t node, const double *given, const double *taken, double limit) const {
        double sum = 0.0;
        for (int64_t row = 0; row < c_; ++row) {
            const double sent = outside_[node * c_ + row] + (given ? given[row] - taken[row] : 0.0);
            sum += power_16(sent / limit);
        }
        return sum;
    }

    bool improve_row(int64_t row, double limit) {
        const int64_t node = row / c_;
        const double now = potential(node, nullptr, nullptr, limit);
        double best = 1e-6;
        int64_t best_slot = -1, known = -1;
        int32_t best_batch = -1;
        double there_now = 0.0;
        std::vector<double> taken_there(c_);
        for_each_exchange(row, [&](int64_t slot, int32_t batch, int64_t other, const double *given_here,
                                   const double *taken_here, const double *given_there) {
            const double gain = now - potential(node, given_here, taken_here, limit);
            if (known != other) {
                there_now = potential(other, nullptr, nullptr, limit);
                known = other;
            }
            if (gain + there_now <= best) return;
            read(held_[node][slot], other, taken_there);
            const double total = gain + there_now - potential(other, given_there, taken_there.data(), limit);
            if (total <= best) return;
            best = total;
            best_slot = slot;
            best_batch = batch;
        });
        if (best_batch < 0) return false;
        exchange(node, best_slot, best_batch);
        return true;
    }

    void exchange(int64_t node, int64_t slot, int32_t batch) {
        const int32_t given = held_[node][slot];
        const int64_t other = node_of_[batch];
        held_[node][slot] = batch;
        *std::find(held_[other].begin(), held_[other].end(), batch) = given;
        node_of_[batch] = static_cast<int32_t>(node);
        node_of_[given] = static_cast<int32_t>(other);
        for (const int64_t changed : {node, other}) {
            for (int64_t row = changed * c_; row < (changed + 1) * c_; ++row) outside_[row] = volume_.row_sum[row];
            for (const int32_t kept : held_[changed])
                for_each(kept, changed, [&](int64_t row, double value) { outside_[changed * c_ + row] -= value; });
            for (int64_t row = changed * c_; row < (changed + 1) * c_; ++row) worst_.set(row, -outside_[row]);
        }
    }

    const Volume &volume_;
    const int64_t c_;
    std::vector<int32_t> node_of_;
    std::vector<std::vector<int32_t>> held_;  // batches of each node
    std::vector<double> outside_;             // what each instance sends to other nodes
    Tournament worst_;                        // keys are negated
};

}  // namespace

std::vector<int32_t> nodewise_placement(const Volume &volume) {
    const int64_t d = volume.instances;
    const double most = *std::max_element(volume.row_sum.begin(), volume.row_sum.end());
    Placement alike(volume), by_need(volume);
    alike.greedy(std::vector<double>(d, 1.0));
    alike.improve();
    std::vector<double> need(d, 0.0);
    for (int64_t i = 0; i < d && most > 0; ++i) {
        const double share = volume.row_sum[i] / most;
        need[i] = share * share * share * share;
    }
    by_need.greedy(need);
    by_need.improve();
    Placement &better = by_need.bottleneck() < alike.bottleneck() ? by_need : alike;
    better.smooth();
    return better.ranks();
}

std::vector<double> internode_volume(const Volume &volume, const std::vector<int32_t> &rank_of) {
    std::vector<double> sent(volume.instances, 0.0);
    for (int64_t i = 0; i < volume.instances; ++i)
        for (int64_t at = volume.row_start[i]; at < volume.row_start[i + 1]; ++at)
            if (rank_of[volume.rows[at].other] / volume.per_node != i / volume.per_node)
                sent[i] += volume.rows[at].value;
    return sent;
}

}  // namespace interlace
