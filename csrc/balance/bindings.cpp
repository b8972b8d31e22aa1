#include <algorithm>

#include "balance/lower_bound.h"
#include "balance/lpt.h"
#include "balance/zigzag.h"
#include "common/arrays.h"
#include "plan/partition.h"

namespace interlace {

namespace {

// A missing capacity is n: more never fits anyway.
int64_t checked_capacity(int64_t items, int64_t bins, std::optional<int64_t> capacity) {
    if (bins < 1 || bins > INT32_MAX / 2)
        throw py::value_error("bins must lie between 1 and 2^30, got " + std::to_string(bins));
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
        const py::gil_scoped_release release;
        result = bin_of(values, each);
    }
    return to_numpy(result);
}

py::array_t<int32_t> assign_lpt(const py::array &weights, int64_t bins, std::optional<int64_t> capacity) {
    return assign(weights, bins, capacity,
                  [&](const std::vector<double> &values, int64_t each) { return lpt(values, bins, each); });
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
    // Counts differ by at most one, so every capacity that is possible at all is kept.
    return assign(weights, bins, capacity, [&](const std::vector<double> &values, int64_t) {
        return zigzag(static_cast<int64_t>(values.size()), bins);
    });
}

double lower_bound(const py::array &weights, int64_t bins, std::optional<int64_t> capacity) {
    std::vector<double> values = read_costs(weights, "weights");
    const int64_t each = checked_capacity(static_cast<int64_t>(values.size()), bins, capacity);
    const py::gil_scoped_release release;
    return assignment_lower_bound(std::move(values), bins, each);
}

}  // namespace

void bind_balance(py::module_ &module) {
    module.def("assign_lpt", &assign_lpt, py::arg("weights"), py::arg("bins"), py::arg("capacity"));
    module.def("assign_contiguous", &assign_contiguous, py::arg("weights"), py::arg("bins"), py::arg("capacity"));
    module.def("assign_zigzag", &assign_zigzag, py::arg("weights"), py::arg("bins"), py::arg("capacity"));
    module.def("lower_bound", &lower_bound, py::arg("weights"), py::arg("bins"), py::arg("capacity"));
}

}  // namespace interlace
