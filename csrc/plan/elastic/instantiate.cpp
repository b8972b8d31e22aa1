#include "plan/elastic/instantiate.h"

#include <algorithm>
#include <limits>

#include "common/interrupt.h"
#include "common/limits.h"
#include "plan/elastic/split_batch.h"

namespace interlace {

namespace {

// Maximum number of microbatches that a number of pipelines runs on 0 .. n nodes; minus infinity if none uses exactly
// that many nodes. float if it can hold all numbers of microbatches, since floats are compared twice as fast.
template <typename Value>
using Row = std::vector<Value>;

template <typename Value>
struct Item {
    int64_t size;
    size_t which;
    Value runs;
};

// sums[n] = max over k of a[k] + b[n - k], at most `most`: the pipelines of a together with the pipelines of b.
template <typename Value>
Row<Value> beside(const Row<Value> &a, const Row<Value> &b, Value most) {
    const int64_t n = static_cast<int64_t>(a.size());
    Row<Value> sums(n, -std::numeric_limits<Value>::infinity());
    Poll poll;
    for (int64_t k = 0; k < n; ++k) {
        if (a[k] < 0) continue;
        poll(1 + (n - k) / 16);  // a step takes a nanosecond or less
        const Value own = a[k];
        Value *const out = sums.data() + k;
        for (int64_t i = 0; i < n - k; ++i) out[i] = std::max(out[i], own + b[i]);
    }
    for (Value &sum : sums) sum = std::min(sum, most);
    return sums;
}

// The same if b is one pipeline or (or_none) at most one.
template <typename Value>
Row<Value> beside_one(const Row<Value> &a, const std::vector<Item<Value>> &items, bool or_none, Value most) {
    const int64_t n = static_cast<int64_t>(a.size());
    Poll poll;
    Row<Value> sums = or_none ? a : Row<Value>(n, -std::numeric_limits<Value>::infinity());
    for (const Item<Value> &item : items) {
        poll(1 + (n - item.size) / 16);
        for (int64_t i = 0; i < n - item.size; ++i)
            sums[i + item.size] = std::max(sums[i + item.size], a[i] + item.runs);
    }
    for (Value &sum : sums) sum = std::min(sum, most);
    return sums;
}

// Microbatches of exactly `count` pipelines or, with or_fewer, of 0 .. count of them. Adds one pipeline after the
// other, or squares if that is less work.
template <typename Value>
class Power {
  public:
    Power(const std::vector<Item<Value>> &items, int64_t nodes, int64_t count, bool or_fewer, Value most)
        : items_(items), or_fewer_(or_fewer), most_(most) {
        Row<Value> none(nodes + 1, -std::numeric_limits<Value>::infinity());
        none[0] = 0;
        int bits = 0;
        while (count >> bits != 0) ++bits;
        rows_.push_back(std::move(none));
        const int64_t work = count * static_cast<int64_t>(items.size());
        if (work <= bits * (nodes / 8 + static_cast<int64_t>(items.size())) && count * nodes <= int64_t{1} << 24) {
            for (int64_t i = 0; i < count; ++i) add_one();
        } else {
            while (bits-- > 0) {
                if (rows_.size() > 1) square();
                if (count >> bits & 1) add_one();
            }
        }
    }

    const Row<Value> &runs() const { return rows_.back(); }

    // Adds the pipelines that reach runs()[node] to the counts.
    void take(int64_t node, std::vector<int32_t> &counts) const { take(rows_.size() - 1, node, counts); }

  private:
    void add_one() {
        rows_.push_back(beside_one(rows_.back(), items_, or_fewer_, most_));
        squared_.push_back(0);
    }

    void square() {
        rows_.push_back(beside(rows_.back(), rows_.back(), most_));
        squared_.push_back(1);
    }

    void take(size_t level, int64_t node, std::vector<int32_t> &counts) const {
        for (; node > 0; --level) {
            const Row<Value> &before = rows_[level - 1];
            const Value wanted = rows_[level][node];
            if (squared_[level - 1]) {
                int64_t part = 0;
                while (std::min(before[part] + before[node - part], most_) != wanted) ++part;
                take(level - 1, part, counts);
                node -= part;
            } else if (!or_fewer_ || before[node] != wanted) {
                for (const Item<Value> &item : items_) {
                    if (item.size > node || std::min(before[node - item.size] + item.runs, most_) != wanted) continue;
                    ++counts[item.which];
                    node -= item.size;
                    break;
                }
            }
        }
    }

    const std::vector<Item<Value>> &items_;
    const bool or_fewer_;
    const Value most_;
    std::vector<Row<Value>> rows_;
    std::vector<char> squared_;  // per row after the first: true if made by squaring
};

template <typename Value>
class Search {
  public:
    Search(const std::vector<int64_t> &sizes, const std::vector<double> &times, int64_t nodes, int64_t pipelines,
           int64_t microbatches)
        : sizes_(sizes), times_(times), nodes_(nodes), pipelines_(pipelines), microbatches_(microbatches),
          most_(static_cast<Value>(microbatches)) {}

    Instantiation solve() {
        double rate = 0.0;  // microbatches per second and node
        for (size_t j = 0; j < sizes_.size(); ++j)
            rate = std::max(rate, 1.0 / (times_[j] * static_cast<double>(sizes_[j])));
        double high = *std::max_element(times_.begin(), times_.end()) * static_cast<double>(microbatches_);
        double low = static_cast<double>(microbatches_) / (rate * static_cast<double>(nodes_)) * (1.0 - 1e-12);
        // The best time is rarely far above the time at which every node is as fast as the fastest.
        for (double step = low / 64; low + step < high && best_.counts.empty(); step *= 2) narrow(low + step, low);
        if (best_.counts.empty() && !probe(high)) return best_;
        for (high = best_.time; low < high; high = best_.time) {
            const double middle = low + (high - low) / 2;
            narrow(middle < high ? middle : low, low);
        }
        return best_;
    }

  private:
    // Probes a limit. If infeasible, low becomes the next time at which some template runs one microbatch more.
    void narrow(double limit, double &low) {
        if (probe(limit)) return;
        low = INF;
        for (size_t j = 0; j < times_.size(); ++j)
            if (runs_[j] < microbatches_) low = std::min(low, static_cast<double>(runs_[j] + 1) * times_[j]);
    }

    // True if some combination runs all microbatches within the limit; best_ is then one of these.
    bool probe(double limit) {
        runs_.clear();
        for (const double time : times_) runs_.push_back(microbatches_within(limit, time, microbatches_));
        std::vector<Item<Value>> every;
        for (size_t j = 0; j < sizes_.size(); ++j)
            if (runs_[j] > 0) every.push_back({sizes_[j], j, static_cast<Value>(runs_[j])});
        std::sort(every.begin(), every.end(),
                  [](const Item<Value> &a, const Item<Value> &b) { return a.size < b.size; });

        // First allow any number of pipelines from the minimum on. If that cannot run all, nothing can. Usually it has
        // no more pipelines than microbatches.
        std::vector<int32_t> counts(sizes_.size(), 0);
        std::vector<Item<Value>> items;
        const Row<Value> rest = unbounded(every, items);
        const Power<Value> least(items, nodes_, pipelines_, false, most_);
        int64_t node = best_split(least.runs(), rest);
        if (node < 0) return false;
        least.take(node, counts);
        for (node = nodes_ - node; node > 0; node -= items[last_[node]].size) ++counts[items[last_[node]].which];
        int64_t made = 0;
        for (const int32_t count : counts) made += count;
        if (made > microbatches_) {
            std::fill(counts.begin(), counts.end(), 0);
            const Power<Value> needed(every, nodes_, pipelines_, false, most_);
            const Power<Value> more(every, nodes_, microbatches_ - pipelines_, true, most_);
            node = best_split(needed.runs(), more.runs());
            if (node < 0) return false;
            needed.take(node, counts);
            more.take(nodes_ - node, counts);
        }
        keep(std::move(counts));
        return true;
    }

    // Microbatches of any number of pipelines. items: the templates that run more than any combination of smaller ones
    // on as many nodes. The others can be replaced, which only adds pipelines. last_: the last item on each node.
    Row<Value> unbounded(const std::vector<Item<Value>> &every, std::vector<Item<Value>> &items) {
        Row<Value> runs(nodes_ + 1, -std::numeric_limits<Value>::infinity());
        runs[0] = 0;
        last_.assign(nodes_ + 1, -1);
        size_t next = 0;
        Poll poll;
        for (int64_t node = 1; node <= nodes_; ++node) {
            poll(1 + static_cast<int64_t>(items.size()));
            for (size_t i = 0; i < items.size(); ++i) {
                const Value sum = std::min(runs[node - items[i].size] + items[i].runs, most_);
                if (!(sum > runs[node])) continue;
                runs[node] = sum;
                last_[node] = static_cast<int32_t>(i);
            }
            if (next == every.size() || every[next].size != node) continue;
            const Item<Value> &own = every[next++];
            if (!(own.runs > runs[node])) continue;
            runs[node] = own.runs;
            last_[node] = static_cast<int32_t>(items.size());
            items.push_back(own);
        }
        return runs;
    }

    // Number of nodes for a, if a and b together run all microbatches; otherwise -1.
    int64_t best_split(const Row<Value> &a, const Row<Value> &b) const {
        for (int64_t node = 0; node <= nodes_; ++node)
            if (std::min(a[node] + b[nodes_ - node], most_) >= most_) return node;
        return -1;
    }

    void keep(std::vector<int32_t> counts) {
        std::vector<double> each;
        for (size_t j = 0; j < sizes_.size(); ++j) each.insert(each.end(), counts[j], times_[j]);
        best_.counts = std::move(counts);
        best_.microbatches = split_min_max(each, microbatches_);
        best_.time = 0.0;
        for (size_t i = 0; i < each.size(); ++i)
            best_.time = std::max(best_.time, static_cast<double>(best_.microbatches[i]) * each[i]);
    }

    const std::vector<int64_t> &sizes_;
    const std::vector<double> &times_;
    const int64_t nodes_, pipelines_, microbatches_;
    const Value most_;
    Instantiation best_{{}, {}, INF};
    std::vector<int64_t> runs_;
    std::vector<int32_t> last_;
};

}  // namespace

Instantiation best_instantiation(const std::vector<int64_t> &sizes, const std::vector<double> &times, int64_t nodes,
                                 int64_t pipelines, int64_t microbatches) {
    if (pipelines > microbatches) return {{}, {}, INF};
    if (microbatches <= int64_t{1} << 23) return Search<float>(sizes, times, nodes, pipelines, microbatches).solve();
    return Search<double>(sizes, times, nodes, pipelines, microbatches).solve();
}

}  // namespace interlace
