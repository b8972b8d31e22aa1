// Bindings of the algorithms that deal samples to microbatches and put these in order.
#include <algorithm>
#include <limits>

#include "balance/bottleneck_match.h"
#include "balance/microbatches.h"
#include "balance/subset_sum.h"
#include "common/arrays.h"

namespace interlace {

namespace {

void check_real(const py::array &array, const std::string &name) {
    const char kind = array.dtype().kind();
    if (kind != 'f' && kind != 'i' && kind != 'u')
        throw py::value_error(name + " must be an array of real numbers (float or int), got dtype " +
                              py::str(array.dtype()).cast<std::string>());
}

std::string shape_of(const py::array &array) { return py::str(array.attr("shape")).cast<std::string>(); }

std::vector<double> as_doubles(const py::array &array) {
    const py::array_t<double, py::array::c_style | py::array::forcecast> converted(array);
    return std::vector<double>(converted.data(), converted.data() + converted.size());
}

// Costs where infinity says "not allowed"; negative values are as good as others.
std::vector<double> read_allowed(const py::array &array, const std::string &name) {
    check_real(array, name);
    const std::vector<double> values = as_doubles(array);
    const int64_t columns = array.ndim() == 2 ? array.shape(1) : 0;
    for (size_t i = 0; i < values.size(); ++i) {
        if (!std::isnan(values[i]) && values[i] != -std::numeric_limits<double>::infinity()) continue;
        const std::string place = array.ndim() == 2 ? std::to_string(i / columns) + ", " + std::to_string(i % columns)
                                                    : std::to_string(i);
        throw py::value_error(name + "[" + place + "] is " + format_number(values[i]) +
                              ": values must be numbers, or infinity for what is not allowed");
    }
    return values;
}

void check_not_negative(double value, const std::string &name) {
    if (!std::isfinite(value) || value < 0)
        throw py::value_error(name + " is " + format_number(value) + ": it must be finite and not negative");
}

void read_both(const py::array &encoder_cost, const py::array &llm_cost, std::vector<double> &encoder,
               std::vector<double> &llm) {
    encoder = read_costs(encoder_cost, "encoder_cost");
    llm = read_costs(llm_cost, "llm_cost");
    if (encoder.size() != llm.size())
        throw py::value_error("llm_cost has " + std::to_string(llm.size()) + " samples, encoder_cost has " +
                              std::to_string(encoder.size()) + ": both need one value per sample");
}

py::array_t<int32_t> bind_subset_sum(const py::array &weights, double target, std::optional<double> resolution) {
    const std::vector<double> values = read_costs(weights, "weights");
    check_not_negative(target, "target");
    if (resolution && !(std::isfinite(*resolution) && *resolution > 0))
        throw py::value_error("resolution is " + format_number(*resolution) + ": it must be finite and positive");
    std::vector<int32_t> chosen;
    {
        const py::gil_scoped_release release;
        chosen = subset_sum(values, target, resolution.value_or(0.0));
    }
    return to_numpy(chosen);
}

py::tuple bind_bottleneck_match(const py::array &cost, const py::array &alone) {
    if (cost.ndim() != 2) throw py::value_error("cost must have two dimensions, got " + std::to_string(cost.ndim()));
    if (alone.ndim() != 1 || alone.size() != cost.shape(0))
        throw py::value_error("alone must have shape (" + std::to_string(cost.shape(0)) +
                              ",), one value per row of cost, got " + shape_of(alone));
    if (alone.size() == 0) throw py::value_error("cost has no rows: at least one is needed");
    if (cost.size() > INT32_MAX || alone.size() > INT32_MAX)
        throw py::value_error("cost has more entries than int32 can index");
    const std::vector<double> values = read_allowed(cost, "cost"), without = read_allowed(alone, "alone");
    const int64_t columns = cost.shape(1);
    BottleneckMatch match;
    {
        const py::gil_scoped_release release;
        match = bottleneck_match(values, without, columns);
    }
    if (match.threshold == std::numeric_limits<double>::infinity())
        throw py::value_error("no matching is allowed: the rows that are infinite alone have too few finite costs");
    return py::make_tuple(match.threshold, to_numpy(match.partner));
}

py::array_t<int32_t> bind_assign_replicas(const py::array &encoder_cost, const py::array &llm_cost, int64_t replicas,
                                          bool equal_counts) {
    std::vector<double> encoder, llm;
    read_both(encoder_cost, llm_cost, encoder, llm);
    if (replicas < 1 || replicas > INT32_MAX / 2)
        throw py::value_error("replicas must lie between 1 and 2^30, got " + std::to_string(replicas));
    std::vector<int32_t> replica_of;
    {
        const py::gil_scoped_release release;
        replica_of = assign_replicas(encoder, llm, replicas, equal_counts);
    }
    return to_numpy(replica_of);
}

py::dict bind_assign_microbatches(const py::array &encoder_cost, const py::array &llm_cost, int64_t microbatches,
                                  bool shrink) {
    std::vector<double> encoder, llm;
    read_both(encoder_cost, llm_cost, encoder, llm);
    if (microbatches < 1) throw py::value_error("microbatches must be at least 1, got " + std::to_string(microbatches));
    Deferral plan;
    {
        const py::gil_scoped_release release;
        const int64_t most = std::min<int64_t>(microbatches, static_cast<int64_t>(encoder.size()));
        plan = assign_microbatches(encoder, llm, shrink ? effective_microbatches(encoder, most) : most);
    }
    py::dict result;
    result["count"] = plan.count;
    result["encoder_of"] = to_numpy(plan.encoder_of);
    result["llm_of"] = to_numpy(plan.llm_of);
    result["encoder_loads"] = to_numpy(plan.encoder_loads);
    result["llm_loads"] = to_numpy(plan.llm_loads);
    result["threshold"] = plan.threshold;
    return result;
}

// For tests and benchmarks: the matrix of equation 4.3 for samples that are in microbatches already.
py::array_t<double> bind_deferral_costs(const std::vector<py::array> &overloaded, const py::array &underloaded) {
    std::vector<std::vector<double>> costs;
    for (size_t i = 0; i < overloaded.size(); ++i)
        costs.push_back(read_costs(overloaded[i], "overloaded[" + std::to_string(i) + "]"));
    const std::vector<double> loads = read_costs(underloaded, "underloaded");
    DeferralCosts result;
    {
        const py::gil_scoped_release release;
        result = deferral_costs(costs, loads);
    }
    py::array_t<double> matrix({static_cast<py::ssize_t>(costs.size()), static_cast<py::ssize_t>(loads.size())});
    std::copy(result.cost.begin(), result.cost.end(), matrix.mutable_data());
    return matrix;
}

}  // namespace

void bind_microbatch(py::module_ &module) {
    module.def("subset_sum", &bind_subset_sum, py::arg("weights"), py::arg("target"), py::arg("resolution"));
    module.def("bottleneck_match", &bind_bottleneck_match, py::arg("cost"), py::arg("alone"));
    module.def("assign_replicas", &bind_assign_replicas, py::arg("encoder_cost"), py::arg("llm_cost"),
               py::arg("replicas"), py::arg("equal_counts"));
    module.def("assign_microbatches", &bind_assign_microbatches, py::arg("encoder_cost"), py::arg("llm_cost"),
               py::arg("microbatches"), py::arg("shrink"));
    module.def("deferral_costs", &bind_deferral_costs, py::arg("overloaded"), py::arg("underloaded"));
}

}  // namespace interlace
