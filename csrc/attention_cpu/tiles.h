// The bits of the partial blocks, computed once and shared by all heads if memory allows.
#pragma once

#include <cstdint>
#include <memory>

#include "attention_cpu/problem.h"

namespace interlace {
namespace attention {

class MaskTiles {
  public:
    // Evaluates all partial blocks of the plan in parallel, unless their bits would take more than 64 MiB.
    MaskTiles(const Problem &problem, const Kernels &kernels);

    int64_t tile_words() const { return words_; }
    // True if the words that tile() returns stay valid and do not use `room`.
    bool kept() const { return kept_; }

    // The words of entry `at` of part_idx, which belongs to query block i of batch row b; `room` holds tile_words().
    const uint64_t *tile(int64_t at, int64_t b, int64_t i, uint64_t *room) const;

  private:
    void evaluate(int64_t at, int64_t b, int64_t i, uint64_t *words) const;

    const Problem &problem_;
    const Kernels &kernels_;
    int64_t words_;
    bool kept_;
    std::unique_ptr<uint64_t[]> all_;
};

}  // namespace attention
}  // namespace interlace
