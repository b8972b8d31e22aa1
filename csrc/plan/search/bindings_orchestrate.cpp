#include <algorithm>
#include <cmath>
#include <utility>

#include "common/interruptible.h"
#include "plan/search/orchestrate.h"
#include "plan/read_arrays.h"

namespace interlace {

namespace {

// forward [modules, tp sizes]; layers [modules]; bytes [modules, 5]: weights and gradients, optimizer, activations,
// gradients alone, output.
py::tuple orchestrate(const py::array &forward, const py::array &layers, const py::array &bytes, int64_t backbone,
                      const py::array &tp, int64_t gpus, int64_t batch, int64_t vpp, double gpu_memory,
                      std::pair<double, double> stage_link, std::pair<double, double> data_link) {
    const Matrix times = read_matrix(forward, "forward"), memory = read_matrix(bytes, "bytes");
    checked_count(gpus, "gpus", 1, 1 << 24);
    checked_count(batch, "batch", 1, 1 << 30);
    checked_count(vpp, "vpp", 1, 1 << 10);
    const std::vector<int64_t> sizes = read_some_integers(tp, "tp", 1, 1 << 10);
    const std::vector<int64_t> depth = read_some_integers(layers, "layers", 0, 1 << 20);
    if (static_cast<int64_t>(depth.size()) != times.rows || memory.rows != times.rows || memory.columns != 5)
        throw py::value_error("layers and bytes need one row per module");
    if (static_cast<int64_t>(sizes.size()) != times.columns)
        throw py::value_error("forward has " + std::to_string(times.columns) + " columns, but there are " +
                              std::to_string(sizes.size()) + " tensor-parallel sizes: one column is needed for each");
    checked_count(backbone, "backbone", 0, times.rows - 1);
    if (!(gpu_memory > 0)) throw py::value_error("gpu_memory must be positive, got " + format_number(gpu_memory));
    const double largest = *std::max_element(times.values.begin(), times.values.end());
    if (overflows(largest * static_cast<double>(times.rows) * std::pow(static_cast<double>(batch), 2) * (1 << 24)))
        throw py::value_error("the time of a batch overflows: use a larger unit than for forward times of " +
                              format_number(largest));
    const OrchestrationLimits limits{
        gpus, batch, vpp, gpu_memory, read_link(stage_link, "stage_link"), read_link(data_link, "data_link")};
    const double most = *std::max_element(memory.values.begin(), memory.values.end()) * static_cast<double>(batch);
    for (const LinkCost &link : {limits.stage_link, limits.data_link})
        if (overflows(link.transfer(most) * static_cast<double>(times.rows) * (1 << 25)))
            throw py::value_error("the time of a transfer overflows: use a larger unit than for a latency of " +
                                  format_number(link.latency) + " and " + format_number(link.per_byte) + " per byte");
    std::vector<OrchestratedModule> modules;
    for (int64_t m = 0; m < times.rows; ++m) {
        const double *row = &times.values[m * times.columns], *size = &memory.values[m * 5];
        modules.push_back(
            {std::vector<double>(row, row + times.columns), depth[m], size[0], size[1], size[2], size[3], size[4]});
    }
    Orchestration best;
    {
        const Interruptible call;
        best = best_orchestration(modules, static_cast<size_t>(backbone), sizes, limits);
    }
    if (best.degrees.empty())
        throw py::value_error("no degrees fit " + std::to_string(gpus) + " GPUs and their memory");
    std::vector<int64_t> flat;
    for (const ModuleDegrees &each : best.degrees) flat.insert(flat.end(), {each.tp, each.dp, each.pp});
    const py::ssize_t rows = static_cast<py::ssize_t>(modules.size());
    return py::make_tuple(best.time, to_numpy(flat).reshape({rows, py::ssize_t{3}}));
}

}  // namespace

void bind_plan_orchestrate(py::module_ &module) {
    module.def("orchestrate", &orchestrate, py::arg("forward"), py::arg("layers"), py::arg("bytes"),
               py::arg("backbone"), py::arg("tp"), py::arg("gpus"), py::arg("batch"), py::arg("vpp"),
               py::arg("gpu_memory"), py::arg("stage_link"), py::arg("data_link"));
}

}  // namespace interlace
