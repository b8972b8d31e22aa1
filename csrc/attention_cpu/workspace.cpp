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

RowOrder::RowOrder(const Problem &problem, int64_t together)
    : together(together), count(problem.batch * ((problem.q_blocks() + together - 1) / together)),
      rows(new int64_t[count]) {
    std::iota(rows.get(), rows.get() + count, int64_t(0));
    const int64_t n = problem.q_blocks(), groups = (n + together - 1) / together;
    const auto blocks = [&](int64_t group) {
        const int64_t first = group / groups * n + group % groups * together;
        const int64_t last = std::min(first + together, group / groups * n + n);
        return (problem.full_ptr[last] - problem.full_ptr[first]) + (problem.part_ptr[last] - problem.part_ptr[first]);
    };
    std::stable_sort(rows.get(), rows.get() + count,
                     [&](int64_t one, int64_t other) { return blocks(one) > blocks(other); });
}

}  // namespace attention
}  // namespace interlace
