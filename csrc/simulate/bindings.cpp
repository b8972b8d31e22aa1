#include <algorithm>
#include <limits>

#include "common/arrays.h"
#include "common/interruptible.h"
#include "simulate/events.h"

namespace interlace {

namespace {

void check_length(const py::array &array, const std::string &name, int64_t length) {
    if (array.ndim() != 1 || array.size() != length)
        throw py::value_error(name + " must have shape (" + std::to_string(length) + ",), got " + shape_of(array));
}

// A one-dimensional integer array of the given length, every value in low..high.
template <typename T>
std::vector<T> read_as(const py::array &array, const std::string &name, int64_t length, int64_t low, int64_t high) {
    check_length(array, name, length);
    const std::vector<int64_t> values = read_integers(array, name, low, high);
    return std::vector<T>(values.begin(), values.end());
}

// Real numbers whose sum of sizes is finite, so that no sum of some of them overflows.
std::vector<double> read_numbers(const py::array &array, const std::string &name, int64_t length, bool signed_values) {
    check_length(array, name, length);
    std::vector<double> values = read_real(array, name);
    double total = 0.0;
    for (size_t i = 0; i < values.size(); ++i) {
        check_signals(static_cast<int64_t>(i));
        total += std::abs(values[i]);
        if (!std::isfinite(values[i]) || (!signed_values && values[i] < 0))
            throw py::value_error(name + "[" + std::to_string(i) + "] is " + format_number(values[i]) +
                                  ": values must be finite" + (signed_values ? "" : " and not negative"));
    }
    if (overflows(4 * total)) throw py::value_error("the sum of " + name + " overflows: use a larger unit");
    return values;
}

py::dict simulate(const py::array &offsets, const py::array &op, const py::array &stage, const py::array &microbatch,
                  const py::array &peer, const py::array &copies, const py::array &seconds, const py::array &transfer,
                  const py::array &memory, const py::array &scratch) {
    constexpr int32_t MOST = std::numeric_limits<int32_t>::max();
    const int64_t n = op.size();
    if (n > MOST) throw py::value_error("op has " + std::to_string(n) + " actions: more than int32 can index");
    const std::vector<int64_t> offsets_ = read_integers(offsets, "offsets", 0, n);
    if (offsets_.size() < 2 || offsets_.front() != 0 || offsets_.back() != n)
        throw py::value_error("offsets must run from 0 to the number of actions, " + std::to_string(n) +
                              ", with one entry per rank and one more");
    for (size_t i = 1; i < offsets_.size(); ++i)
        if (offsets_[i] < offsets_[i - 1])
            throw py::value_error("offsets[" + std::to_string(i) + "] is below the entry before it");
    const int64_t ranks = static_cast<int64_t>(offsets_.size()) - 1;
    const auto op_ = read_as<int8_t>(op, "op", n, 0, static_cast<int64_t>(Op::count) - 1);
    const auto copies_ = read_as<int32_t>(copies, "copies", copies.size(), 1, ranks);
    const int64_t stages = static_cast<int64_t>(copies_.size());
    const auto stage_ = read_as<int32_t>(stage, "stage", n, 0, stages - 1);
    const auto microbatch_ = read_as<int32_t>(microbatch, "microbatch", n, 0, MOST);
    const auto peer_ = read_as<int32_t>(peer, "peer", n, -1, ranks - 1);
    for (int64_t i = 0; i < n; ++i) {
        const Op code = static_cast<Op>(op_[i]);
        if ((code == Op::send || code == Op::recv) && peer_[i] < 0)
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
        const Interruptible call;
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
        Poll poll;
        for (int64_t rank = 0; rank < ranks; ++rank) {
            double held = 0.0;
            for (int64_t i = offsets_[rank]; i < offsets_[rank + 1]; ++i) {
                poll();
                if (is_compute(static_cast<Op>(op_[i]))) {
                    rank_busy[rank] += seconds_[i];
                    stage_busy[stage_[i]] += seconds_[i];
                }
                held += memory_[i];
                peak[rank] = std::max(peak[rank], held + scratch_[i]);
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
