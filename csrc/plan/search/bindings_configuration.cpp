#include <string>
#include <tuple>

#include "common/interruptible.h"
#include "plan/read_arrays.h"
#include "plan/search/configuration.h"

namespace interlace {

namespace {

constexpr int64_t MOST = 1 << 24;
constexpr double MOST_STAGES = 1 << 26;  // about 30 bytes each

// degrees [degrees, 2]: tp, cp; forward, backward [degrees, layers]; layers [6, layers]: weights, gradients, optimizer,
// activations, input, reduces.
using ModuleArrays = std::tuple<py::array, py::array, py::array, py::array>;

SearchedModule read_module(const ModuleArrays &arrays, const std::string &name) {
    const auto &[degrees, forward, backward, layers] = arrays;
    const Matrix f = read_matrix(forward, name + " forward"), b = read_matrix(backward, name + " backward");
    const Matrix each = read_matrix(layers, name + " layers"), pairs = read_matrix(degrees, name + " degrees");
    if (pairs.columns != 2 || f.rows != pairs.rows || b.rows != pairs.rows || b.columns != f.columns ||
        each.columns != f.columns || each.rows != 6)
        throw py::value_error(name + ": forward and backward need one row per (tp, cp), layers needs six rows");
    SearchedModule module;
    for (int64_t d = 0; d < pairs.rows; ++d) {
        for (const double degree : {pairs.values[2 * d], pairs.values[2 * d + 1]})
            if (!(degree >= 1 && degree <= 4096) || degree != std::floor(degree))
                throw py::value_error(name + " degrees[" + std::to_string(d) + "] holds " + format_number(degree) +
                                      ": tp and cp must be whole numbers from 1 to 4096");
        module.tp.push_back(static_cast<int64_t>(pairs.values[2 * d]));
        module.cp.push_back(static_cast<int64_t>(pairs.values[2 * d + 1]));
    }
    module.forward = f.values;
    module.backward = b.values;
    std::vector<double> *const rows[] = {&module.weights,     &module.gradients, &module.optimizer,
                                         &module.activations, &module.input,     &module.reduces};
    for (int64_t r = 0; r < 6; ++r)
        rows[r]->assign(each.values.begin() + r * each.columns, each.values.begin() + (r + 1) * each.columns);
    return module;
}

using Shares = std::vector<std::vector<int64_t>>;

void check_shares(const Shares &shares, size_t dp, size_t groups, const std::string &name) {
    if (!shares.empty() && shares.size() != dp) throw py::value_error(name + " needs one row per dp");
    for (size_t d = 0; d < shares.size(); ++d)
        if (!shares[d].empty() && shares[d].size() != groups)
            throw py::value_error(name + "[" + std::to_string(d) + "] needs one number per group");
}

py::tuple search(const std::vector<ModuleArrays> &modules, int64_t gpus, int64_t batch, int64_t microbatch,
                 double gpu_memory, std::pair<double, double> stage_link, std::pair<double, double> tensor_link,
                 std::pair<double, double> data_link, const std::vector<int64_t> &dp,
                 const std::vector<bool> &recompute, const Shares &parallel, const Shares &colocated) {
    if (modules.empty()) throw py::value_error("modules is empty: one module is needed");
    std::vector<SearchedModule> read;
    for (size_t m = 0; m < modules.size(); ++m)
        read.push_back(read_module(modules[m], "modules[" + std::to_string(m) + "]"));
    checked_count(gpus, "gpus", 1, MOST);
    checked_count(batch, "batch", 1, MOST);
    checked_count(microbatch, "microbatch", 1, batch);
    if (!(gpu_memory > 0)) throw py::value_error("gpu_memory must be positive, got " + format_number(gpu_memory));
    for (size_t d = 0; d < dp.size(); ++d)
        if (dp[d] < 1 || dp[d] > gpus || batch % (dp[d] * microbatch) != 0)
            throw py::value_error("dp[" + std::to_string(d) + "] is " + std::to_string(dp[d]) +
                                  ": it must be 1 to gpus, and dp * microbatch must divide batch");
    double stages = 0.0;  // of all options: 1, 2, ... stages, of a module alone and in a merged group
    for (const SearchedModule &module : read) {
        const double deepest = static_cast<double>(std::min(module.layers(), gpus));
        stages += static_cast<double>(module.tp.size() * recompute.size()) * deepest * (deepest + 1);
    }
    if (stages > MOST_STAGES)
        throw py::value_error("modules have options with " + format_number(stages) +
                              " stages in all, more than 2^26: merge layers, or give fewer (tp, cp)");
    check_shares(parallel, dp.size(), modules.size(), "parallel");
    check_shares(colocated, dp.size(), 2, "colocated");
    SearchLimits limits{gpus,
                        batch,
                        microbatch,
                        gpu_memory,
                        read_link(stage_link, "stage_link"),
                        read_link(tensor_link, "tensor_link"),
                        read_link(data_link, "data_link"),
                        dp,
                        {recompute.begin(), recompute.end()},
                        parallel,
                        colocated};
    SearchResult best;
    {
        const Interruptible call;
        best = best_configuration(read, limits);
    }
    py::list groups;
    for (const GroupConfiguration &each : best.groups) {
        py::list cuts;
        for (const std::vector<int32_t> &own : each.cuts) cuts.append(to_numpy(own));
        groups.append(py::make_tuple(each.tp, each.cp, each.pp, each.recompute, cuts, each.peak));
    }
    return py::make_tuple(best.time, best.dp, best.colocated, groups);
}

}  // namespace

void bind_plan_search(py::module_ &module) {
    module.def("search_configuration", &search, py::arg("modules"), py::arg("gpus"), py::arg("batch"),
               py::arg("microbatch"), py::arg("gpu_memory"), py::arg("stage_link"), py::arg("tensor_link"),
               py::arg("data_link"), py::arg("dp"), py::arg("recompute"), py::arg("parallel"), py::arg("colocated"));
}

}  // namespace interlace
