// Bindings of node-wise placement of batches, and of the plans of its all-to-alls and their network volume.
#include <algorithm>
#include <cmath>
#include <utility>

#include "balance/rearrange/nodewise.h"
#include "balance/rearrange/grouped_order.h"
#include "balance/rearrange/volume.h"
#include "common/arrays.h"
#include "common/interruptible.h"

namespace interlace {

namespace {

std::string entry_name(int64_t i, int64_t j) { return "volume[" + std::to_string(i) + ", " + std::to_string(j) + "]"; }

// The non-zero entries of a contiguous matrix, in one pass over memory.
template <typename T>
void read_rows(const T *values, Volume &volume) {
    constexpr int64_t CHUNK = 8;
    const int64_t d = volume.instances;
    volume.row_start.push_back(0);
    Poll poll;
    for (int64_t i = 0; i < d; ++i, values += d) {
        poll(d);
        double sum = 0.0;
        for (int64_t j = 0; j < d;) {
            if (j + CHUNK <= d) {
                bool any = false;
                for (int64_t k = 0; k < CHUNK; ++k) any |= values[j + k] != T(0);
                if (!any) {
                    j += CHUNK;
                    continue;
                }
            }
            for (const int64_t end = std::min(d, j + CHUNK); j < end; ++j) {
                if (values[j] == T(0)) continue;
                const double value = static_cast<double>(values[j]);
                if (!std::isfinite(value) || value < 0)
                    throw py::value_error(entry_name(i, j) + " is " + std::to_string(value) +
                                          ": values must be finite and not negative");
                volume.rows.push_back({static_cast<int32_t>(j), value});
                sum += value;
            }
        }
        if (overflows(sum))
            throw py::value_error("the sum of volume[" + std::to_string(i) + "] overflows: use a larger unit");
        volume.row_sum.push_back(sum);
        volume.row_start.push_back(static_cast<int64_t>(volume.rows.size()));
    }
}

template <typename T>
bool read_as(const py::array &array, Volume &volume) {
    if (!py::isinstance<py::array_t<T, py::array::c_style>>(array) || !is_aligned(array)) return false;
    const T *values = static_cast<const T *>(array.data());
    const Interruptible call;
    read_rows(values, volume);
    return true;
}

Volume read_volume(const py::array &array, int64_t per_node) {
    check_real(array, "volume");
    if (array.ndim() != 2 || array.shape(0) != array.shape(1) || array.shape(0) == 0)
        throw py::value_error("volume must have shape [d, d] with d >= 1, got " + shape_of(array));
    Volume volume;
    volume.instances = array.shape(0);
    if (volume.instances > INT32_MAX / 2) throw py::value_error("volume has more instances than int32 can index");
    if (per_node < 1 || volume.instances % per_node != 0)
        throw py::value_error("ranks_per_node must divide the " + std::to_string(volume.instances) +
                              " instances, got " + std::to_string(per_node));
    volume.per_node = per_node;
    if (!read_as<double>(array, volume) && !read_as<float>(array, volume) && !read_as<int64_t>(array, volume) &&
        !read_as<int32_t>(array, volume)) {
        if (array.size() > int64_t{1} << 32)
            throw py::value_error("volume of " + std::to_string(volume.instances) + " instances is too large to be " +
                                  "copied: give it as a contiguous array of float64, float32, int64 or int32");
        const Contiguous<double> converted(array);
        const Interruptible call;
        read_rows(converted.data(), volume);
    }
    const Interruptible call;
    transpose(volume);
    return volume;
}

py::array_t<int32_t> place(const py::array &volume, int64_t per_node) {
    const Volume entries = read_volume(volume, per_node);
    std::vector<int32_t> rank_of;
    {
        const Interruptible call;
        rank_of = nodewise_placement(entries);
    }
    return to_numpy(rank_of);
}

std::vector<int32_t> read_ranks(const py::array &array, const std::string &name, int64_t ranks) {
    const std::vector<int64_t> values = read_integers(array, name, 0, ranks - 1);
    return std::vector<int32_t>(values.begin(), values.end());
}

py::array_t<int32_t> place_items(const py::array &source, const py::array &destination, const py::array &sizes,
                                 int64_t ranks, int64_t per_node) {
    checked_count(ranks, "ranks", 1, 1 << 20);
    if (per_node < 1 || ranks % per_node != 0)
        throw py::value_error("ranks_per_node must divide the " + std::to_string(ranks) + " ranks, got " +
                              std::to_string(per_node));
    const std::vector<int32_t> from = read_ranks(source, "source", ranks);
    const std::vector<int32_t> to = read_ranks(destination, "destination", ranks);
    const std::vector<double> size = read_real(sizes, "sizes");
    check_costs(size, "sizes", 0);
    if (from.size() != to.size() || from.size() != size.size())
        throw py::value_error("source, destination and sizes differ in length: " + std::to_string(from.size()) + ", " +
                              std::to_string(to.size()) + ", " + std::to_string(size.size()));
    std::vector<int32_t> rank_of;
    {
        const Interruptible call;
        rank_of = nodewise_placement(volume_of_items(from, to, size, ranks, per_node));
    }
    return to_numpy(rank_of);
}

double bound(const py::array &volume, int64_t per_node, int64_t iterations) {
    checked_count(iterations, "iterations", 0, 1 << 30);
    Volume entries = read_volume(volume, per_node);
    const Interruptible call;
    const int exponent = normalise(entries);  // the dual squares volumes
    const std::vector<double> sent = internode_volume(entries, nodewise_placement(entries));
    const double relaxed = nodewise_bound(entries, sent, iterations);
    return std::ldexp(nodewise_single_bound(entries, sent, relaxed, 20 * iterations), exponent);
}

py::tuple exchange_orders(const py::array &source, const py::array &destination, int64_t ranks) {
    checked_count(ranks, "ranks", 1, 1 << 24);
    const std::vector<int32_t> from = read_ranks(source, "source", ranks);
    const std::vector<int32_t> to = read_ranks(destination, "destination", ranks);
    if (from.size() != to.size())
        throw py::value_error("source has " + std::to_string(from.size()) + " items but destination has " +
                              std::to_string(to.size()));
    std::vector<int32_t> send, receive;
    {
        const Interruptible call;
        send = grouped_order(from, to, ranks);
        receive = grouped_order(to, from, ranks);
    }
    return py::make_tuple(to_numpy(send), to_numpy(receive));
}

}  // namespace

void bind_rearrange(py::module_ &module) {
    module.def("nodewise_placement", &place, py::arg("volume"), py::arg("ranks_per_node"));
    module.def("nodewise_placement_of_items", &place_items, py::arg("source"), py::arg("destination"), py::arg("sizes"),
               py::arg("ranks"), py::arg("ranks_per_node"));
    module.def("nodewise_bound", &bound, py::arg("volume"), py::arg("ranks_per_node"), py::arg("iterations"));
    module.def("exchange_orders", &exchange_orders, py::arg("source"), py::arg("destination"), py::arg("ranks"));
}

}  // namespace interlace
