#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// What each layer of a module computes in its backward pass. A layer needs the gradient of its weights if it is
// trainable, and the gradient of its input if anything trainable lies strictly before it, in this module or in one that
// feeds it (trainable_before). The dissertation's eq. 3.3 as printed also charges the input gradient to the first
// trainable layer; its text does not, and neither does autograd.
struct BackwardNeeds {
    std::vector<bool> weight, input;
};
BackwardNeeds backward_needs(const std::vector<char> &frozen, bool trainable_before);

// Time of one forward and one backward per layer (dissertation 3.3.1, eqs. 3.1-3.2). recompute adds one forward to
// every layer that has a gradient to compute: activation checkpointing runs it again, and a layer without backward
// never.
std::vector<double> frozen_costs(const std::vector<double> &forward, const std::vector<double> &input_grad,
                                 const std::vector<double> &weight_grad, const std::vector<char> &frozen,
                                 bool trainable_before, bool recompute);

}  // namespace interlace
