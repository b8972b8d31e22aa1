// Memory of a work item, and the order of rows. Shared by all instruction sets, compiled for the lowest.
#pragma once

#include <cstdint>
#include <memory>

#include "attention_cpu/problem.h"

namespace interlace {
namespace attention {

// A block of memory handed out in pieces aligned to 64 bytes.
class Workspace {
  public:
    explicit Workspace(int64_t bytes);
    ~Workspace();
    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;

    template <class T>
    T *take(int64_t count) {
        T *piece = reinterpret_cast<T *>(next_);
        next_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return piece;
    }

  private:
    char *start_, *next_;
};

// Rows of blocks (b * q_blocks + i), those with the most blocks first. Or groups of several rows of one batch row:
// b * groups + group.
struct RowOrder {
    explicit RowOrder(const Problem &problem, int64_t together = 1);

    int64_t together, count;
    std::unique_ptr<int64_t[]> rows;
};

template <class Pass>
void run_item(void *pass, int64_t item) {
    (*static_cast<const Pass *>(pass))(item);
}

}  // namespace attention
}  // namespace interlace
