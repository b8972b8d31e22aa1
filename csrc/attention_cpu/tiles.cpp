#include "attention_cpu/tiles.h"

#include "common/parallel.h"

namespace interlace {
namespace attention {

namespace {
constexpr int64_t MOST_WORDS = (int64_t(64) << 20) / 8;

Tokens from(Tokens tokens, int64_t first) {
    tokens.bits += first;
    tokens.doc += first;
    tokens.span += first;
    tokens.pos += first;
    if (tokens.window) tokens.window += first;
    return tokens;
}
}  // namespace

MaskTiles::MaskTiles(const Problem &problem, const Kernels &kernels)
    : problem_(problem), kernels_(kernels), words_(problem.block * problem.panels()) {
    const int64_t rows = problem.batch * problem.q_blocks();
    const int64_t tiles = problem.part_ptr[rows];
    kept_ = tiles * words_ <= MOST_WORDS;
    if (tiles == 0 || !kept_) return;
    all_.reset(new uint64_t[tiles * words_]);
    parallel_for(rows, problem.threads, [&](int64_t row) {
        for (int64_t at = problem.part_ptr[row]; at < problem.part_ptr[row + 1]; ++at)
            evaluate(at, row / problem.q_blocks(), row % problem.q_blocks(), all_.get() + at * words_);
    });
}

const uint64_t *MaskTiles::tile(int64_t at, int64_t b, int64_t i, uint64_t *room) const {
    if (all_) return all_.get() + at * words_;
    evaluate(at, b, i, room);
    return room;
}

void MaskTiles::evaluate(int64_t at, int64_t b, int64_t i, uint64_t *words) const {
    const int64_t j = problem_.part_idx[at];
    kernels_.mask_tile(from(problem_.queries.at(b), i * problem_.block), problem_.rows_of(i),
                       from(problem_.keys.at(b), j * problem_.block), problem_.keys_of(j), problem_.sinks,
                       problem_.panels(), words);
}

}  // namespace attention
}  // namespace interlace
