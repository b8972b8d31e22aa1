#include "attention_cpu/workspace.h"

#include <algorithm>
#include <new>
#include <numeric>

namespace interlace {
namespace attention {

Workspace::Workspace(int64_t bytes) {
    start_ = next_ = static_cast<char *>(::operator new(static_cast<size_t>(bytes + 64), std::align_val_t(64)));
}

Workspace::~Workspace() { ::operator delete(start_, std::align_val_t(64)); }

RowOrder::RowOrder(const Problem &problem) : count(problem.batch * problem.q_blocks()), rows(new int64_t[count]) {
    std::iota(rows.get(), rows.get() + count, int64_t(0));
    const auto blocks = [&](int64_t row) {
        return (problem.full_ptr[row + 1] - problem.full_ptr[row]) + (problem.part_ptr[row + 1] - problem.part_ptr[row]);
    };
    std::stable_sort(rows.get(), rows.get() + count,
                     [&](int64_t one, int64_t other) { return blocks(one) > blocks(other); });
}

}  // namespace attention
}  // namespace interlace
