#include <algorithm>
#include <cstring>
#include <limits>

#include "common/arrays.h"
#include "common/interruptible.h"
#include "schedule/meetings.h"
#include "simulate/events.h"
#include "simulate/own_lanes.h"

namespace interlace {

namespace {

constexpr int64_t MOST = std::numeric_limits<int32_t>::max();

std::vector<int32_t> read_small(const py::array &array, const std::string &name, int64_t low, int64_t high) {
    const std::vector<int64_t> values = read_integers(array, name, low, high);
    return std::vector<int32_t>(values.begin(), values.end());
}

std::vector<int32_t> read_small(const py::array &array, const std::string &name, int64_t length, int64_t low,
                                int64_t high) {
    if (array.ndim() != 1 || array.size() != length)
        throw py::value_error(name + " must have shape (" + std::to_string(length) + ",), got " + shape_of(array));
    return read_small(array, name, low, high);
}

// Start of each group in `items` items, followed by the number of items.
std::vector<int64_t> read_starts(const py::array &array, const std::string &name, int64_t items) {
    std::vector<int64_t> starts = read_integers(array, name, 0, items);
    if (starts.empty() || starts.front() != 0 || starts.back() != items)
        throw py::value_error(name + " must run from 0 to " + std::to_string(items));
    for (size_t i = 1; i < starts.size(); ++i)
        if (starts[i] < starts[i - 1])
            throw py::value_error(name + "[" + std::to_string(i) + "] is below the entry before it");
    return starts;
}

std::vector<int32_t> small(const std::vector<int64_t> &values) { return {values.begin(), values.end()}; }

std::vector<ActionRow> read_rows(const py::array &rows) {
    if (!py::isinstance<py::array_t<int32_t>>(rows) || rows.ndim() != 2 || rows.shape(1) != ACTION_COLUMNS)
        throw py::value_error("rows must be int32 [n, " + std::to_string(ACTION_COLUMNS) + "], got " +
                              dtype_name(rows) + " " + shape_of(rows));
    check_items(rows, "rows");
    const Contiguous<int32_t> values(rows);
    std::vector<ActionRow> read(values.shape(0));
    if (!read.empty()) std::memcpy(read.data(), values.data(), read.size() * sizeof(ActionRow));
    return read;
}

// Real numbers whose sum of magnitudes is finite, so that no partial sum overflows.
std::vector<double> read_numbers(const py::array &array, const std::string &name, int64_t length, bool signed_values) {
    if (array.ndim() != 1 || array.size() != length)
        throw py::value_error(name + " must have shape (" + std::to_string(length) + ",), got " + shape_of(array));
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

[[noreturn]] void refuse(int64_t row, int64_t rank, const std::string &why) {
    throw py::value_error("rows[" + std::to_string(row) + "], of rank " + std::to_string(rank) + ", " + why);
}

py::dict simulate(const py::array &rows, const py::array &first, const py::array &chunk_pipeline,
                  const py::array &node_pipeline, const py::array &node_stage, const py::array &node_lane,
                  const py::array &pipeline_module, const py::array &lane_first, const py::array &lane_rank,
                  const py::array &reduction_first, const py::array &reduction_rank, const py::array &reduction_tied,
                  const py::array &shard_by_layer, const py::array &shard_member_first, const py::array &shard_member,
                  const py::array &seconds, const py::array &transfer, const py::array &memory,
                  const py::array &scratch) {
    const std::vector<ActionRow> rows_ = read_rows(rows);
    const int64_t n = static_cast<int64_t>(rows_.size());
    const std::vector<int64_t> first_ = read_starts(first, "first", n);
    const int64_t ranks = static_cast<int64_t>(first_.size()) - 1;
    if (ranks < 1) throw py::value_error("first must have an entry per rank and one more");

    const std::vector<int32_t> lane_rank_ = read_small(lane_rank, "lane_rank", 0, ranks - 1);
    const int64_t members = static_cast<int64_t>(lane_rank_.size());
    const std::vector<int32_t> lane_first_ = small(read_starts(lane_first, "lane_first", members));
    const int64_t lanes = static_cast<int64_t>(lane_first_.size()) - 1;
    for (int64_t lane = 0; lane < lanes; ++lane)
        if (lane_first_[lane] == lane_first_[lane + 1])
            throw py::value_error("lane " + std::to_string(lane) + " has no rank");
    StagePlaces places;
    places.pipeline_module = read_small(pipeline_module, "pipeline_module", 0, MOST);
    const int64_t pipelines = static_cast<int64_t>(places.pipeline_module.size()), nodes = node_pipeline.size();
    places.chunk_pipeline = read_small(chunk_pipeline, "chunk_pipeline", 0, pipelines - 1);
    places.node_pipeline = read_small(node_pipeline, "node_pipeline", nodes, 0, pipelines - 1);
    places.node_stage = read_small(node_stage, "node_stage", nodes, 0, MOST - 1);
    places.node_lane = read_small(node_lane, "node_lane", nodes, 0, lanes - 1);
    const std::vector<int32_t> reduction_rank_ = read_small(reduction_rank, "reduction_rank", 0, ranks - 1);
    const int64_t taking_part = static_cast<int64_t>(reduction_rank_.size());
    const std::vector<int32_t> reduction_first_ = small(read_starts(reduction_first, "reduction_first", taking_part));
    const int64_t reductions = static_cast<int64_t>(reduction_first_.size()) - 1;
    const std::vector<int32_t> reduction_tied_ = read_small(reduction_tied, "reduction_tied", reductions, 0, 1);
    std::vector<int64_t> reduction_row(reduction_rank_.size(), -1);
    Ragged shard_members;
    shard_members.items = read_small(shard_member, "shard_member", 0, nodes - 1);
    shard_members.first =
        small(read_starts(shard_member_first, "shard_member_first", static_cast<int64_t>(shard_members.items.size())));
    const int64_t shards = shard_members.size();
    const std::vector<int32_t> may_layer = read_small(shard_by_layer, "shard_by_layer", shards, 0, 1);
    std::vector<char> by_layer(shards, 0);
    std::vector<int32_t> lane(n, -1), row_node(n, -1), meeting, meeting_size;

    ActionLists lists;
    lists.ranks = ranks;
    lists.size = n;
    lists.first = first_.data();
    lists.rows = rows_.data();
    lists.lane = lane.data();
    lists.lanes = lanes;
    lists.lane_first = lane_first_.data();
    lists.lane_rank = lane_rank_.data();
    lists.reductions = reductions;
    lists.reduction_first = reduction_first_.data();
    lists.reduction_rank = reduction_rank_.data();
    lists.reduction_row = reduction_row.data();
    lists.reduction_tied = reduction_tied_.data();
    OwnLanes own_lanes(lists, places);
    for (int64_t rank = 0; rank < ranks; ++rank) {
        for (int64_t i = first_[rank]; i < first_[rank + 1]; ++i) {
            check_signals(i);
            const ActionRow &row = lists.row(i);
            if (row.op < ActionOp::FORWARD || row.op >= ActionOp::COUNT)
                refuse(i, rank, "has op " + std::to_string(static_cast<int32_t>(row.op)) + ", which is none");
            const std::string wrong = own_lanes.find(i, rank, row_node[i]);
            if (!wrong.empty()) refuse(i, rank, wrong);
            if (row_node[i] >= 0) lane[i] = places.node_lane[row_node[i]];
            if (row.op == ActionOp::UNSHARD_LAYERS) {
                if (row.other < 0 || row.other >= shards || !may_layer[row.other])
                    refuse(i, rank,
                           "gathers shard " + std::to_string(row.other) +
                               " layer by layer, which is none that can be gathered so");
                by_layer[row.other] = 1;
            }
            if (lists.op(i) != ActionOp::REDUCE_GRAD) continue;
            if (row.other < 0 || row.other >= reductions)
                refuse(i, rank, "names reduction " + std::to_string(row.other) + ", which is none");
            const auto begin = reduction_rank_.begin() + reduction_first_[row.other];
            const auto end = reduction_rank_.begin() + reduction_first_[row.other + 1];
            const auto own = std::lower_bound(begin, end, static_cast<int32_t>(rank));
            const std::string name = "reduction " + std::to_string(row.other);
            if (own == end || *own != rank) refuse(i, rank, "joins " + name + ", which is of other ranks");
            int64_t &place = reduction_row[own - reduction_rank_.begin()];
            if (place >= 0) refuse(i, rank, "joins " + name + " a second time");
            place = i;
        }
    }
    const Meetings meetings(places.node_lane, Ragged{lane_first_, lane_rank_}, shard_members, by_layer);
    if (meetings.ranks.size() > 0) {
        meeting.assign(n, -1);
        for (int64_t i = 0; i < n; ++i)
            if (is_compute(lists.op(i))) meeting[i] = meetings.of_node[row_node[i]];
        for (int64_t i = 0; i < meetings.ranks.size(); ++i) meeting_size.push_back(meetings.ranks.count(i));
        lists.meeting = meeting.data();
        lists.meetings = meetings.ranks.size();
        lists.meeting_size = meeting_size.data();
    }
    const auto seconds_ = read_numbers(seconds, "seconds", n, false);
    const auto transfer_ = read_numbers(transfer, "transfer", n, false);
    const auto memory_ = read_numbers(memory, "memory", n, true);
    const auto scratch_ = read_numbers(scratch, "scratch", n, false);

    py::array_t<double> start(n), finish(n);
    std::vector<double> rank_busy(ranks, 0.0), peak(ranks, 0.0);
    std::vector<int64_t> reached;
    bool complete;
    double *const starts = start.mutable_data(), *const finishes = finish.mutable_data();
    {
        const Interruptible call;
        std::fill(starts, starts + n, 0.0);
        std::fill(finishes, finishes + n, 0.0);
        EventSimulator simulator(lists);
        complete = simulator.run(seconds_.data(), transfer_.data(), starts, finishes);
        reached = simulator.reached();
        Poll poll;
        for (int64_t rank = 0; rank < ranks; ++rank) {
            double held = 0.0;
            for (int64_t i = first_[rank]; i < first_[rank + 1]; ++i) {
                poll();
                if (is_compute(lists.op(i))) rank_busy[rank] += finishes[i] - starts[i];
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
    result["lane"] = to_numpy(lane);
    result["meeting"] = to_numpy(meeting);
    result["meeting_first"] = to_numpy(meetings.ranks.first);
    result["meeting_rank"] = to_numpy(meetings.ranks.items);
    result["rank_busy"] = to_numpy(rank_busy);
    result["peak_memory"] = to_numpy(peak);
    return result;
}

}  // namespace

void bind_simulate(py::module_ &module) {
    module.def("simulate", &simulate, py::arg("rows"), py::arg("first"), py::arg("chunk_pipeline"),
               py::arg("node_pipeline"), py::arg("node_stage"), py::arg("node_lane"), py::arg("pipeline_module"),
               py::arg("lane_first"), py::arg("lane_rank"), py::arg("reduction_first"), py::arg("reduction_rank"),
               py::arg("reduction_tied"), py::arg("shard_by_layer"), py::arg("shard_member_first"),
               py::arg("shard_member"), py::arg("seconds"), py::arg("transfer"), py::arg("memory"), py::arg("scratch"));
}

}  // namespace interlace
