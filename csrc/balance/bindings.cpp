#include <algorithm>
#include <optional>
#include <utility>

#include "balance/batches/convolution.h"
#include "balance/bins/deal.h"
#include "balance/bins/even.h"
#include "balance/bins/exact.h"
#include "balance/bins/lower_bound.h"
#include "balance/bins/lpt.h"
#include "common/order.h"
#include "balance/batches/packed.h"
#include "balance/batches/padded.h"
#include "balance/bins/refine.h"
#include "balance/bins/zigzag.h"
#include "common/arrays.h"
#include "common/interruptible.h"
#include "plan/partition/partition.h"

namespace interlace {

namespace {

// A missing capacity becomes n, which never limits.
int64_t checked_capacity(int64_t items, int64_t bins, std::optional<int64_t> capacity) {
    checked_count(bins, "bins", 1, 1 << 30);
    if (!capacity) return items;
    if (*capacity < 1) throw py::value_error("capacity must be at least 1, got " + std::to_string(*capacity));
    const int64_t each = std::min(*capacity, items);
    if (each * bins < items)
        throw py::value_error(std::to_string(items) + " items do not fit " + std::to_string(bins) + " bins of " +
                              std::to_string(*capacity) + ": capacity must be at least " +
                              std::to_string((items + bins - 1) / bins));
    return each;
}

// bin_of(items, weights, capacity) -> bin of each item, run without the GIL on checked arguments.
template <typename Function>
py::array_t<int32_t> assign(const py::array &weights, int64_t bins, std::optional<int64_t> capacity, Function bin_of) {
    const std::vector<double> values = read_costs(weights, "weights");
    const int64_t each = checked_capacity(static_cast<int64_t>(values.size()), bins, capacity);
    std::vector<int32_t> result;
    {
        const Interruptible call;
        result = bin_of(values, each);
    }
    return to_numpy(result);
}

py::array_t<int32_t> assign_lpt(const py::array &weights, int64_t bins, std::optional<int64_t> capacity) {
    return assign(weights, bins, capacity, [&](const std::vector<double> &values, int64_t each) {
        const std::vector<int32_t> order = descending_order(values);
        const int64_t used = useful(bins, values);
        return refine(values, order, lpt(values, order, used, each), used, each);
    });
}

py::array_t<int32_t> assign_even(const py::array &weights, int64_t bins, std::optional<int64_t> capacity) {
    return assign(weights, bins, capacity, [&](const std::vector<double> &values, int64_t each) {
        const std::vector<int32_t> order = descending_order(values);
        const int64_t used = useful(bins, values);
        const std::vector<int32_t> start = refine(values, order, lpt(values, order, used, each), used, each);
        return even_loads(values, start, used, each);
    });
}

py::array_t<int32_t> assign_lpt_greedy(const py::array &weights, int64_t bins, std::optional<int64_t> capacity) {
    return assign(weights, bins, capacity, [&](const std::vector<double> &values, int64_t each) {
        return lpt(values, descending_order(values), useful(bins, values), each);
    });
}

py::tuple assign_exact(const py::array &weights, int64_t bins, std::optional<int64_t> capacity, int64_t nodes,
                       double seconds) {
    const std::vector<double> values = read_costs(weights, "weights");
    const int64_t each = checked_capacity(static_cast<int64_t>(values.size()), bins, capacity);
    if (nodes < 0) throw py::value_error("nodes must not be negative, got " + std::to_string(nodes));
    if (!(seconds > 0)) throw py::value_error("seconds must be more than 0, got " + format_number(seconds));
    ExactAssignment best;
    try {
        const Interruptible call;
        best = exact_assignment(values, useful(bins, values), each, nodes, seconds);
    } catch (const OutOfTime &found) {
        const std::string text = "assign_exact has looked at " + std::to_string(found.nodes) + " of " +
                                 std::to_string(nodes) + " nodes in " + format_number(seconds) +
                                 " s; its heaviest bin is " + format_number(found.makespan) + ", none can be below " +
                                 format_number(found.bound) + ": use nodes=" + std::to_string(found.nodes) +
                                 " to get that answer, or more seconds";
        PyErr_SetString(PyExc_TimeoutError, text.c_str());
        throw py::error_already_set();
    }
    return py::make_tuple(to_numpy(best.bin_of), best.makespan, best.bound, best.proven);
}

py::array_t<int32_t> assign_ring(const py::array &weights, int64_t bins, std::optional<int64_t> capacity) {
    return assign(weights, bins, capacity, [&](const std::vector<double> &values, int64_t) {
        return deal_ring(static_cast<int64_t>(values.size()), bins);
    });
}

py::array_t<int32_t> assign_random(const py::array &weights, int64_t bins, std::optional<int64_t> capacity,
                                   uint64_t seed) {
    return assign(weights, bins, capacity, [&](const std::vector<double> &values, int64_t) {
        return deal_random(static_cast<int64_t>(values.size()), bins, seed);
    });
}

// Items in rows of equal length. Every bin takes at most `capacity` items from each row.
py::array_t<int32_t> assign_rows(const py::array &weights, int64_t rows, int64_t bins, int64_t capacity, bool refined) {
    const std::vector<double> values = read_costs(weights, "weights");
    const int64_t items = static_cast<int64_t>(values.size());
    if (rows < 1 || items % rows != 0)
        throw py::value_error(std::to_string(items) + " items are not " + std::to_string(rows) +
                              " rows of equal length");
    const int64_t each = checked_capacity(items / rows, bins, capacity), used = useful(bins, values);
    if (rows * used > 1 << 26)
        throw py::value_error(std::to_string(rows) + " rows times " + std::to_string(used) +
                              " bins are more than 2^26 lists: assign fewer rows in one call");
    std::vector<int32_t> bin_of;
    {
        const Interruptible call;
        const std::vector<int32_t> order = descending_order(values);
        bin_of = rows == 1 ? lpt(values, order, used, each) : grouped_lpt(values, order, used, each, rows);
        if (refined) bin_of = refine(values, order, std::move(bin_of), used, each, rows);
    }
    return to_numpy(bin_of);
}

// batches(lengths, attention, bins), on arrays of equal length.
template <typename Function>
py::array_t<int32_t> post_balance(const py::array &lengths, const py::array &attention, int64_t bins,
                                  Function batches) {
    const std::vector<double> own = read_costs(lengths, "lengths"), quadratic = read_costs(attention, "attention");
    if (own.size() != quadratic.size()) throw py::value_error("lengths and attention must have equally many items");
    checked_capacity(static_cast<int64_t>(own.size()), bins, std::nullopt);
    double total = 0.0;
    for (size_t i = 0; i < own.size(); ++i) total += own[i] + quadratic[i];
    if (overflows(total * static_cast<double>(own.size())))  // a padded batch costs its size times its longest item
        throw py::value_error("the costs of batches of " + std::to_string(own.size()) +
                              " items overflow: use a larger unit");
    std::vector<int32_t> result;
    {
        const Interruptible call;
        result = batches(own, quadratic, useful(bins, own));
    }
    return to_numpy(result);
}

py::array_t<int32_t> post_balance_packed(const py::array &lengths, const py::array &attention, int64_t bins) {
    return post_balance(lengths, attention, bins, packed_batches);
}

py::array_t<int32_t> post_balance_padded(const py::array &lengths, const py::array &attention, int64_t bins) {
    return post_balance(lengths, attention, bins,
                        [](const std::vector<double> &own, const std::vector<double> &quadratic, int64_t ranks) {
                            std::vector<double> padded(own.size());
                            for (size_t i = 0; i < own.size(); ++i) padded[i] = own[i] + quadratic[i];
                            const std::vector<double> nothing(own.size(), 0.0);
                            return padded_batches(nothing, padded, descending_order(padded), ranks);
                        });
}

py::array_t<int32_t> post_balance_convolution(const py::array &lengths, const py::array &attention, int64_t bins) {
    return post_balance(lengths, attention, bins, convolution_batches);
}

py::array_t<int32_t> assign_contiguous(const py::array &weights, int64_t bins, std::optional<int64_t> capacity) {
    return assign(weights, bins, capacity, [&](const std::vector<double> &values, int64_t each) {
        const int64_t items = static_cast<int64_t>(values.size());
        const std::vector<int32_t> cuts = min_bottleneck_partition(values, std::min(bins, items), each);
        std::vector<int32_t> bin_of(items);
        for (size_t bin = 0; bin + 1 < cuts.size(); ++bin)
            std::fill(bin_of.begin() + cuts[bin], bin_of.begin() + cuts[bin + 1], static_cast<int32_t>(bin));
        return bin_of;
    });
}

py::array_t<int32_t> assign_zigzag(const py::array &weights, int64_t bins, std::optional<int64_t> capacity) {
    // Counts differ by at most one, so they fit every feasible capacity.
    return assign(weights, bins, capacity, [&](const std::vector<double> &values, int64_t) {
        return zigzag(static_cast<int64_t>(values.size()), bins);
    });
}

double lower_bound(const py::array &weights, int64_t bins, std::optional<int64_t> capacity) {
    std::vector<double> values = read_costs(weights, "weights");
    const int64_t each = checked_capacity(static_cast<int64_t>(values.size()), bins, capacity);
    const Interruptible call;
    return assignment_lower_bound(std::move(values), bins, each);
}

}  // namespace

void bind_rearrange(py::module_ &module);

void bind_balance(py::module_ &module) {
    const auto method = [&](const char *name, auto function) {
        module.def(name, function, py::arg("weights"), py::arg("bins"), py::arg("capacity"));
    };
    method("assign_lpt", &assign_lpt);
    method("assign_even", &assign_even);
    method("assign_lpt_greedy", &assign_lpt_greedy);
    method("assign_contiguous", &assign_contiguous);
    method("assign_zigzag", &assign_zigzag);
    method("assign_ring", &assign_ring);
    method("lower_bound", &lower_bound);
    module.def("assign_random", &assign_random, py::arg("weights"), py::arg("bins"), py::arg("capacity"),
               py::arg("seed"));
    module.def("assign_exact", &assign_exact, py::arg("weights"), py::arg("bins"), py::arg("capacity"),
               py::arg("nodes"), py::arg("seconds"));
    module.def("assign_rows", &assign_rows, py::arg("weights"), py::arg("rows"), py::arg("bins"), py::arg("capacity"),
               py::arg("refined"));
    const auto batching = [&](const char *name, auto function) {
        module.def(name, function, py::arg("lengths"), py::arg("attention"), py::arg("bins"));
    };
    batching("post_balance_packed", &post_balance_packed);
    batching("post_balance_padded", &post_balance_padded);
    batching("post_balance_convolution", &post_balance_convolution);
    bind_rearrange(module);
}

}  // namespace interlace
