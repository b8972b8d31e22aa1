#include "balance/microbatches/refine.h"

#include <algorithm>
#include <cmath>

#include "balance/bins/refine.h"
#include "common/tournament.h"
#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr int PARTNERS = 8;
constexpr int64_t MOST_SAMPLES = 1'000'000;  // samples that are looked up in total: some milliseconds

struct Microbatch {
    std::vector<int32_t> samples;  // by rising LLM cost, then number
    double encoder = 0.0, llm = 0.0;
};

class LlmBalance {
  public:
    LlmBalance(const std::vector<double> &encoder, const std::vector<double> &llm,
               const std::vector<int32_t> &microbatch_of, int64_t count, double most_encoder)
        : encoder_(encoder), llm_(llm), microbatches_(count), heaviest_(count, 0.0), lightest_(count, 0.0),
          most_encoder_(most_encoder) {
        for (size_t i = 0; i < encoder.size(); ++i)
            microbatches_[microbatch_of[i]].samples.push_back(static_cast<int32_t>(i));
        for (Microbatch &each : microbatches_) {
            poll_(static_cast<int64_t>(8 * each.samples.size()));
            interruptible_sort(each.samples.begin(), each.samples.end(),
                               [this](int32_t a, int32_t b) { return before(a, b); });
            weigh(each);
        }
    }

    void run() {
        const int64_t count = static_cast<int64_t>(microbatches_.size());
        double total = 0.0;
        for (const double cost : llm_) total += cost;
        const double enough = total / static_cast<double>(count) * GOOD_ENOUGH;
        for (int64_t m = 0; m < count; ++m) {
            poll_();
            update(m);
        }
        // If no partner can relieve a microbatch, deferral handles it. The next one may still be relieved.
        while (heaviest_.key() != Tournament::OUT && -heaviest_.key() > enough && looked_up_ < MOST_SAMPLES) {
            const int64_t from = heaviest_.index();
            std::vector<int64_t> tried;
            bool relieved = false;
            while (!relieved && static_cast<int>(tried.size()) < PARTNERS &&
                   lightest_.key() < microbatches_[from].llm) {
                const int64_t to = lightest_.index();
                relieved = exchange(microbatches_[from], microbatches_[to]);
                if (relieved) {
                    update(from);
                    update(to);
                } else {
                    tried.push_back(to);
                    lightest_.set(to, Tournament::OUT);
                }
            }
            for (const int64_t m : tried) lightest_.set(m, microbatches_[m].llm);
            if (!relieved) heaviest_.set(from, Tournament::OUT);
        }
    }

    std::vector<int32_t> microbatch_of() const {
        std::vector<int32_t> result(encoder_.size());
        for (size_t m = 0; m < microbatches_.size(); ++m)
            for (const int32_t sample : microbatches_[m].samples) result[sample] = static_cast<int32_t>(m);
        return result;
    }

  private:
    // Recomputed, so that rounding errors do not accumulate.
    void weigh(Microbatch &each) const {
        each.encoder = each.llm = 0.0;
        for (const int32_t sample : each.samples) {
            each.encoder += encoder_[sample];
            each.llm += llm_[sample];
        }
    }

    void update(int64_t m) {
        heaviest_.set(m, -microbatches_[m].llm);
        lightest_.set(m, microbatches_[m].llm);
    }

    bool before(int32_t a, int32_t b) const { return llm_[a] != llm_[b] ? llm_[a] < llm_[b] : a < b; }

    void put(Microbatch &microbatch, int32_t sample) const {
        const auto at = std::lower_bound(microbatch.samples.begin(), microbatch.samples.end(), sample,
                                         [this](int32_t a, int32_t b) { return before(a, b); });
        microbatch.samples.insert(at, sample);
    }

    void drop(Microbatch &microbatch, int32_t sample) const {
        microbatch.samples.erase(std::find(microbatch.samples.begin(), microbatch.samples.end(), sample));
    }

    // The exchange (or move) that shifts closest to half the difference, if both end below the heavier one.
    bool exchange(Microbatch &heavy, Microbatch &light) {
        const double difference = heavy.llm - light.llm;
        double miss = difference / 2;
        int32_t give = -1, take = -1;
        const auto allowed = [&](int32_t sample, double back) {
            return light.encoder + encoder_[sample] - back <= most_encoder_ &&
                   heavy.encoder - encoder_[sample] + back <= most_encoder_;
        };
        for (const int32_t sample : heavy.samples) {
            poll_();
            // The returned sample should be lighter than the given one by this amount.
            const double wanted = llm_[sample] - difference / 2;
            const auto try_one = [&](double off, int32_t other) {
                ++looked_up_;
                if (!allowed(sample, other < 0 ? 0.0 : encoder_[other])) return false;
                miss = off;
                give = sample;
                take = other;
                return true;
            };
            if (std::abs(wanted) < miss) try_one(std::abs(wanted), -1);
            const auto first = light.samples.begin(), last = light.samples.end();
            const auto cheaper = [this](int32_t other, double cost) { return llm_[other] < cost; };
            const auto middle = std::lower_bound(first, last, wanted, cheaper);
            looked_up_ += 4;
            for (auto at = middle; at != last && llm_[*at] - wanted < miss; ++at)
                if (try_one(llm_[*at] - wanted, *at)) break;
            for (auto at = middle; at != first && wanted - llm_[*(at - 1)] < miss; --at)
                if (try_one(wanted - llm_[*(at - 1)], *(at - 1))) break;
        }
        // Shifts below the rounding error of the sums are ignored.
        if (give < 0 || !(difference / 2 - miss > 1e-12 * heavy.llm)) return false;
        drop(heavy, give);
        put(light, give);
        if (take >= 0) {
            drop(light, take);
            put(heavy, take);
        }
        weigh(heavy);
        weigh(light);
        return true;
    }

    const std::vector<double> &encoder_, &llm_;
    std::vector<Microbatch> microbatches_;
    Tournament heaviest_, lightest_;  // by LLM load; keys of the first are negated
    const double most_encoder_;
    int64_t looked_up_ = 0;
    Poll poll_;
};

}  // namespace

std::vector<int32_t> even_llm_loads(const std::vector<double> &encoder, const std::vector<double> &llm,
                                    std::vector<int32_t> microbatch_of, int64_t count, double most_encoder) {
    LlmBalance balance(encoder, llm, microbatch_of, count, most_encoder);
    balance.run();
    return balance.microbatch_of();
}

}  // namespace interlace
