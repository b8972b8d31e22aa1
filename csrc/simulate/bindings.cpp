#include <algorithm>
#include <limits>

#include "common/arrays.h"
#include "simulate/events.h"

namespace interlace {

namespace {

// A one-dimensional integer array of the given length, as a contiguous array of T whose every value lies in low..high.
template <typename T>
py::array_t<T> read_integers(const py::array &array, const std::string &name, int64_t length, int64_t low,
                             int64_t high) {
    const char kind = array.dtype().kind();
    if (kind != 'i' && kind != 'u')
        throw py::value_error(name + " must be an array of integers, got dtype " +
                              py::str(array.dtype()).cast<std::string>());
    if (array.ndim() != 1 || (length >= 0 && array.size() != length))
        throw py::value_error(name + " must have shape (" + (length >= 0 ? std::to_string(length) : "n") + ",), got " +
                              py::str(array.attr("shape")).cast<std::string>());
    const py::array_t<int64_t, py::array::c_style | py::array::forcecast> wide(array);
    for (py::ssize_t i = 0; i < wide.size(); ++i)
        if (wide.data()[i] < low || wide.data()[i] > high)
            throw py::value_error(name + "[" + std::to_string(i) + "] is " + std::to_string(wide.data()[i]) +
                                  ": values must lie between " + std::to_string(low) + " and " + std::to_string(high));
    return py::array_t<T, py::array::c_style | py::array::forcecast>(array);
}

py::array_t<double> read_numbers(const py::array &array, const std::string &name, int64_t length, bool signed_values) {
    const char kind = array.dtype().kind();
    if (kind != 'f' && kind != 'i' && kind != 'u')
        throw py::value_error(name + " must be an array of real numbers (float or int), got dtype " +
                              py::str(array.dtype()).cast<std::string>());
    if (array.ndim() != 1 || array.size() != length)
        throw py::value_error(name + " must have shape (" + std::to_string(length) + ",), got " +
                              py::str(array.attr("shape")).cast<std::string>());
    const py::array_t<double, py::array::c_style | py::array::forcecast> values(array);
    for (py::ssize_t i = 0; i < values.size(); ++i)
        if (!std::isfinite(values.data()[i]) || (!signed_values && values.data()[i] < 0))
            throw py::value_error(name + "[" + std::to_string(i) + "] is " + format_number(values.data()[i]) +
                                  ": values must be finite" + (signed_values ? "" : " and not negative"));
    return values;
}

py::dict simulate(const py::array &offsets, const py::array &op, const py::array &stage, const py::array &microbatch,
                  const py::array &peer, const py::array &copies, const py::array &seconds, const py::array &transfer,
                  const py::array &memory, const py::array &scratch) {
    constexpr int32_t most = std::numeric_limits<int32_t>::max();
    const int64_t n = op.size();
    if (n > most) throw py::value_error("op has " + std::to_string(n) + " actions: more than int32 can index");
    const auto offsets_ = read_integers<int64_t>(offsets, "offsets", -1, 0, n);
    if (offsets_.size() < 2 || offsets_.data()[0] != 0 || offsets_.data()[offsets_.size() - 1] != n)
        throw py::value_error("offsets must run from 0 to the number of actions, " + std::to_string(n) +
                              ", with one entry per rank and one more");
    for (py::ssize_t i = 1; i < offsets_.size(); ++i)
        if (offsets_.data()[i] < offsets_.data()[i - 1])
            throw py::value_error("offsets[" + std::to_string(i) + "] is below the entry before it");
    const int64_t ranks = offsets_.size() - 1;
    const auto op_ = read_integers<int8_t>(op, "op", n, 0, static_cast<int64_t>(Op::count) - 1);
    const auto copies_ = read_integers<int32_t>(copies, "copies", -1, 1, ranks);
    const auto stage_ = read_integers<int32_t>(stage, "stage", n, 0, copies_.size() - 1);
    const auto microbatch_ = read_integers<int32_t>(microbatch, "microbatch", n, 0, most);
    const auto peer_ = read_integers<int32_t>(peer, "peer", n, -1, ranks - 1);
    for (int64_t i = 0; i < n; ++i) {
        const Op code = static_cast<Op>(op_.data()[i]);
        if ((code == Op::send || code == Op::recv) && peer_.data()[i] < 0)
            throw py::value_error("peer[" + std::to_string(i) + "] is -1, but the action is a SEND or RECV");
    }
    const auto seconds_ = read_numbers(seconds, "seconds", n, false);
    const auto transfer_ = read_numbers(transfer, "transfer", n, false);
    const auto memory_ = read_numbers(memory, "memory", n, true);
    const auto scratch_ = read_numbers(scratch, "scratch", n, false);

    py::array_t<double> start(n), finish(n);
    std::vector<double> rank_busy(ranks, 0.0), stage_busy(copies_.size(), 0.0), peak(ranks, 0.0);
    std::vector<int64_t> reached;
    bool complete;
    double *const starts = start.mutable_data(), *const finishes = finish.mutable_data();
    {
        const py::gil_scoped_release release;
        std::fill(starts, starts + n, 0.0);
        std::fill(finishes, finishes + n, 0.0);
        ActionLists lists;
        lists.ranks = ranks;
        lists.size = n;
        lists.offsets = offsets_.data();
        lists.op = op_.data();
        lists.stage = stage_.data();
        lists.microbatch = microbatch_.data();
        lists.peer = peer_.data();
        lists.copies = copies_.data();
        EventSimulator simulator(lists);
        complete = simulator.run(seconds_.data(), transfer_.data(), starts, finishes);
        reached = simulator.reached();
        for (int64_t rank = 0; rank < ranks; ++rank) {
            double held = 0.0;
            for (int64_t i = offsets_.data()[rank]; i < offsets_.data()[rank + 1]; ++i) {
                if (is_compute(static_cast<Op>(op_.data()[i]))) {
                    rank_busy[rank] += seconds_.data()[i];
                    stage_busy[stage_.data()[i]] += seconds_.data()[i];
                }
                held += memory_.data()[i];
                peak[rank] = std::max(peak[rank], held + scratch_.data()[i]);
            }
        }
    }
    py::dict result;
    result["complete"] = complete;
    result["reached"] = to_numpy(reached);
    result["start"] = start;
    result["finish"] = finish;
    result["rank_busy"] = to_numpy(rank_busy);
    result["stage_busy"] = to_numpy(stage_busy);
    result["peak_memory"] = to_numpy(peak);
    return result;
}

}  // namespace

void bind_simulate(py::module_ &module) {
    module.def("simulate", &simulate, py::arg("offsets"), py::arg("op"), py::arg("stage"), py::arg("microbatch"),
               py::arg("peer"), py::arg("copies"), py::arg("seconds"), py::arg("transfer"), py::arg("memory"),
               py::arg("scratch"));
}

}  // namespace interlace
