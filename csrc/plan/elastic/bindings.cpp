#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "common/interruptible.h"
#include "plan/elastic/instantiate.h"
#include "plan/elastic/pipeline_template.h"
#include "plan/read_arrays.h"
#include "plan/elastic/split_batch.h"

namespace interlace {

namespace {

constexpr int64_t MOST = 1 << 30;         // products of two such counts fit int64
constexpr int64_t MOST_STATES = 1 << 26;  // 16 bytes each
constexpr int64_t MOST_STEPS = 1 << 28;   // a second or two

void check_distinct(const std::vector<int64_t> &values, const std::string &name) {
    std::set<int64_t> seen;
    for (size_t i = 0; i < values.size(); ++i)
        if (!seen.insert(values[i]).second)
            throw py::value_error(name + "[" + std::to_string(i) + "] repeats " + std::to_string(values[i]));
}

py::tuple pipeline_template(const py::array &costs, const py::array &widths, int64_t nodes, int64_t gpus,
                            int64_t per_stage) {
    const Matrix matrix = read_matrix(costs, "costs");
    checked_count(nodes, "nodes", 1, 1 << 20);
    checked_count(gpus, "gpus_per_node", 1, 1 << 10);
    checked_count(per_stage, "microbatches_per_stage", 1, MOST);
    const std::vector<int64_t> each = read_some_integers(widths, "widths", 1, gpus);
    check_distinct(each, "widths");
    if (static_cast<int64_t>(each.size()) != matrix.columns)
        throw py::value_error("costs has " + std::to_string(matrix.columns) + " columns, but there are " +
                              std::to_string(each.size()) + " widths: one column is needed for each");
    if (nodes > matrix.rows)
        throw py::value_error("cannot spread " + std::to_string(matrix.rows) + " layers over " + std::to_string(nodes) +
                              " nodes: a stage lies within one node, so use at most " + std::to_string(matrix.rows));
    // Size of the tables: layers placed by GPUs used, and the costs that stages can have.
    const int64_t states = (nodes * gpus + 1) * (matrix.rows + 1);
    if (states > MOST_STATES || matrix.rows * matrix.columns > MOST_STATES / (matrix.rows - nodes + 1))
        throw py::value_error(std::to_string(matrix.rows) + " layers on " + std::to_string(nodes * gpus) +
                              " GPUs are more than 2^26 states: merge layers");
    if (states * matrix.columns > MOST_STEPS)
        throw py::value_error(std::to_string(matrix.rows) + " layers on " + std::to_string(nodes * gpus) +
                              " GPUs with " + std::to_string(matrix.columns) +
                              " widths are more than 2^28 steps for each of some 50 passes: merge layers or allow " +
                              "fewer widths");
    const double total = std::accumulate(matrix.values.begin(), matrix.values.end(), 0.0);
    if (overflows(total * 4.0 * static_cast<double>(matrix.rows) * static_cast<double>(per_stage)))
        throw py::value_error("the time of the whole pipeline overflows: use a larger unit");
    PipelineTemplate best;
    {
        const Interruptible call;
        best = best_pipeline_template(matrix.values, matrix.rows, each, nodes, gpus, per_stage);
    }
    if (best.cuts.empty())
        throw py::value_error("no stages use all " + std::to_string(gpus) + " GPUs of each of " +
                              std::to_string(nodes) + " nodes with " + std::to_string(matrix.rows) +
                              " layers: allow other widths or use fewer nodes");
    return py::make_tuple(to_numpy(best.cuts), to_numpy(best.widths), best.time);
}

py::tuple instantiate(const py::array &node_counts, const py::array &times, int64_t nodes, int64_t pipelines,
                      int64_t microbatches) {
    checked_count(nodes, "nodes", 1, 1 << 14);
    checked_count(microbatches, "microbatches", 1, MOST);
    checked_count(pipelines, "pipelines", 1, MOST);
    const std::vector<int64_t> sizes = read_some_integers(node_counts, "node_counts", 1, MOST);
    check_distinct(sizes, "node_counts");
    const std::vector<double> each = read_positive(times, "times");
    if (each.size() != sizes.size())
        throw py::value_error("times has " + std::to_string(each.size()) + " templates, node_counts has " +
                              std::to_string(sizes.size()));
    if (overflows(*std::max_element(each.begin(), each.end()) * static_cast<double>(microbatches)))
        throw py::value_error("the times of all microbatches overflow: use a larger unit");
    Instantiation best;
    const int64_t most = nodes / *std::min_element(sizes.begin(), sizes.end());
    if (pipelines <= std::min(most, microbatches)) {
        const Interruptible call;
        best = best_instantiation(sizes, each, nodes, pipelines, microbatches);
    }
    if (best.counts.empty())
        throw py::value_error("no combination of these templates uses all " + std::to_string(nodes) + " nodes in " +
                              std::to_string(pipelines) + " to " + std::to_string(microbatches) +
                              " pipelines (each needs a microbatch)");
    return py::make_tuple(to_numpy(best.counts), to_numpy(best.microbatches), best.time);
}

py::array_t<int64_t> split_batch(const py::array &times, int64_t microbatches, bool variance) {
    const std::vector<double> each = read_positive(times, "times");
    checked_count(microbatches, "microbatches", 1, MOST);
    if (microbatches < static_cast<int64_t>(each.size()))
        throw py::value_error("cannot split " + std::to_string(microbatches) + " microbatches over " +
                              std::to_string(each.size()) + " pipelines: each needs one, so use a batch of at least " +
                              std::to_string(each.size()));
    const auto [least, most] = std::minmax_element(each.begin(), each.end());
    if (overflows(*most * static_cast<double>(microbatches)))
        throw py::value_error("the times of all microbatches overflow: use a larger unit");
    if (variance && *most / 1e6 > *least)
        throw py::value_error("times[" + std::to_string(most - each.begin()) + "] is " + format_number(*most) +
                              ", more than 1e6 times that of another pipeline: their variance says nothing, " +
                              "so use the min-max objective or leave one of them out");
    std::vector<int64_t> counts;
    {
        const Interruptible call;
        counts = variance ? split_least_variance(each, microbatches) : split_min_max(each, microbatches);
    }
    return to_numpy(counts);
}

}  // namespace

void bind_plan_oobleck(py::module_ &module) {
    module.def("pipeline_template", &pipeline_template, py::arg("costs"), py::arg("widths"), py::arg("nodes"),
               py::arg("gpus_per_node"), py::arg("microbatches_per_stage"));
    module.def("instantiate", &instantiate, py::arg("node_counts"), py::arg("times"), py::arg("nodes"),
               py::arg("pipelines"), py::arg("microbatches"));
    module.def("split_batch", &split_batch, py::arg("times"), py::arg("microbatches"), py::arg("variance"));
}

}  // namespace interlace
