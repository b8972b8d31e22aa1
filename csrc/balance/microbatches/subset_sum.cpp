#include "balance/microbatches/subset_sum.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "common/interrupt.h"

namespace interlace {

namespace {

constexpr int64_t MOST_BITS = int64_t{1} << 26;   // 8 MB
constexpr int64_t MOST_KEPT = int64_t{1} << 15;   // words of snapshots, 256 KB: stays in the cache
constexpr int64_t MOST_WORDS = int64_t{1} << 30;  // steps of 64 sums: about half a second
constexpr int64_t DEFAULT_BUCKETS = int64_t{1} << 16;

// Replaces a standard function that C++17 lacks. value != 0.
int lowest_bit(uint64_t value) { return __builtin_ctzll(value); }
int highest_bit(uint64_t value) { return 63 - __builtin_clzll(value); }

}  // namespace

Units to_units(const std::vector<double> &weights, double resolution, int64_t buckets) {
    Units result;
    const int64_t n = static_cast<int64_t>(weights.size());
    double total = 0.0;
    bool whole = resolution == 0.0;
    for (const double weight : weights) {
        total += weight;
        whole = whole && weight == std::floor(weight);
    }
    result.counts.resize(n);
    if (whole && total < 9007199254740992.0) {  // 2^53: sums of doubles are exact
        int64_t divisor = 0;
        for (const double weight : weights) divisor = std::gcd(divisor, static_cast<int64_t>(weight));
        divisor = std::max<int64_t>(divisor, 1);
        result.total = static_cast<int64_t>(total) / divisor;
        if (result.total <= MOST_BITS && n * (result.total / 64 + 1) <= MOST_WORDS) {
            result.unit = static_cast<double>(divisor);
            for (int64_t i = 0; i < n; ++i) result.counts[i] = static_cast<int64_t>(weights[i]) / divisor;
            return result;
        }
    }
    // The table limits the number of units, whatever resolution was requested.
    const int64_t most = std::min(MOST_BITS, MOST_WORDS / n * 64);
    const double smallest = total / static_cast<double>(most);
    result.unit = std::max(resolution == 0.0 ? total / static_cast<double>(buckets) : resolution, smallest);
    result.exact = false;
    result.total = 0;
    for (int64_t i = 0; i < n; ++i) {
        // For tiny totals the unit can round to zero. Then all weights count as 0.
        result.counts[i] = result.unit > 0.0 ? std::llround(weights[i] / result.unit) : 0;
        result.total += result.counts[i];
    }
    return result;
}

SubsetSums::SubsetSums(const std::vector<int64_t> &counts, int64_t limit, bool traced, std::vector<int64_t> wanted)
    : limit_(limit), counts_(counts), bits_(limit / 64 + 1, 0) {
    const int64_t n = static_cast<int64_t>(counts.size()), words = static_cast<int64_t>(bits_.size());
    if (traced) stride_ = n * words / MOST_KEPT + 1;
    std::vector<int32_t> order(counts.size());
    std::iota(order.begin(), order.end(), 0);
    interruptible_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return counts[a] != counts[b] ? counts[a] < counts[b] : a < b; });
    bits_[0] = 1;
    const bool may_end = !wanted.empty();
    std::sort(wanted.begin(), wanted.end(), std::greater<int64_t>());
    int64_t reach = 0;
    Poll poll;
    for (const int32_t item : order) {
        poll(1 + reach / 64);
        if (counts[item] == 0) continue;
        if (counts[item] > limit) break;
        // Decided: possible, or so small that sums with this and larger items are further away than the empty set.
        const auto decided = [&](int64_t sum) {
            return (bits_[sum / 64] >> (sum % 64) & 1) || counts[item] > 2 * sum + 1;
        };
        while (!wanted.empty() && decided(wanted.back())) wanted.pop_back();
        if (may_end && wanted.empty()) break;
        if (traced && static_cast<int64_t>(used_.size()) % stride_ == 0)
            snapshots_.insert(snapshots_.end(), bits_.begin(), bits_.end());
        reach = std::min(limit, reach + counts[item]);
        add(bits_.data(), counts[item], reach);
        used_.push_back(item);
    }
    if (limit % 64 < 63) bits_.back() &= (uint64_t{2} << (limit % 64)) - 1;
}

void SubsetSums::add(uint64_t *bits, int64_t count, int64_t reach) {
    const int64_t words = count / 64, top = reach / 64;
    const int shift = static_cast<int>(count % 64);
    // From top to bottom, so that every word is read before this item changes it.
    if (shift == 0) {
        for (int64_t word = top; word >= words; --word) bits[word] |= bits[word - words];
    } else {
        for (int64_t word = top; word > words; --word)
            bits[word] |= bits[word - words] << shift | bits[word - words - 1] >> (64 - shift);
        bits[words] |= bits[0] << shift;
    }
}

int64_t SubsetSums::ideal(double target, double unit, int64_t limit, bool prefer_larger) {
    const double wanted = target / unit, place = std::floor(wanted);
    if (place >= static_cast<double>(limit)) return limit;
    const double over = wanted - place;
    return std::min(limit, static_cast<int64_t>(place) + (over > 0.5 || (over == 0.5 && prefer_larger)));
}

int64_t SubsetSums::nearest(double target, double unit, bool prefer_larger) const {
    const double wanted = target / unit, place = std::floor(wanted);
    const int64_t start = place >= static_cast<double>(limit_) ? limit_ : static_cast<int64_t>(place);
    int64_t below = -1;
    for (int64_t word = start / 64; below < 0; --word) {  // ends at sum 0
        uint64_t value = bits_[word];
        if (word == start / 64 && start % 64 != 63) value &= (uint64_t{2} << (start % 64)) - 1;
        if (value != 0) below = word * 64 + highest_bit(value);
    }
    int64_t above = -1;
    for (int64_t word = (start + 1) / 64; word < static_cast<int64_t>(bits_.size()) && above < 0; ++word) {
        uint64_t value = bits_[word];
        if (word == (start + 1) / 64) value &= ~uint64_t{0} << ((start + 1) % 64);
        if (value != 0) above = word * 64 + lowest_bit(value);
    }
    if (above < 0) return below;
    const double under = wanted - static_cast<double>(below), over = static_cast<double>(above) - wanted;
    return under < over || (under == over && !prefer_larger) ? below : above;
}

std::vector<int32_t> SubsetSums::items(int64_t sum) const {
    std::vector<int32_t> chosen;
    const int64_t words = static_cast<int64_t>(bits_.size()), used = static_cast<int64_t>(used_.size());
    std::vector<int64_t> reach;  // after each item
    for (int64_t i = 0; i < used; ++i)
        reach.push_back(std::min(limit_, (i > 0 ? reach.back() : 0) + counts_[used_[i]]));
    Bits states;  // before each item of one stretch between snapshots
    Poll poll;
    for (int64_t stretch = (used + stride_ - 1) / stride_ - 1; stretch >= 0 && sum > 0; --stretch) {
        const int64_t start = stretch * stride_, end = std::min(used, start + stride_);
        const uint64_t *first = snapshots_.data() + stretch * words;
        if (end - start > 1) {
            states.resize((end - start) * words);
            std::copy_n(first, words, states.begin());
            for (int64_t i = start; i + 1 < end; ++i) {
                poll(words);
                uint64_t *const after = states.data() + (i + 1 - start) * words;
                std::copy_n(after - words, words, after);
                add(after, counts_[used_[i]], reach[i]);
            }
            first = states.data();
        }
        for (int64_t i = end - 1; i >= start && sum > 0; --i) {
            const uint64_t *const before = first + (i - start) * words;
            if (before[sum / 64] >> (sum % 64) & 1) continue;  // possible without this item
            chosen.push_back(used_[i]);
            sum -= counts_[used_[i]];
        }
    }
    std::sort(chosen.begin(), chosen.end());
    return chosen;
}

namespace {

// Moves single items in or out, the heaviest first, as long as the sum gets closer. Returns the distance left.
double flip(const std::vector<double> &weights, const std::vector<int32_t> &falling, double target,
            std::vector<char> &taken) {
    double sum = 0.0;
    for (size_t i = 0; i < weights.size(); ++i) sum += taken[i] ? weights[i] : 0.0;
    Poll poll;
    for (bool better = true; better;) {
        better = false;
        for (const int32_t item : falling) {
            poll();
            const double changed = taken[item] ? sum - weights[item] : sum + weights[item];
            if (!(std::abs(changed - target) < std::abs(sum - target))) continue;
            taken[item] = !taken[item];
            sum = changed;
            better = true;
        }
    }
    return std::abs(sum - target);
}

// Corrects rounding errors. Items far below the unit counted as 0, so a second attempt makes room for them: it removes
// the lightest chosen items until the sum is below the target, then adds items that fit.
void polish(const std::vector<double> &weights, double target, std::vector<char> &taken) {
    std::vector<int32_t> falling(weights.size());
    std::iota(falling.begin(), falling.end(), 0);
    interruptible_sort(falling.begin(), falling.end(), [&](int32_t a, int32_t b) {
        return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
    });
    std::vector<char> roomy = taken;
    double sum = 0.0;
    for (size_t i = 0; i < weights.size(); ++i) sum += taken[i] ? weights[i] : 0.0;
    for (auto item = falling.rbegin(); item != falling.rend() && sum > target; ++item) {
        if (!roomy[*item]) continue;
        roomy[*item] = 0;
        sum -= weights[*item];
    }
    for (const int32_t item : falling) {
        if (roomy[item] || sum + weights[item] > target) continue;
        roomy[item] = 1;
        sum += weights[item];
    }
    const double direct = flip(weights, falling, target, taken);
    if (flip(weights, falling, target, roomy) < direct) taken = roomy;
}

}  // namespace

std::vector<int32_t> subset_sum(const std::vector<double> &weights, double target, double resolution) {
    const Units units = to_units(weights, resolution, DEFAULT_BUCKETS);
    const int64_t n = static_cast<int64_t>(weights.size());
    double total = 0.0;
    for (const double weight : weights) total += weight;

    // For targets above half, choose the complement instead: a table never needs sums above twice its target, since the
    // empty set is closer.
    const double out = std::max(0.0, total - target);
    const bool complement = target > total / 2;
    const double wanted = complement ? out : target;
    std::vector<char> taken(n, complement);
    if (units.unit > 0.0) {
        const double twice = std::floor(2.0 * (wanted / units.unit)) + 1.0;
        const int64_t limit = twice < static_cast<double>(units.total) ? static_cast<int64_t>(twice) : units.total;
        const int64_t ideal = SubsetSums::ideal(wanted, units.unit, limit, complement);
        const SubsetSums sums(units.counts, limit, true, {ideal});
        for (const int32_t item : sums.items(sums.nearest(wanted, units.unit, complement))) taken[item] = !complement;
    }
    if (!units.exact) polish(weights, target, taken);
    std::vector<int32_t> chosen;
    for (int64_t i = 0; i < n; ++i)
        if (taken[i] && weights[i] > 0.0) chosen.push_back(static_cast<int32_t>(i));
    return chosen;
}

}  // namespace interlace
