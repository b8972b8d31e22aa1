#include "attention_cpu/block_lists.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/parallel.h"

namespace interlace {
namespace attention {

namespace {

constexpr int32_t FAR = std::numeric_limits<int32_t>::max();

// Inclusive bounds over the tokens of one block. They suffice to prove many pairs of blocks empty or full.
struct Summary {
    int32_t doc_lo = FAR, doc_hi = -1;  // over tokens that are not padding
    int32_t pos_lo = FAR, pos_hi = -1;
    int32_t reach_lo = FAR, reach_hi = -FAR;  // pos - window: keys at or before it are outside the window
    int32_t span_lo = FAR, span_hi = -1;      // over tokens that have a span
    bool padded = false, spanless = false;    // some token is padding; some token has no span
    uint64_t any_bits = 0, all_bits = ~uint64_t(0);
    uint64_t own = 0;  // OR of 1 << own stream
};

// Merges the bounds of both.
Summary operator|(const Summary &one, const Summary &other) {
    Summary s;
    s.doc_lo = std::min(one.doc_lo, other.doc_lo);
    s.doc_hi = std::max(one.doc_hi, other.doc_hi);
    s.pos_lo = std::min(one.pos_lo, other.pos_lo);
    s.pos_hi = std::max(one.pos_hi, other.pos_hi);
    s.reach_lo = std::min(one.reach_lo, other.reach_lo);
    s.reach_hi = std::max(one.reach_hi, other.reach_hi);
    s.span_lo = std::min(one.span_lo, other.span_lo);
    s.span_hi = std::max(one.span_hi, other.span_hi);
    s.padded = one.padded || other.padded;
    s.spanless = one.spanless || other.spanless;
    s.any_bits = one.any_bits | other.any_bits;
    s.all_bits = one.all_bits & other.all_bits;
    s.own = one.own | other.own;
    return s;
}

enum Class : uint8_t { EMPTY, PARTIAL, FULL, UNKNOWN };

Summary summarise(const Tokens &tokens, int64_t first, int64_t last) {
    Summary s;
    for (int64_t t = first; t < last; ++t) {
        const int32_t doc = tokens.doc[t], span = tokens.span[t], pos = tokens.pos[t];
        if (doc >= 0) {
            s.doc_lo = std::min(s.doc_lo, doc);
            s.doc_hi = std::max(s.doc_hi, doc);
        } else {
            s.padded = true;
        }
        if (span >= 0) {
            s.span_lo = std::min(s.span_lo, span);
            s.span_hi = std::max(s.span_hi, span);
        } else {
            s.spanless = true;
        }
        s.pos_lo = std::min(s.pos_lo, pos);
        s.pos_hi = std::max(s.pos_hi, pos);
        if (tokens.window) {
            s.reach_lo = std::min(s.reach_lo, pos - tokens.window[t]);
            s.reach_hi = std::max(s.reach_hi, pos - tokens.window[t]);
        }
        const uint64_t bits = static_cast<uint64_t>(tokens.bits[t]);
        s.any_bits |= bits;
        s.all_bits &= bits;
        s.own |= uint64_t(1) << (bits >> 56 & 63);
    }
    return s;
}

inline Class decide(const Summary &q, const Summary &k, int64_t sinks) {
    if (q.doc_hi < k.doc_lo || k.doc_hi < q.doc_lo) return EMPTY;
    constexpr uint64_t CAUSAL = uint64_t(1) << 63;
    const bool no_span = q.span_hi < k.span_lo || k.span_hi < q.span_lo;
    if (no_span && ((q.any_bits & k.own) == 0 || ((q.all_bits & CAUSAL) && k.pos_lo > q.pos_hi))) return EMPTY;
    if (k.pos_hi <= q.reach_lo && k.pos_lo >= sinks) return EMPTY;

    const bool together =
        q.doc_lo == q.doc_hi && k.doc_lo == k.doc_hi && q.doc_lo == k.doc_lo && !q.padded && !k.padded;
    if (!together || !(k.pos_lo > q.reach_hi || k.pos_hi < sinks)) return UNKNOWN;
    if ((k.own & ~q.all_bits) == 0 && (!(q.any_bits & CAUSAL) || k.pos_hi <= q.pos_lo)) return FULL;
    const bool one_span = q.span_lo == q.span_hi && k.span_lo == k.span_hi && q.span_lo == k.span_lo;
    return one_span && !q.spanless && !k.spanless ? FULL : UNKNOWN;
}

// Keys are tested in portions of this size, so that a partial block is usually recognised in the first.
constexpr int64_t PORTION = 16;

Class evaluate(const Tokens &q, int64_t rows, const Tokens &k, int64_t columns, int64_t sinks, int64_t panels,
               std::vector<uint64_t> &words) {
    bool some = false, every = true;
    for (int64_t first = 0; first < columns; first += PORTION) {
        const int64_t n = std::min(PORTION, columns - first);
        const Tokens keys{k.bits + first, k.doc + first, k.span + first, k.pos + first, nullptr, k.length};
        kernels().mask_tile(q, rows, keys, n, sinks, panels, words.data());
        for (int64_t j = 0; j < n; ++j)
            for (int64_t p = 0; p < panels; ++p) {
                const int64_t here = std::min<int64_t>(PANEL, rows - p * PANEL);
                if (here <= 0) continue;
                const uint64_t all = here == PANEL ? ~uint64_t(0) : (uint64_t(1) << here) - 1;
                some |= words[j * panels + p] != 0;
                every &= words[j * panels + p] == all;
            }
        if (some && !every) return PARTIAL;
    }
    return some ? FULL : EMPTY;  // if "some" holds here, "every" holds too
}

Tokens from(Tokens t, int64_t first) {
    return {t.bits + first, t.doc + first, t.span + first, t.pos + first, t.window ? t.window + first : nullptr,
            t.length};
}

// One list, from the portions of rows that were classified in parallel. ptr holds the length of each row so far.
void join(std::vector<std::vector<int32_t>> &portions, int threads, Lists &lists) {
    std::vector<int64_t> start(portions.size() + 1, 0);
    for (size_t i = 0; i < portions.size(); ++i) start[i + 1] = start[i] + static_cast<int64_t>(portions[i].size());
    if (start.back() > FAR)
        throw std::length_error("a block list would have " + std::to_string(start.back()) +
                                " entries, more than int32 can count: use larger blocks");
    lists.idx.resize(static_cast<size_t>(start.back()));
    parallel_for(static_cast<int64_t>(portions.size()), threads, [&](int64_t i) {
        std::copy(portions[i].begin(), portions[i].end(), lists.idx.begin() + start[i]);
        std::vector<int32_t>().swap(portions[i]);
    });
    for (size_t r = 1; r < lists.ptr.size(); ++r) lists.ptr[r] += lists.ptr[r - 1];
}

// The same pairs by column: row b * k_blocks + j lists the query blocks of key block j, ascending.
void transpose(const Lists &by_query, int64_t batch, int64_t q_blocks, int64_t k_blocks, int threads, Lists &by_key) {
    constexpr int64_t COLUMNS = 512;  // columns per portion of work
    const int64_t portions = (k_blocks + COLUMNS - 1) / COLUMNS;
    by_key.ptr.assign(static_cast<size_t>(batch * k_blocks + 1), 0);
    by_key.idx.resize(by_query.idx.size());
    // visit(at, i) for the entries of one portion, ascending by query block i.
    const auto each = [&](int64_t item, auto visit) {
        const int64_t b = item / portions, first = item % portions * COLUMNS;
        for (int64_t i = 0; i < q_blocks; ++i) {
            const int32_t *at = by_query.idx.data() + by_query.ptr[b * q_blocks + i];
            const int32_t *end = by_query.idx.data() + by_query.ptr[b * q_blocks + i + 1];
            if (first > 0) at = std::lower_bound(at, end, static_cast<int32_t>(first));
            for (; at < end && *at < first + COLUMNS; ++at) visit(b * k_blocks + *at, i);
        }
    };
    parallel_for(batch * portions, threads,
                 [&](int64_t item) { each(item, [&](int64_t row, int64_t) { ++by_key.ptr[row + 1]; }); });
    for (size_t r = 1; r < by_key.ptr.size(); ++r) by_key.ptr[r] += by_key.ptr[r - 1];
    std::vector<int32_t> next(by_key.ptr.begin(), by_key.ptr.end() - 1);
    parallel_for(batch * portions, threads, [&](int64_t item) {
        each(item, [&](int64_t row, int64_t i) { by_key.idx[next[row]++] = static_cast<int32_t>(i); });
    });
}

// One block of one side: its first token, its number of tokens, and bits of finished tokens per panel.
struct Block {
    int64_t first, count;
    std::vector<uint64_t> seen;

    Block(const Tokens &tokens, int64_t first, int64_t count)
        : first(first), count(count), seen((count + PANEL - 1) / PANEL) {
        for (int64_t t = 0; t < count; ++t)
            seen[t / PANEL] |= uint64_t(tokens.doc[first + t] < 0) << t % PANEL;  // padding
    }
    bool all() const {
        for (int64_t p = 0; p * PANEL < count; ++p)
            if (~seen[p] << std::max<int64_t>(0, PANEL - (count - p * PANEL)) != 0) return false;
        return true;
    }
};

// Marks queries that see a key of keys[first, last), or keys that are seen by a query of queries[first, last).
void look_at(const Tokens &queries, const Tokens &keys, int64_t first, int64_t last, int64_t sinks, bool of_queries,
             Block &block) {
    uint64_t words[PANEL];
    for (int64_t p = 0; p * PANEL < block.count; ++p) {
        const int64_t mine = block.first + p * PANEL, here = std::min<int64_t>(PANEL, block.count - p * PANEL);
        const uint64_t wanted = here == PANEL ? ~uint64_t(0) : (uint64_t(1) << here) - 1;
        for (int64_t at = first; at < last && (block.seen[p] & wanted) != wanted; at += PANEL) {
            const int64_t n = std::min<int64_t>(PANEL, last - at);
            if (of_queries)
                kernels().mask_tile(from(queries, mine), here, from(keys, at), n, sinks, 1, words);
            else
                kernels().mask_tile(from(queries, at), n, from(keys, mine), here, sinks, 1, words);
            for (int64_t j = 0; j < (of_queries ? n : here); ++j)
                block.seen[p] |= of_queries ? words[j] : uint64_t(words[j] != 0) << j;
        }
    }
}

// The documents of one side as specified in BlockLists. Blocks that have a full block are done. In most others every
// token sees itself, so the diagonal block is tested before the partial ones. Few of those are then left.
std::vector<int32_t> documents(const Tokens &queries, const Tokens &keys, int64_t batch, int64_t block, int64_t sinks,
                               int threads, bool of_queries, const Lists &full, const Lists &part) {
    const Tokens &side = of_queries ? queries : keys, &other = of_queries ? keys : queries;
    const int64_t blocks = (side.length + block - 1) / block;
    std::vector<int32_t> doc(side.doc, side.doc + batch * side.length);
    parallel_for(batch * blocks, threads, [&](int64_t row) {
        if (full.ptr[row + 1] > full.ptr[row]) return;
        const int64_t b = row / blocks, first = row % blocks * block;
        const Tokens q = queries.at(b), k = keys.at(b), mine = side.at(b);
        Block here(mine, first, std::min(block, side.length - first));
        const auto look = [&](int64_t other_block) {
            const int64_t start = other_block * block;
            look_at(q, k, start, std::min(start + block, other.length), sinks, of_queries, here);
        };
        look(row % blocks);
        for (int32_t at = part.ptr[row]; at < part.ptr[row + 1] && !here.all(); ++at) look(part.idx[at]);
        for (int64_t t = 0; t < here.count; ++t)
            if (!(here.seen[t / PANEL] >> t % PANEL & 1)) doc[b * side.length + first + t] = -1;
    });
    return doc;
}

}  // namespace

BlockLists block_lists(const Tokens &queries, const Tokens &keys, int64_t batch, int64_t sinks, int64_t block,
                       int threads) {
    const int64_t q_blocks = (queries.length + block - 1) / block, k_blocks = (keys.length + block - 1) / block;
    const int64_t panels = (block + PANEL - 1) / PANEL, rows = batch * q_blocks;
    std::vector<Summary> q_side(rows), k_side(batch * k_blocks);
    parallel_for(rows + batch * k_blocks, threads, [&](int64_t item) {
        const bool query = item < rows;
        const Tokens &tokens = query ? queries : keys;
        const int64_t blocks = query ? q_blocks : k_blocks, at = query ? item : item - rows;
        const int64_t first = at % blocks * block;
        (query ? q_side : k_side)[at] =
            summarise(tokens.at(at / blocks), first, std::min(first + block, tokens.length));
    });

    // Bounds of a group of key blocks, to decide the whole group at once.
    constexpr int64_t GROUP = 16;
    const int64_t k_groups = (k_blocks + GROUP - 1) / GROUP;
    std::vector<Summary> groups(batch * k_groups);
    for (int64_t at = 0; at < batch * k_blocks; ++at) {
        const int64_t b = at / k_blocks, j = at % k_blocks;
        Summary &group = groups[b * k_groups + j / GROUP];
        group = j % GROUP ? group | k_side[at] : k_side[at];
    }

    BlockLists lists;
    lists.full_q.ptr.assign(static_cast<size_t>(rows + 1), 0);
    lists.part_q.ptr.assign(static_cast<size_t>(rows + 1), 0);
    constexpr int64_t ROWS = 16;  // rows per portion of work
    const int64_t portions = (rows + ROWS - 1) / ROWS;
    std::vector<std::vector<int32_t>> full(portions), part(portions);
    parallel_for(portions, threads, [&](int64_t portion) {
        std::vector<uint64_t> words(static_cast<size_t>(PORTION * panels));
        for (int64_t row = portion * ROWS; row < std::min((portion + 1) * ROWS, rows); ++row) {
            const int64_t b = row / q_blocks, i = row % q_blocks;
            const Summary q = q_side[row];
            const size_t full_before = full[portion].size(), part_before = part[portion].size();
            for (int64_t j = 0; j < k_blocks;) {
                const int64_t end = std::min(j / GROUP * GROUP + GROUP, k_blocks);
                const Class together = decide(q, groups[b * k_groups + j / GROUP], sinks);
                for (; j < end && together != EMPTY; ++j) {
                    Class found = together == FULL ? FULL : decide(q, k_side[b * k_blocks + j], sinks);
                    if (found == UNKNOWN)
                        found = evaluate(from(queries.at(b), i * block), std::min(block, queries.length - i * block),
                                         from(keys.at(b), j * block), std::min(block, keys.length - j * block), sinks,
                                         panels, words);
                    // GPU kernels test no bounds in full blocks, so a block that ends with the sequence is partial.
                    const bool whole = (i + 1) * block <= queries.length && (j + 1) * block <= keys.length;
                    if (found == FULL && !whole) found = PARTIAL;
                    if (found == FULL) full[portion].push_back(static_cast<int32_t>(j));
                    if (found == PARTIAL) part[portion].push_back(static_cast<int32_t>(j));
                }
                j = end;
            }
            lists.full_q.ptr[row + 1] = static_cast<int32_t>(full[portion].size() - full_before);
            lists.part_q.ptr[row + 1] = static_cast<int32_t>(part[portion].size() - part_before);
        }
    });
    join(full, threads, lists.full_q);
    join(part, threads, lists.part_q);
    transpose(lists.full_q, batch, q_blocks, k_blocks, threads, lists.full_k);
    transpose(lists.part_q, batch, q_blocks, k_blocks, threads, lists.part_k);
    lists.q_doc = documents(queries, keys, batch, block, sinks, threads, true, lists.full_q, lists.part_q);
    lists.k_doc = documents(queries, keys, batch, block, sinks, threads, false, lists.full_k, lists.part_k);
    return lists;
}

}  // namespace attention
}  // namespace interlace
