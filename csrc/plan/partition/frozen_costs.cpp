#include "plan/partition/frozen_costs.h"

#include <cstddef>

#include "common/interrupt.h"

namespace interlace {

BackwardNeeds backward_needs(const std::vector<char> &frozen, bool trainable_before) {
    BackwardNeeds needs;
    Poll poll;
    for (const char is_frozen : frozen) {
        poll();
        needs.weight.push_back(!is_frozen);
        needs.input.push_back(trainable_before);
        trainable_before = trainable_before || !is_frozen;
    }
    return needs;
}

std::vector<double> frozen_costs(const std::vector<double> &forward, const std::vector<double> &input_grad,
                                 const std::vector<double> &weight_grad, const std::vector<char> &frozen,
                                 bool trainable_before, bool recompute) {
    const BackwardNeeds needs = backward_needs(frozen, trainable_before);
    std::vector<double> costs = forward;
    Poll poll;
    for (size_t i = 0; i < costs.size(); ++i) {
        poll();
        if (needs.weight[i]) costs[i] += weight_grad[i];
        if (needs.input[i]) costs[i] += input_grad[i];
        if (recompute && (needs.weight[i] || needs.input[i])) costs[i] += forward[i];
    }
    return costs;
}

}  // namespace interlace
