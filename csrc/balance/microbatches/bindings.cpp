// Bindings of the algorithms that assign samples to microbatches and order these.
#include <algorithm>

#include "balance/microbatches/bottleneck_match.h"
#include "balance/microbatches/even_replicas.h"
#include "balance/microbatches/microbatches.h"
#include "balance/microbatches/reorder.h"
#include "balance/microbatches/subset_sum.h"
#include "common/arrays.h"
#include "common/interruptible.h"
#include "common/limits.h"

namespace interlace {

namespace {

constexpr int64_t MOST_ENTRIES = 1 << 22;  // of a pipeline: its actions and messages take about 600 bytes per entry
constexpr int64_t MOST_PAIRS = 1 << 26;    // pairs of an overloaded and an underloaded microbatch, 32 bytes each

// Costs; infinity means "not allowed". Negative values are valid.
std::vector<double> read_allowed(const py::array &array, const std::string &name) {
    const std::vector<double> values = read_real(array, name);
    const int64_t columns = array.ndim() == 2 ? array.shape(1) : 0;
    for (size_t i = 0; i < values.size(); ++i) {
        if (!std::isnan(values[i]) && values[i] != -INF) continue;
        const std::string place =
            array.ndim() == 2 ? std::to_string(i / columns) + ", " + std::to_string(i % columns) : std::to_string(i);
        throw py::value_error(name + "[" + place + "] is " + format_number(values[i]) +
                              ": values must be numbers, or infinity for what is not allowed");
    }
    return values;
}

// [microbatches, stages], finite and not negative.
std::vector<double> read_table(const py::array &array, const std::string &name) {
    check_real(array, name);
    if (array.ndim() != 2 || array.size() == 0)
        throw py::value_error(name + " must have shape (microbatches, stages), both at least 1, got " +
                              shape_of(array));
    std::vector<double> values = read_real(array, name);
    check_costs(values, name, array.shape(1));
    return values;
}

void check_not_negative(double value, const std::string &name) {
    if (!std::isfinite(value) || value < 0)
        throw py::value_error(name + " is " + format_number(value) + ": it must be finite and not negative");
}

// Every overloaded microbatch is matched with every underloaded one.
void check_pairs(int64_t overloaded, int64_t underloaded) {
    if (overloaded > MOST_PAIRS / std::max<int64_t>(1, underloaded))
        throw py::value_error(std::to_string(overloaded) + " overloaded and " + std::to_string(underloaded) +
                              " underloaded microbatches have more than 2^26 pairs: use at most 16384 microbatches");
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
        const Interruptible call;
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
        const Interruptible call;
        match = bottleneck_match(values, without, columns);
    }
    if (match.threshold == INF)
        throw py::value_error("no matching is allowed: the rows that are infinite alone have too few finite costs");
    return py::make_tuple(match.threshold, to_numpy(match.partner));
}

py::array_t<int32_t> bind_assign_replicas(const py::array &encoder_cost, const py::array &llm_cost, int64_t replicas,
                                          bool equal_counts, bool as_printed) {
    std::vector<double> encoder, llm;
    read_both(encoder_cost, llm_cost, encoder, llm);
    checked_count(replicas, "replicas", 1, 1 << 30);
    std::vector<int32_t> replica_of;
    {
        const Interruptible call;
        const int64_t used = useful(replicas, encoder);
        replica_of = assign_replicas(encoder, llm, used, equal_counts);
        if (!as_printed) replica_of = even_replicas(encoder, llm, std::move(replica_of), used);
    }
    return to_numpy(replica_of);
}

py::dict bind_assign_microbatches(const py::array &encoder_cost, const py::array &llm_cost, int64_t microbatches,
                                  bool shrink, bool as_printed) {
    std::vector<double> encoder, llm;
    read_both(encoder_cost, llm_cost, encoder, llm);
    if (microbatches < 1) throw py::value_error("microbatches must be at least 1, got " + std::to_string(microbatches));
    int64_t count = std::min<int64_t>(microbatches, static_cast<int64_t>(encoder.size()));
    if (shrink) count = effective_microbatches(encoder, count);
    check_pairs((count + 1) / 2, count / 2);
    Deferral plan;
    {
        const Interruptible call;
        plan = assign_microbatches(encoder, llm, count, as_printed);
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

// For tests and benchmarks: the matrix of equation 4.3 for samples that are already in microbatches.
py::array_t<double> bind_deferral_costs(const std::vector<py::array> &overloaded, const py::array &underloaded) {
    std::vector<std::vector<double>> costs;
    for (size_t i = 0; i < overloaded.size(); ++i)
        costs.push_back(read_costs(overloaded[i], "overloaded[" + std::to_string(i) + "]"));
    const std::vector<double> loads = read_costs(underloaded, "underloaded");
    check_pairs(static_cast<int64_t>(costs.size()), static_cast<int64_t>(loads.size()));
    DeferralCosts result;
    {
        const Interruptible call;
        result = deferral_costs(costs, loads);
    }
    py::array_t<double> matrix({static_cast<py::ssize_t>(costs.size()), static_cast<py::ssize_t>(loads.size())});
    std::copy(result.cost.begin(), result.cost.end(), matrix.mutable_data());
    return matrix;
}

py::array_t<int32_t> bind_assign_ascending(const py::array &costs, int64_t groups, int64_t capacity) {
    const std::vector<double> values = read_costs(costs, "costs");
    const int64_t n = static_cast<int64_t>(values.size());
    checked_count(groups, "groups", 1, 1 << 30);
    if (capacity < (n + groups - 1) / groups)
        throw py::value_error(std::to_string(n) + " samples do not fit " + std::to_string(groups) + " groups of " +
                              std::to_string(capacity));
    std::vector<int32_t> group_of;
    {
        const Interruptible call;
        group_of = assign_ascending(values, useful(groups, values), capacity);
    }
    return to_numpy(group_of);
}

// Checks and holds a pipeline's costs while the GIL is released.
struct Pipeline {
    std::vector<double> forward, backward;
    PipelineCosts costs;
};

Pipeline read_pipeline(const py::array &forward, const py::array &backward, int64_t ranks, double transfer) {
    Pipeline result{read_table(forward, "forward"), read_table(backward, "backward"), {}};
    if (backward.shape(0) != forward.shape(0) || backward.shape(1) != forward.shape(1))
        throw py::value_error("backward has shape " + shape_of(backward) + ", forward has " + shape_of(forward) +
                              ": both need one value per microbatch and stage");
    const int64_t microbatches = forward.shape(0), stages = forward.shape(1);
    check_not_negative(transfer, "transfer");
    if (ranks < 1 || stages % ranks != 0)
        throw py::value_error("ranks must divide the " + std::to_string(stages) + " stages, got " +
                              std::to_string(ranks));
    if (stages > ranks && microbatches % ranks != 0)
        throw py::value_error("interleaved 1F1B needs a multiple of " + std::to_string(ranks) +
                              " microbatches, one group per pass over the ranks; got " + std::to_string(microbatches));
    if (microbatches * stages > MOST_ENTRIES)
        throw py::value_error("forward has " + std::to_string(microbatches * stages) +
                              " entries, more than 2^22: merge stages, or order fewer microbatches");
    // Upper bound of every time: all work in sequence.
    double total = transfer * 2.0 * static_cast<double>(microbatches * stages);
    for (const std::vector<double> *costs : {&result.forward, &result.backward})
        for (const double cost : *costs) total += cost;
    if (overflows(total))
        throw py::value_error(
            "forward, backward and transfer add up to more than a double can hold: use a larger unit");
    result.costs = {microbatches, stages, ranks, nullptr, nullptr, transfer};
    return result;
}

py::dict bind_reorder_microbatches(const py::array &forward, const py::array &backward, int64_t ranks, double transfer,
                                   int64_t evaluations) {
    Pipeline pipeline = read_pipeline(forward, backward, ranks, transfer);
    pipeline.costs.forward = pipeline.forward.data();
    pipeline.costs.backward = pipeline.backward.data();
    checked_count(evaluations, "evaluations", 0, int64_t{1} << 40);
    Reordered reordered;
    {
        const Interruptible call;
        reordered = reorder_microbatches(pipeline.costs, evaluations);
    }
    py::dict result;
    result["order"] = to_numpy(reordered.order);
    result["seconds"] = reordered.seconds;
    result["printed_seconds"] = reordered.printed_seconds;
    result["bound"] = reordered.bound;
    result["evaluations"] = reordered.evaluations;
    return result;
}

double bind_pipeline_makespan(const py::array &forward, const py::array &backward, int64_t ranks, double transfer,
                              const py::array &order) {
    Pipeline pipeline = read_pipeline(forward, backward, ranks, transfer);
    pipeline.costs.forward = pipeline.forward.data();
    pipeline.costs.backward = pipeline.backward.data();
    const int64_t count = pipeline.costs.microbatches;
    const std::vector<int64_t> microbatches = read_integers(order, "order", 0, count - 1);
    if (static_cast<int64_t>(microbatches.size()) != count)
        throw py::value_error("order must have shape (" + std::to_string(count) + ",), got " + shape_of(order));
    std::vector<char> seen(count, 0);
    for (int64_t i = 0; i < count; ++i) {
        if (seen[microbatches[i]])
            throw py::value_error("order[" + std::to_string(i) + "] repeats " + std::to_string(microbatches[i]) +
                                  ": an order names every microbatch once");
        seen[microbatches[i]] = 1;
    }
    const std::vector<int32_t> places(microbatches.begin(), microbatches.end());
    const Interruptible call;
    return OneForwardOneBackward(pipeline.costs).makespan(places);
}

}  // namespace

void bind_microbatch(py::module_ &module) {
    module.def("subset_sum", &bind_subset_sum, py::arg("weights"), py::arg("target"), py::arg("resolution"));
    module.def("bottleneck_match", &bind_bottleneck_match, py::arg("cost"), py::arg("alone"));
    module.def("assign_replicas", &bind_assign_replicas, py::arg("encoder_cost"), py::arg("llm_cost"),
               py::arg("replicas"), py::arg("equal_counts"), py::arg("as_printed"));
    module.def("assign_microbatches", &bind_assign_microbatches, py::arg("encoder_cost"), py::arg("llm_cost"),
               py::arg("microbatches"), py::arg("shrink"), py::arg("as_printed"));
    module.def("deferral_costs", &bind_deferral_costs, py::arg("overloaded"), py::arg("underloaded"));
    module.def("assign_ascending", &bind_assign_ascending, py::arg("costs"), py::arg("groups"), py::arg("capacity"));
    module.def("reorder_microbatches", &bind_reorder_microbatches, py::arg("forward"), py::arg("backward"),
               py::arg("ranks"), py::arg("transfer"), py::arg("evaluations"));
    module.def("pipeline_makespan", &bind_pipeline_makespan, py::arg("forward"), py::arg("backward"), py::arg("ranks"),
               py::arg("transfer"), py::arg("order"));
}

}  // namespace interlace
