#include "balance/microbatches/even_replicas.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr int64_t MOST_LOOKED_AT = 128;    // tested samples of a replica, spread evenly over its samples
constexpr int64_t MOST_STEPS = 1'000'000;  // exchanges that are tested in total: about a millisecond
constexpr double NEAR = 1e-8;              // of squares: replicas within 0.01 % of each other count as equal

struct Load {
    double encoder = 0.0, llm = 0.0;
};

Load operator-(const Load &a, const Load &b) { return {a.encoder - b.encoder, a.llm - b.llm}; }

double square(const Load &load) { return load.encoder * load.encoder + load.llm * load.llm; }

class Replicas {
  public:
    Replicas(const std::vector<double> &encoder, const std::vector<double> &llm, const std::vector<int32_t> &replica_of,
             int64_t replicas)
        : samples_(encoder.size()), members_(replicas), loads_(replicas), changed_(replicas, 0) {
        const auto mean = [&](const std::vector<double> &costs) {
            const double share = std::accumulate(costs.begin(), costs.end(), 0.0) / static_cast<double>(replicas);
            return share > 0.0 ? share : 1.0;
        };
        const Load shares{mean(encoder), mean(llm)};
        for (size_t i = 0; i < samples_.size(); ++i) {
            poll_();
            samples_[i] = {encoder[i] / shares.encoder, llm[i] / shares.llm};
            members_[replica_of[i]].push_back(static_cast<int32_t>(i));
        }
        for (int64_t r = 0; r < replicas; ++r) weigh(r);
    }

    void run() {
        const int64_t count = static_cast<int64_t>(loads_.size());
        std::vector<int32_t> order(count);
        std::iota(order.begin(), order.end(), 0);
        for (bool improved = true; improved && steps_ < MOST_STEPS;) {
            improved = false;
            ++sweep_;
            interruptible_sort(order.begin(), order.end(), [this](int32_t a, int32_t b) {
                return loads_[a].llm != loads_[b].llm ? loads_[a].llm > loads_[b].llm : a < b;
            });
            for (int64_t i = 0; i < count && steps_ < MOST_STEPS; ++i) {
                for (int64_t j = count - 1; j > i && steps_ < MOST_STEPS; --j) {
                    poll_();
                    ++steps_;
                    const int32_t a = order[i], b = order[j];
                    // Tested in the last sweep or later, and both unchanged since.
                    if (std::max(changed_[a], changed_[b]) + 1 < sweep_ || !exchange(a, b)) continue;
                    improved = true;
                    break;
                }
            }
        }
    }

    std::vector<int32_t> replica_of() const {
        std::vector<int32_t> result(samples_.size());
        for (size_t r = 0; r < members_.size(); ++r)
            for (const int32_t sample : members_[r]) result[sample] = static_cast<int32_t>(r);
        return result;
    }

  private:
    // Recomputed, so that rounding errors do not accumulate.
    void weigh(int64_t r) {
        poll_(static_cast<int64_t>(members_[r].size()));
        interruptible_sort(members_[r].begin(), members_[r].end(), std::less<>());
        loads_[r] = {};
        for (const int32_t sample : members_[r]) {
            loads_[r].encoder += samples_[sample].encoder;
            loads_[r].llm += samples_[sample].llm;
        }
    }

    bool exchange(int32_t a, int32_t b) {
        const Load difference = loads_[a] - loads_[b], half{difference.encoder / 2, difference.llm / 2};
        double best = square(half);
        if (best <= NEAR) return false;
        const double before = best;
        std::vector<int32_t> &gives = members_[a], &takes = members_[b];
        const size_t skip_a = 1 + gives.size() / MOST_LOOKED_AT, skip_b = 1 + takes.size() / MOST_LOOKED_AT;
        size_t give = 0, take = 0;
        for (size_t i = 0; i < gives.size(); i += skip_a) {
            const Load wanted = samples_[gives[i]] - half;
            for (size_t j = 0; j < takes.size(); j += skip_b) {
                const double off = square(wanted - samples_[takes[j]]);
                if (off < best) {
                    best = off;
                    give = i;
                    take = j;
                }
            }
            steps_ += static_cast<int64_t>(takes.size() / skip_b);
            poll_(static_cast<int64_t>(takes.size() / skip_b));
        }
        // Shifts below the rounding error of the sums are ignored.
        if (!(before - best > 1e-6 * before)) return false;
        std::swap(gives[give], takes[take]);
        weigh(a);
        weigh(b);
        changed_[a] = changed_[b] = sweep_;
        return true;
    }

    std::vector<Load> samples_;                  // relative to a replica's mean
    std::vector<std::vector<int32_t>> members_;  // of each replica, ascending
    std::vector<Load> loads_;
    std::vector<int32_t> changed_;  // the last sweep that changed the replica
    int32_t sweep_ = 0;
    int64_t steps_ = 0;
    Poll poll_;
};

}  // namespace

std::vector<int32_t> even_replicas(const std::vector<double> &encoder, const std::vector<double> &llm,
                                   std::vector<int32_t> replica_of, int64_t replicas) {
    if (replicas < 2) return replica_of;
    Replicas evening(encoder, llm, replica_of, replicas);
    evening.run();
    return evening.replica_of();
}

}  // namespace interlace
