#include "common/interruptible.h"
#include "plan/partition/limits.h"
#include "plan/read_arrays.h"

namespace interlace {

namespace {

py::array_t<int32_t> limited(const py::array &costs, const py::array &memory, const py::array &limits,
                             const py::array &speeds) {
    const std::vector<double> layers = read_costs(costs, "costs"), bytes = read_costs(memory, "memory");
    const std::vector<double> most = read_costs(limits, "memory_limits"), speed = read_positive(speeds, "speeds");
    const size_t stages = speed.size();
    if (bytes.size() != layers.size())
        throw py::value_error("memory has " + std::to_string(bytes.size()) + " layers, costs has " +
                              std::to_string(layers.size()));
    if (most.size() != stages)
        throw py::value_error("memory_limits has " + std::to_string(most.size()) + " stages, not " +
                              std::to_string(stages));
    if (stages > layers.size())
        throw py::value_error("cannot cut " + std::to_string(layers.size()) + " layers into " + std::to_string(stages) +
                              " stages: every stage needs a layer");
    double total = 0.0;
    for (const double cost : layers) total += cost;
    for (size_t s = 0; s < stages; ++s)
        if (!std::isfinite(total / speed[s]))
            throw py::value_error("speeds[" + std::to_string(s) + "] is " + format_number(speed[s]) +
                                  ": the time of all layers overflows");
    std::vector<int32_t> cuts;
    {
        const Interruptible call;
        cuts = limited_partition(layers, bytes, most, speed);
    }
    if (cuts.empty()) throw py::value_error("no cut keeps the memory limits: use more stages or more memory");
    return to_numpy(cuts);
}

}  // namespace

void bind_plan_partition_limits(py::module_ &module) {
    module.def("limited_partition", &limited, py::arg("costs"), py::arg("memory"), py::arg("memory_limits"),
               py::arg("speeds"));
}

}  // namespace interlace
