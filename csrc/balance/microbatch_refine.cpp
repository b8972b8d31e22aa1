#include "balance/microbatch_refine.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "balance/refine.h"
#include "balance/tournament.h"

namespace interlace {

namespace {

constexpr int partners = 8;
constexpr int64_t most_pairs = 4'000'000;  // of samples looked at in all: some milliseconds

struct Microbatch {
    std::vector<int32_t> samples;
    double encoder = 0.0, llm = 0.0;
};

class LlmBalance {
public:
    LlmBalance(const std::vector<double> &encoder, const std::vector<double> &llm,
               const std::vector<int32_t> &microbatch_of, int64_t count, double most_encoder)
        : encoder_(encoder),
          llm_(llm),
          microbatches_(count),
          heaviest_(count, 0.0),
          lightest_(count, 0.0),
          most_encoder_(most_encoder) {
        for (size_t i = 0; i < encoder.size(); ++i)
            microbatches_[microbatch_of[i]].samples.push_back(static_cast<int32_t>(i));
        for (Microbatch &each : microbatches_) weigh(each);
    }

    void run() {
        const int64_t count = static_cast<int64_t>(microbatches_.size());
        double total = 0.0;
        for (const double cost : llm_) total += cost;
        const double enough = total / static_cast<double>(count) * good_enough;
        for (int64_t m = 0; m < count; ++m) update(m);
        // A microbatch that nobody can relieve is left to deferral; the next one may still be relieved.
        while (heaviest_.key() != Tournament::out && -heaviest_.key() > enough && pairs_ < most_pairs) {
            const int64_t from = heaviest_.index();
            std::vector<int64_t> tried;
            bool relieved = false;
            while (!relieved && static_cast<int>(tried.size()) < partners && lightest_.key() < microbatches_[from].llm) {
                const int64_t to = lightest_.index();
                relieved = exchange(microbatches_[from], microbatches_[to]);
                if (relieved) {
                    update(from);
                    update(to);
                } else {
                    tried.push_back(to);
                    lightest_.set(to, Tournament::out);
                }
            }
            for (const int64_t m : tried) lightest_.set(m, microbatches_[m].llm);
            if (!relieved) heaviest_.set(from, Tournament::out);
        }
    }

    std::vector<int32_t> microbatch_of() const {
        std::vector<int32_t> result(encoder_.size());
        for (size_t m = 0; m < microbatches_.size(); ++m)
            for (const int32_t sample : microbatches_[m].samples) result[sample] = static_cast<int32_t>(m);
        return result;
    }

private:
    // Summed afresh: no drift over many steps.
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

    // The exchange (or gift) that shifts nearest to half the difference, if any brings both below the heavier one.
    bool exchange(Microbatch &heavy, Microbatch &light) {
        const double difference = heavy.llm - light.llm;
        double miss = difference / 2;
        int64_t give = -1, take = -1;
        const int64_t gives = static_cast<int64_t>(heavy.samples.size());
        const int64_t takes = static_cast<int64_t>(light.samples.size());
        pairs_ += gives * (takes + 1);
        for (int64_t i = 0; i < gives; ++i) {
            const double llm = llm_[heavy.samples[i]], encoder = encoder_[heavy.samples[i]];
            for (int64_t j = -1; j < takes; ++j) {
                const double back = j < 0 ? 0.0 : encoder_[light.samples[j]];
                const double off = std::abs(llm - (j < 0 ? 0.0 : llm_[light.samples[j]]) - difference / 2);
                if (!(off < miss) || light.encoder + encoder - back > most_encoder_ ||
                    heavy.encoder - encoder + back > most_encoder_)
                    continue;
                miss = off;
                give = i;
                take = j;
            }
        }
        // A shift by less than the rounding of the sums is none.
        if (give < 0 || !(difference / 2 - miss > 1e-12 * heavy.llm)) return false;
        if (take < 0) {
            light.samples.push_back(heavy.samples[give]);
            heavy.samples.erase(heavy.samples.begin() + give);
        } else {
            std::swap(heavy.samples[give], light.samples[take]);
        }
        weigh(heavy);
        weigh(light);
        return true;
    }

    const std::vector<double> &encoder_, &llm_;
    std::vector<Microbatch> microbatches_;
    Tournament heaviest_, lightest_;  // by LLM load; keys of the first are negated
    const double most_encoder_;
    int64_t pairs_ = 0;
};

}  // namespace

std::vector<int32_t> even_llm_loads(const std::vector<double> &encoder, const std::vector<double> &llm,
                                    std::vector<int32_t> microbatch_of, int64_t count, double most_encoder) {
    LlmBalance balance(encoder, llm, microbatch_of, count, most_encoder);
    balance.run();
    return balance.microbatch_of();
}

}  // namespace interlace
