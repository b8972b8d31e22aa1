#include <algorithm>
#include <cmath>

#include "common/arrays.h"
#include "common/interruptible.h"
#include "plan/partition/frozen_costs.h"
#include "plan/partition/partition.h"

namespace interlace {

namespace {

py::array_t<int32_t> partition(const py::array &costs, int64_t stages) {
    const std::vector<double> values = read_costs(costs, "costs");
    const int64_t layers = static_cast<int64_t>(values.size());
    if (stages < 1) throw py::value_error("stages must be at least 1, got " + std::to_string(stages));
    if (stages > layers)
        throw py::value_error("cannot cut " + std::to_string(layers) + " layers into " + std::to_string(stages) +
                              " stages: every stage needs a layer, so use at most " + std::to_string(layers) +
                              " stages or a model with more layers");
    std::vector<int32_t> cuts;
    {
        const Interruptible call;
        cuts = min_bottleneck_partition(values, stages, layers);
    }
    return to_numpy(cuts);
}

void check_length(const std::vector<double> &values, const std::string &name, size_t layers) {
    if (values.size() != layers)
        throw py::value_error(name + " has " + std::to_string(values.size()) + " layers, forward has " +
                              std::to_string(layers) + ": every array needs one value per layer");
}

py::array_t<double> bind_frozen_costs(const py::array &forward, const py::array &input_grad,
                                      const py::array &weight_grad, const py::array &frozen, bool trainable_before,
                                      bool recompute) {
    const std::vector<double> f = read_costs(forward, "forward");
    const std::vector<double> d = read_costs(input_grad, "input_grad");
    const std::vector<double> w = read_costs(weight_grad, "weight_grad");
    check_length(d, "input_grad", f.size());
    check_length(w, "weight_grad", f.size());
    const std::vector<char> flags = read_flags(frozen, "frozen", f.size());
    std::vector<double> costs;
    {
        const Interruptible call;
        costs = frozen_costs(f, d, w, flags, trainable_before, recompute);
    }
    for (size_t i = 0; i < costs.size(); ++i) {
        check_signals(static_cast<int64_t>(i));
        if (!std::isfinite(costs[i]))
            throw py::value_error("the costs of layer " + std::to_string(i) + " overflow: use a larger unit");
    }
    return to_numpy(costs);
}

py::tuple bind_backward_needs(const py::array &frozen, bool trainable_before) {
    const std::vector<char> flags = read_flags(frozen, "frozen", static_cast<size_t>(frozen.size()));
    BackwardNeeds needs;
    {
        const Interruptible call;
        needs = backward_needs(flags, trainable_before);
    }
    py::array_t<bool> weight(static_cast<py::ssize_t>(flags.size())), input(static_cast<py::ssize_t>(flags.size()));
    std::copy(needs.weight.begin(), needs.weight.end(), weight.mutable_data());
    std::copy(needs.input.begin(), needs.input.end(), input.mutable_data());
    return py::make_tuple(weight, input);
}

}  // namespace

void bind_plan(py::module_ &module) {
    module.def("partition", &partition, py::arg("costs"), py::arg("stages"));
    module.def("backward_needs", &bind_backward_needs, py::arg("frozen"), py::arg("trainable_before"));
    module.def("frozen_costs", &bind_frozen_costs, py::arg("forward"), py::arg("input_grad"), py::arg("weight_grad"),
               py::arg("frozen"), py::arg("trainable_before"), py::arg("recompute"));
}

}  // namespace interlace
