#pragma once

#include <cstdint>
#include <vector>

namespace interlace {

// Backward work of each layer of a module. A layer needs the gradient of its weights if it is trainable. It needs the
// gradient of its input if anything trainable is strictly before it, in this module or in one that feeds it
// (trainable_before). The dissertation's eq. 3.3 as printed also charges the input gradient to the first trainable
// layer. Neither its text nor autograd does.
struct BackwardNeeds {
    std::vector<bool> weight, input;
};
BackwardNeeds backward_needs(const std::vector<char> &frozen, bool trainable_before);

// Time of one forward and one backward per layer (dissertation 3.3.1, eqs. 3.1-3.2). recompute adds one forward to
// every layer that computes a gradient: activation checkpointing runs it again. A layer without backward is never
// recomputed.
std::vector<double> frozen_costs(const std::vector<double> &forward, const std::vector<double> &input_grad,
                                 const std::vector<double> &weight_grad, const std::vector<char> &frozen,
                                 bool trainable_before, bool recompute);

}  // namespace interlace
