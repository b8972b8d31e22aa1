#include "balance/rearrange/nodewise.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "common/order.h"
#include "common/tournament.h"
#include "common/interrupt.h"
#include "common/limits.h"

namespace interlace {

namespace {

constexpr int64_t MOST_WANTED = 24;       // batches that an instance requests in one step
constexpr int64_t MOST_OFFERS = 8;        // batches that its node offers for one of them
constexpr int64_t PATIENCE = 200;         // steps without a better placement before the search goes back to the best
constexpr int64_t MOST_WORK = 1'000'000;  // entries of the volume that are read, approximately: about 10 ms
constexpr int64_t TENURES[] = {8, 5, 3, 13, 2, 6, 10, 4};  // steps for which a moved batch stays, round by round

class Placement {
  public:
    explicit Placement(const Volume &volume)
        : volume_(volume), c_(volume.per_node), node_of_(volume.instances, -1), held_(volume.instances, -1),
          outside_(volume.row_sum), level_(volume.instances, 0.0), node_level_(volume.nodes(), 0.0),
          worst_(volume.instances, 0.0) {}

    // Assigns batches to nodes, by falling volume that stays on the node.
    void greedy() {
        struct Pair {
            int32_t batch, node;
        };
        std::vector<Pair> pairs;
        std::vector<double> kept;
        for (int64_t batch = 0; batch < volume_.instances; ++batch) {
            for (int64_t at = volume_.column_start[batch]; at < volume_.column_start[batch + 1];) {
                poll_(c_);
                const int64_t node = volume_.columns[at].other / c_;
                double sum = 0.0;
                for (; at < volume_.column_start[batch + 1] && volume_.columns[at].other / c_ == node; ++at)
                    sum += volume_.columns[at].value;
                pairs.push_back({static_cast<int32_t>(batch), static_cast<int32_t>(node)});
                kept.push_back(sum);
            }
        }
        std::vector<int64_t> count(volume_.nodes(), 0);
        const auto put = [&](int32_t batch, int64_t node) {
            node_of_[batch] = static_cast<int32_t>(node);
            held_[node * c_ + count[node]++] = batch;
        };
        for (const int32_t pair : descending_order(kept)) {
            poll_();
            const auto [batch, node] = pairs[pair];
            if (node_of_[batch] < 0 && count[node] < c_) put(batch, node);
        }
        int64_t node = 0;
        for (int64_t batch = 0; batch < volume_.instances; ++batch) {
            if (node_of_[batch] >= 0) continue;
            while (count[node] == c_) ++node;
            put(static_cast<int32_t>(batch), node);
        }
        for (node = 0; node < volume_.nodes(); ++node) measure(node);
    }

    // Tabu search. A step exchanges a batch of the instance that sends most for a batch of another node. The instance
    // must hold more of the new batch. A step makes the exchange with the lowest sum(sent^16), even if the sum rises.
    // The sum is a smooth replacement for the bottleneck. A moved batch stays for some steps. Ends at the bound or when
    // the work limit is reached.
    void search(double bound) {
        std::vector<int32_t> best_node_of = node_of_, best_held = held_;
        double best = bottleneck();
        // A higher limit for large nodes, whose steps take long.
        const int64_t enough = MOST_WORK * std::clamp<int64_t>(c_ / 64, 1, 4);
        std::vector<int64_t> free_from(volume_.instances, 0);  // the step from which a batch may move again
        int64_t step = 0;
        for (size_t round = 0; best > bound && work_ < enough; ++round) {
            if (round > 0) {
                node_of_ = best_node_of;
                held_ = best_held;
                std::fill(free_from.begin(), free_from.end(), 0);
                if (round % 2 == 1) shake();
            }
            limit_ = best;
            for (int64_t node = 0; node < volume_.nodes(); ++node) measure(node);
            work_ += 4 * volume_.instances;
            const int64_t tenure = TENURES[round % (sizeof TENURES / sizeof *TENURES)];
            for (int64_t last = step; step < last + PATIENCE && best > bound && work_ < enough; ++step) {
                poll_(2 * c_ + 20);
                work_ += 2 * c_ + 20;
                const Exchange found = best_exchange(free_from, step);
                if (found.slot < 0) continue;
                free_from[held_[found.slot]] = step + tenure / 2;
                free_from[found.batch] = step + tenure;
                apply(found);
                if (bottleneck() < best) {
                    best = bottleneck();
                    best_node_of = node_of_;
                    best_held = held_;
                    work_ += volume_.instances / 16;
                    last = step;
                }
            }
        }
        node_of_ = std::move(best_node_of);
        held_ = std::move(best_held);
    }

    // Within a node every batch goes to the instance that holds most of it, by falling volume.
    std::vector<int32_t> ranks() const {
        std::vector<int32_t> rank_of(volume_.instances, -1);
        std::vector<char> taken(volume_.instances, 0);
        Poll poll;
        for (int64_t node = 0; node < volume_.nodes(); ++node) {
            std::vector<std::pair<int32_t, int32_t>> pairs;  // batch, instance
            std::vector<double> kept;
            for (int64_t slot = node * c_; slot < (node + 1) * c_; ++slot) {
                poll(c_);
                for (const Volume::Entry &entry : part(held_[slot], node)) {
                    pairs.push_back({held_[slot], entry.other});
                    kept.push_back(entry.value);
                }
            }
            for (const int32_t pair : descending_order(kept)) {
                const auto [batch, instance] = pairs[pair];
                if (rank_of[batch] >= 0 || taken[instance]) continue;
                rank_of[batch] = instance;
                taken[instance] = 1;
            }
            int64_t free = node * c_;
            for (int64_t slot = node * c_; slot < (node + 1) * c_; ++slot) {
                if (rank_of[held_[slot]] >= 0) continue;
                while (taken[free]) ++free;
                rank_of[held_[slot]] = static_cast<int32_t>(free++);
            }
        }
        return rank_of;
    }

  private:
    // Exchanges a batch of the bottleneck's node for any other, so that rounds do not end at the same placement.
    void shake() {
        const int64_t slot = worst_.index() / c_ * c_ + next_random(c_), with = next_random(volume_.instances);
        std::swap(node_of_[held_[slot]], node_of_[held_[with]]);
        std::swap(held_[slot], held_[with]);
    }

    // A linear congruential generator: the same numbers on every platform.
    int64_t next_random(int64_t below) {
        random_ = random_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<int64_t>((random_ >> 33) % static_cast<uint64_t>(below));
    }

    struct Exchange {
        int64_t slot = -1;
        int32_t batch = -1;
        double change = INF;
    };

    struct Part {
        const Volume::Entry *first, *last;
        const Volume::Entry *begin() const { return first; }
        const Volume::Entry *end() const { return last; }
    };

    double bottleneck() const { return -worst_.key(); }

    static double power_16(double x) {
        x *= x;
        x *= x;
        x *= x;
        return x * x;
    }

    // Volume of a batch held by the instances of a node.
    Part part(int32_t batch, int64_t node) const {
        const Volume::Entry *const end = volume_.columns.data() + volume_.column_start[batch + 1];
        const auto before = [](const Volume::Entry &entry, int64_t instance) { return entry.other < instance; };
        Part found;
        found.first = std::lower_bound(volume_.columns.data() + volume_.column_start[batch], end, node * c_, before);
        for (found.last = found.first; found.last != end && found.last->other < (node + 1) * c_;) ++found.last;
        return found;
    }

    // Volume sent by each instance of the node, recomputed so that rounding errors do not accumulate.
    void measure(int64_t node) {
        poll_(16 * c_);
        const int64_t first = node * c_, last = first + c_;
        std::copy(volume_.row_sum.begin() + first, volume_.row_sum.begin() + last, outside_.begin() + first);
        for (int64_t slot = first; slot < last; ++slot)
            for (const Volume::Entry &entry : part(held_[slot], node)) outside_[entry.other] -= entry.value;
        node_level_[node] = 0.0;
        for (int64_t instance = first; instance < last; ++instance) {
            worst_.set(instance, -outside_[instance]);
            level_[instance] = power_16(outside_[instance] / limit_);
            node_level_[node] += level_[instance];
        }
    }

    // Change of sum((sent / limit)^16) over a node if it gives one batch and takes another.
    double change(Part given, Part taken) {
        double sum = 0.0;
        work_ += (given.last - given.first) + (taken.last - taken.first) + 1;
        while (given.first != given.last || taken.first != taken.last) {
            const int32_t next = given.first == given.last   ? taken.first->other
                                 : taken.first == taken.last ? given.first->other
                                                             : std::min(given.first->other, taken.first->other);
            double sent = outside_[next];
            if (given.first != given.last && given.first->other == next) sent += given.first++->value;
            if (taken.first != taken.last && taken.first->other == next) sent -= taken.first++->value;
            sum += power_16(sent / limit_) - level_[next];
        }
        return sum;
    }

    // Batches on other nodes of which an instance holds most.
    void find_wanted(int64_t instance) {
        wanted_.clear();
        work_ += volume_.row_start[instance + 1] - volume_.row_start[instance];
        for (int64_t at = volume_.row_start[instance]; at < volume_.row_start[instance + 1]; ++at)
            if (node_of_[volume_.rows[at].other] != instance / c_) wanted_.push_back(volume_.rows[at]);
        const auto larger = [](const Volume::Entry &a, const Volume::Entry &b) {
            return a.value != b.value ? a.value > b.value : a.other < b.other;
        };
        const int64_t count = std::min<int64_t>(MOST_WANTED, wanted_.size());
        std::partial_sort(wanted_.begin(), wanted_.begin() + count, wanted_.end(), larger);
        wanted_.resize(count);
    }

    struct Offer {
        int64_t slot;
        Part here;
        double own;   // part held by the requesting instance
        double loss;  // see change()
    };

    // The batches of the node with the lowest loss when given away.
    void find_offers(int64_t instance) {
        const int64_t node = instance / c_;
        offers_.clear();
        for (int64_t slot = node * c_; slot < (node + 1) * c_; ++slot) {
            Offer offer = {slot, part(held_[slot], node), 0.0, 0.0};
            for (const Volume::Entry &entry : offer.here)
                if (entry.other == instance) offer.own = entry.value;
            if (c_ > MOST_OFFERS) offer.loss = change(offer.here, {nullptr, nullptr});
            offers_.push_back(offer);
        }
        if (c_ <= MOST_OFFERS) return;
        const auto cheaper = [](const Offer &a, const Offer &b) {
            return a.loss != b.loss ? a.loss < b.loss : a.slot < b.slot;
        };
        std::partial_sort(offers_.begin(), offers_.begin() + MOST_OFFERS, offers_.end(), cheaper);
        offers_.resize(MOST_OFFERS);
    }

    Exchange best_exchange(const std::vector<int64_t> &free_from, int64_t step) {
        const int64_t instance = worst_.index(), node = instance / c_;
        find_wanted(instance);
        find_offers(instance);
        Exchange best;
        for (const Volume::Entry &entry : wanted_) {
            if (free_from[entry.other] > step) continue;
            const int64_t other = node_of_[entry.other];
            const Part here = part(entry.other, node), there = part(entry.other, other);
            for (const Offer &offer : offers_) {
                const int32_t given = held_[offer.slot];
                if (offer.own >= entry.value || free_from[given] > step) continue;
                double sum = change(offer.here, here);
                if (!(sum - node_level_[other] < best.change)) continue;
                sum += change(there, part(given, other));
                if (sum < best.change) best = {offer.slot, entry.other, sum};
            }
        }
        return best;
    }

    void apply(const Exchange &exchange) {
        const int32_t given = held_[exchange.slot];
        const int64_t node = exchange.slot / c_, other = node_of_[exchange.batch];
        held_[exchange.slot] = exchange.batch;
        *std::find(held_.begin() + other * c_, held_.begin() + (other + 1) * c_, exchange.batch) = given;
        node_of_[exchange.batch] = static_cast<int32_t>(node);
        node_of_[given] = static_cast<int32_t>(other);
        measure(node);
        measure(other);
    }

    const Volume &volume_;
    const int64_t c_;
    std::vector<int32_t> node_of_;  // per batch
    std::vector<int32_t> held_;     // slots node * c .. node * c + c - 1 are the batches of a node
    std::vector<double> outside_;   // volume that each instance sends to other nodes
    double limit_ = 1.0;            // scale of the potential
    std::vector<double> level_;     // (sent / limit)^16 per instance
    std::vector<double> node_level_;
    Tournament worst_;  // keys are negated
    uint64_t random_ = 0;
    int64_t work_ = 0;  // counted, not timed: every rank must stop at the same placement
    std::vector<Volume::Entry> wanted_;
    std::vector<Offer> offers_;
    Poll poll_;
};

}  // namespace

std::vector<int32_t> nodewise_placement(const Volume &volume) {
    Placement placement(volume);
    placement.greedy();
    placement.search(nodewise_simple_bound(volume));
    std::vector<int32_t> rank_of = placement.ranks(), unmoved(volume.instances);
    std::iota(unmoved.begin(), unmoved.end(), 0);
    const auto bottleneck = [&](const std::vector<int32_t> &ranks) {
        const std::vector<double> sent = internode_volume(volume, ranks);
        return *std::max_element(sent.begin(), sent.end());
    };
    return bottleneck(unmoved) < bottleneck(rank_of) ? unmoved : rank_of;
}

std::vector<double> internode_volume(const Volume &volume, const std::vector<int32_t> &rank_of) {
    std::vector<double> sent(volume.instances, 0.0);
    Poll poll;
    for (int64_t i = 0; i < volume.instances; ++i) {
        poll(volume.row_start[i + 1] - volume.row_start[i]);
        for (int64_t at = volume.row_start[i]; at < volume.row_start[i + 1]; ++at)
            if (rank_of[volume.rows[at].other] / volume.per_node != i / volume.per_node)
                sent[i] += volume.rows[at].value;
    }
    return sent;
}

double nodewise_simple_bound(const Volume &volume) {
    double bound = 0.0;
    std::vector<double> values;
    Poll poll;
    for (int64_t i = 0; i < volume.instances; ++i) {
        poll(volume.row_start[i + 1] - volume.row_start[i]);
        values.clear();
        for (int64_t at = volume.row_start[i]; at < volume.row_start[i + 1]; ++at)
            values.push_back(volume.rows[at].value);
        const int64_t count = std::min<int64_t>(volume.per_node, values.size());
        std::partial_sort(values.begin(), values.begin() + count, values.end(), std::greater<double>());
        // Summed in the same order as the sent volume, so that a placement at the bound is recognised.
        bound = std::max(bound, std::accumulate(values.begin() + count, values.end(), 0.0));
    }
    for (int64_t j = 0; j < volume.instances; ++j) {
        poll(volume.column_start[j + 1] - volume.column_start[j]);
        double most = 0.0, second = 0.0;  // held on one node, on another one
        for (int64_t at = volume.column_start[j]; at < volume.column_start[j + 1];) {
            const int64_t node = volume.columns[at].other / volume.per_node;
            double held = 0.0;
            for (; at < volume.column_start[j + 1] && volume.columns[at].other / volume.per_node == node; ++at)
                held = std::max(held, volume.columns[at].value);
            second = std::max(second, std::min(most, held));
            most = std::max(most, held);
        }
        bound = std::max(bound, second);
    }
    return bound;
}

}  // namespace interlace
