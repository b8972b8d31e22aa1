#include <algorithm>
#include <cstring>

#include "common/arrays.h"
#include "common/interruptible.h"
#include "schedule/checker/check.h"
#include "schedule/generator/generate.h"
#include "schedule/generator/lists.h"
#include "schedule/step_graph.h"

namespace interlace {

namespace {

constexpr int64_t MOST = INT32_MAX;

std::vector<int32_t> read_numbers(const py::array &array, const std::string &name, int64_t low, int64_t high) {
    const std::vector<int64_t> values = read_integers(array, name, low, high);
    return std::vector<int32_t>(values.begin(), values.end());
}

// int32 [lists + 1], from 0 to the number of items, non-decreasing.
std::vector<int32_t> read_first(const py::array &array, const std::string &name, size_t items) {
    std::vector<int32_t> first = read_numbers(array, name, 0, static_cast<int64_t>(items));
    if (first.empty() || first.front() != 0 || first.back() != static_cast<int32_t>(items) ||
        !std::is_sorted(first.begin(), first.end()))
        throw py::value_error(name + " must rise from 0 to " + std::to_string(items));
    return first;
}

std::vector<std::pair<int32_t, int32_t>> read_pairs(const py::array &array, const std::string &name, int64_t high) {
    if (array.ndim() != 2 || array.shape(1) != 2)
        throw py::value_error(name + " must have shape (n, 2), got " + shape_of(array));
    check_items(array, name);
    const std::vector<int32_t> values = read_numbers(array.attr("ravel")().cast<py::array>(), name, 0, high);
    std::vector<std::pair<int32_t, int32_t>> pairs;
    for (size_t i = 0; i < values.size(); i += 2) pairs.emplace_back(values[i], values[i + 1]);
    return pairs;
}

void check_length(const std::vector<int32_t> &values, const std::string &name, size_t length) {
    if (values.size() != length)
        throw py::value_error(name + " must have shape (" + std::to_string(length) + ",), got (" +
                              std::to_string(values.size()) + ",)");
}

// GraphArrays (python/interlace/schedule/graph.py) in the order of its fields.
StageArrays read_graph(const py::sequence &fields) {
    constexpr size_t FIELDS = 23;
    if (fields.size() != FIELDS) throw py::value_error("give the 23 arrays of StageGraph.arrays");
    size_t next = 0;
    const auto array = [&] {
        const py::object field = fields[next++];
        if (!py::isinstance<py::array>(field)) throw py::type_error("StageGraph.arrays are arrays of numpy");
        return py::reinterpret_borrow<py::array>(field);
    };
    StageArrays graph;
    graph.node_pipeline = read_numbers(array(), "node_pipeline", 0, MOST);
    const size_t nodes = graph.node_pipeline.size();
    graph.node_stage = read_numbers(array(), "node_stage", 0, MOST);
    graph.node_lane = read_numbers(array(), "node_lane", 0, MOST);
    graph.node_copy = read_numbers(array(), "node_copy", 0, MOST);
    graph.node_trains = read_numbers(array(), "node_trains", 0, 1);
    check_length(graph.node_stage, "node_stage", nodes);
    check_length(graph.node_lane, "node_lane", nodes);
    check_length(graph.node_copy, "node_copy", nodes);
    check_length(graph.node_trains, "node_trains", nodes);
    graph.pipeline_module = read_numbers(array(), "pipeline_module", 0, MOST - 1);
    graph.pipeline_first = read_first(array(), "pipeline_first", nodes);
    check_length(graph.pipeline_first, "pipeline_first", graph.pipeline_module.size() + 1);
    const py::array lane_first = array();
    graph.lane_ranks.items = read_numbers(array(), "lane_rank", 0, MOST - 1);
    graph.lane_ranks.first = read_first(lane_first, "lane_first", graph.lane_ranks.items.size());
    for (int64_t lane = 0; lane < graph.lane_ranks.size(); ++lane)
        if (graph.lane_ranks.count(lane) == 0) throw py::value_error("lane " + std::to_string(lane) + " has no ranks");
    const auto largest = [](const std::vector<int32_t> &values) {
        return values.empty() ? -1 : *std::max_element(values.begin(), values.end());
    };
    if (largest(graph.node_lane) >= graph.lane_ranks.size())
        throw py::value_error("node_lane names a lane that is none");
    graph.ranks = largest(graph.lane_ranks.items) + 1;
    graph.modules = largest(graph.pipeline_module) + 1;
    if (graph.ranks > static_cast<int64_t>(graph.lane_ranks.items.size()))
        throw py::value_error("lane_rank must contain every rank");
    if (graph.modules > static_cast<int64_t>(graph.pipeline_module.size()))
        throw py::value_error("pipeline_module must contain every module");
    graph.module_links = read_pairs(array(), "module_links", graph.modules - 1);
    const py::array reduction_first = array();
    graph.reduction_ranks.items = read_numbers(array(), "reduction_rank", 0, graph.ranks - 1);
    graph.reduction_ranks.first = read_first(reduction_first, "reduction_first", graph.reduction_ranks.items.size());
    graph.reduction_node = read_numbers(array(), "reduction_node", 0, static_cast<int64_t>(nodes) - 1);
    check_length(graph.reduction_node, "reduction_node", graph.reduction_ranks.items.size());
    const std::vector<int32_t> tied = read_numbers(array(), "reduction_tied", 0, 1);
    graph.reduction_tied.assign(tied.begin(), tied.end());
    check_length(tied, "reduction_tied", graph.reduction_ranks.first.size() - 1);
    const py::array member_first = array();
    graph.reduction_members.items = read_numbers(array(), "reduction_member", 0, static_cast<int64_t>(nodes) - 1);
    graph.reduction_members.first =
        read_first(member_first, "reduction_member_first", graph.reduction_members.items.size());
    check_length(graph.reduction_members.first, "reduction_member_first", tied.size() + 1);
    const py::array shard_first = array();
    graph.shard_ranks.items = read_numbers(array(), "shard_rank", 0, graph.ranks - 1);
    graph.shard_ranks.first = read_first(shard_first, "shard_first", graph.shard_ranks.items.size());
    for (int64_t shard = 0; shard < graph.shard_ranks.size(); ++shard)
        if (!std::is_sorted(graph.shard_ranks.begin(shard), graph.shard_ranks.end(shard)))
            throw py::value_error("shard_rank must rise within shard " + std::to_string(shard));
    graph.shard_node = read_numbers(array(), "shard_node", 0, static_cast<int64_t>(nodes) - 1);
    check_length(graph.shard_node, "shard_node", graph.shard_ranks.items.size());
    const std::vector<int32_t> full = read_numbers(array(), "shard_full", 0, 1);
    graph.shard_full.assign(full.begin(), full.end());
    check_length(full, "shard_full", graph.shard_ranks.first.size() - 1);
    const std::vector<int32_t> by_layer = read_numbers(array(), "shard_by_layer", 0, 1);
    graph.shard_by_layer.assign(by_layer.begin(), by_layer.end());
    check_length(by_layer, "shard_by_layer", full.size());
    const py::array shard_member_first = array();
    graph.shard_members.items = read_numbers(array(), "shard_member", 0, static_cast<int64_t>(nodes) - 1);
    graph.shard_members.first = read_first(shard_member_first, "shard_member_first", graph.shard_members.items.size());
    check_length(graph.shard_members.first, "shard_member_first", full.size() + 1);
    for (size_t shard = 0; shard < by_layer.size(); ++shard)
        if (by_layer[shard] && graph.shard_members.count(static_cast<int64_t>(shard)) == 0)
            throw py::value_error("shard " + std::to_string(shard) + " has no members");
    return graph;
}

struct StepArguments {
    StageArrays graph;
    std::vector<int32_t> chunk_pipeline;
    std::vector<std::pair<int32_t, int32_t>> links;

    StepArguments(const py::sequence &fields, const py::array &chunks, const py::array &pairs)
        : graph(read_graph(fields)),
          chunk_pipeline(
              read_numbers(chunks, "chunk_pipeline", 0, static_cast<int64_t>(graph.pipeline_module.size()) - 1)),
          links(read_pairs(pairs, "links", static_cast<int64_t>(chunk_pipeline.size()) - 1)) {}

    StepGraph build(bool backward) {
        return StepGraph(std::move(graph), std::move(chunk_pipeline), std::move(links), backward);
    }
};

// Jobs of a step in their order: (nodes int32 [jobs], chunks int32 [jobs], backward bool [jobs]).
py::tuple schedule_jobs(const py::sequence &fields, const py::array &chunk_pipeline, const py::array &links,
                        bool backward) {
    StepArguments arguments(fields, chunk_pipeline, links);
    std::vector<int32_t> nodes, chunks;
    std::vector<char> runs;
    {
        const Interruptible call;
        StepGraph graph = arguments.build(backward);
        nodes = std::move(graph.job_node);
        chunks = std::move(graph.job_chunk);
        runs = std::move(graph.backward);
    }
    py::array_t<bool> flags(static_cast<py::ssize_t>(runs.size()));
    std::copy(runs.begin(), runs.end(), flags.mutable_data());
    return py::make_tuple(to_numpy(nodes), to_numpy(chunks), flags);
}

// One value per step, or empty.
std::vector<double> read_seconds(const py::array &seconds) {
    return seconds.size() > 0 ? read_costs(seconds, "seconds") : std::vector<double>{};
}

void check_seconds(const std::vector<double> &seconds, const StepGraph &graph) {
    const size_t steps = STEPS_PER_JOB * static_cast<size_t>(graph.jobs());
    if (!seconds.empty() && seconds.size() != steps)
        throw std::invalid_argument("seconds must have four entries per job: " + std::to_string(steps) + ", not " +
                                    std::to_string(seconds.size()));
}

std::vector<double> read_bytes(const py::array &activation_bytes) {
    return activation_bytes.size() > 0 ? read_costs(activation_bytes, "activation_bytes") : std::vector<double>{};
}

void check_bytes(const std::vector<double> &bytes, const StepGraph &graph) {
    if (!bytes.empty() && bytes.size() != static_cast<size_t>(graph.jobs()))
        throw std::invalid_argument("activation_bytes must have one entry per job");
}

// One value per rank, or empty.
std::vector<double> read_limit(const py::array &memory_limit, int32_t ranks) {
    if (memory_limit.size() == 0) return {};
    std::vector<double> limit = read_real(memory_limit, "memory_limit");
    if (limit.size() != static_cast<size_t>(ranks)) throw py::value_error("memory_limit must have one entry per rank");
    return limit;
}

py::tuple to_arrays(const RankLists &lists) {
    py::array_t<int32_t> rows({static_cast<py::ssize_t>(lists.rows.size()), static_cast<py::ssize_t>(ACTION_COLUMNS)});
    if (!lists.rows.empty()) std::memcpy(rows.mutable_data(), lists.rows.data(), lists.rows.size() * sizeof(ActionRow));
    return py::make_tuple(rows, to_numpy(lists.first));
}

// seconds: of the FORWARD, BACKWARD, BACKWARD_INPUT and BACKWARD_WEIGHT of each job in turn; empty: unknown.
// generator: a Generator. activation_bytes, memory_limit: of jobs and of ranks, or empty. in_flight: 0: no limit.
py::tuple schedule_lists(const py::sequence &fields, const py::array &chunk_pipeline, const py::array &links,
                         int32_t generator, bool backward, bool reduce_grad, const py::array &seconds,
                         const py::array &activation_bytes, const py::array &memory_limit, int32_t in_flight,
                         bool dispatch) {
    StepArguments arguments(fields, chunk_pipeline, links);
    if (generator < 0 || generator >= static_cast<int32_t>(Generator::COUNT))
        throw py::value_error("unknown generator " + std::to_string(generator));
    if (in_flight < 0) throw py::value_error("in_flight must not be negative");
    const std::vector<double> costs = read_seconds(seconds);
    const Limits limits{read_bytes(activation_bytes), read_limit(memory_limit, arguments.graph.ranks), in_flight};
    RankLists lists;
    {
        const Interruptible call;
        const StepGraph graph = arguments.build(backward);
        check_seconds(costs, graph);
        check_bytes(limits.bytes, graph);
        lists =
            make_lists(graph, generate(graph, static_cast<Generator>(generator), costs, limits), reduce_grad, dispatch);
    }
    return to_arrays(lists);
}

// Lists of the steps in a given order. order: 4 * job + op each (see order.h). Returns the rows and first of
// schedule_lists, or (index, step, other) of the first step at a wrong place.
py::tuple schedule_of_order(const py::sequence &fields, const py::array &chunk_pipeline, const py::array &links,
                            const py::array &order, bool backward, bool reduce_grad, bool dispatch) {
    StepArguments arguments(fields, chunk_pipeline, links);
    std::vector<Step> steps = read_numbers(order, "order", 0, MOST);
    RankLists lists;
    std::optional<Misplaced> wrong;
    {
        const Interruptible call;
        const StepGraph graph = arguments.build(backward);
        if (!steps.empty() && job_of(*std::max_element(steps.begin(), steps.end())) >= graph.jobs())
            throw std::invalid_argument("order names a job that is none");
        wrong = misplaced(graph, steps);
        if (!wrong) lists = make_lists(graph, steps, reduce_grad, dispatch);
    }
    if (wrong) return py::make_tuple(wrong->at, wrong->step, wrong->other);
    return to_arrays(lists);
}

// seconds: as in schedule_lists, and not empty.
double schedule_bound(const py::sequence &fields, const py::array &chunk_pipeline, const py::array &links,
                      bool backward, const py::array &seconds) {
    StepArguments arguments(fields, chunk_pipeline, links);
    const std::vector<double> costs = read_costs(seconds, "seconds");
    const Interruptible call;
    const StepGraph graph = arguments.build(backward);
    if (costs.empty() && graph.jobs() > 0) throw std::invalid_argument("seconds must have four entries per job");
    check_seconds(costs, graph);
    return lower_bound_of(graph, costs);
}

const char *name_of(FaultKind kind) {
    switch (kind) {
        case FaultKind::TIMES: return "times";
        case FaultKind::BESIDES: return "besides";
        case FaultKind::LACKS: return "lacks";
        case FaultKind::HALF: return "half";
        case FaultKind::EXTRA: return "extra";
        case FaultKind::LANE_ORDER: return "lane_order";
        case FaultKind::AFTER_REDUCTION: return "after_reduction";
        case FaultKind::AFTER_TIED: return "after_tied";
        case FaultKind::REDUCTION_ORDER: return "reduction_order";
        case FaultKind::MESSAGE_ORDER: return "message_order";
        case FaultKind::SEND_FORWARD: return "send_forward";
        case FaultKind::SEND_BACKWARD: return "send_backward";
        case FaultKind::NO_FORWARD: return "no_forward";
        case FaultKind::NO_INPUT_HALF: return "no_input_half";
        case FaultKind::NO_OUTPUT: return "no_output";
        case FaultKind::NO_GRADIENT: return "no_gradient";
        case FaultKind::TWO_WAYS: return "two_ways";
        case FaultKind::MEETING_ORDER: return "meeting_order";
        case FaultKind::NO_UNSHARD: return "no_unshard";
        case FaultKind::AFTER_RESHARD: return "after_reshard";
        case FaultKind::DEADLOCK: return "deadlock";
        case FaultKind::MEMORY: return "memory";
    }
    return "";
}

py::tuple to_tuple(const ActionRow &row) {
    return py::make_tuple(static_cast<int32_t>(row.op), row.module, row.stage, row.chunk, row.other, row.peer,
                          row.grad);
}

py::dict to_dict(const Fault &fault) {
    py::list stuck;
    for (const Stuck &entry : fault.stuck) stuck.append(py::make_tuple(entry.rank, entry.waits_for));
    py::dict made;
    made["kind"] = name_of(fault.kind);
    made["rank"] = fault.rank;
    made["row"] = to_tuple(fault.row);
    made["other"] = to_tuple(fault.other);
    made["other_rank"] = fault.other_rank;
    made["count"] = fault.count;
    made["bytes"] = fault.bytes;
    made["stuck"] = stuck;
    made["at"] = fault.at;
    return made;
}

std::vector<ActionRow> read_action_rows(const py::array &array, int64_t modules) {
    if (array.ndim() != 2 || array.shape(1) != ACTION_COLUMNS)
        throw py::value_error("rows must have shape (n, 7), got " + shape_of(array));
    check_items(array, "rows");
    if (array.dtype().kind() != 'i' || array.itemsize() != sizeof(int32_t))
        throw py::value_error("rows must be an array of int32, got dtype " + dtype_name(array));
    const Contiguous<int32_t> values(array);
    std::vector<ActionRow> rows(static_cast<size_t>(array.shape(0)));
    for (size_t i = 0; i < rows.size(); ++i) {
        check_signals(static_cast<int64_t>(i));
        const int32_t *const columns = values.data() + i * ACTION_COLUMNS;
        if (columns[0] < 0 || columns[0] >= static_cast<int32_t>(ActionOp::COUNT))
            throw py::value_error("rows[" + std::to_string(i) + "] has the op " + std::to_string(columns[0]) +
                                  ", which is none");
        if (columns[1] < 0 || columns[1] >= modules)
            throw py::value_error("rows[" + std::to_string(i) + "] names module " + std::to_string(columns[1]) +
                                  " of " + std::to_string(modules));
        std::memcpy(&rows[i], columns, sizeof(ActionRow));
    }
    return rows;
}

py::dict schedule_check(const py::sequence &fields, const py::array &chunk_pipeline, const py::array &links,
                        bool backward, bool reduce_grad, const py::array &rows, const py::array &first,
                        const py::array &activation_bytes, const py::array &memory_limit, bool dispatch) {
    StepArguments arguments(fields, chunk_pipeline, links);
    const std::vector<ActionRow> actions = read_action_rows(rows, arguments.graph.modules);
    const std::vector<int64_t> starts = read_integers(first, "first", 0, static_cast<int64_t>(actions.size()));
    if (starts.size() != static_cast<size_t>(arguments.graph.ranks) + 1 || starts.front() != 0 ||
        starts.back() != static_cast<int64_t>(actions.size()) || !std::is_sorted(starts.begin(), starts.end()))
        throw py::value_error("first must rise from 0 to the number of rows, with one entry per rank and one more");
    const std::vector<double> bytes = read_bytes(activation_bytes);
    const std::vector<double> limits = read_limit(memory_limit, arguments.graph.ranks);
    CheckResult found;
    {
        const Interruptible call;
        const StepGraph graph = arguments.build(backward);
        check_bytes(bytes, graph);
        found = check_lists(graph, actions, starts, reduce_grad, dispatch, bytes, limits);
    }
    py::dict result;
    result["fault"] = found.fault ? py::object(to_dict(*found.fault)) : py::object(py::none());
    result["peak_in_flight"] = found.peak_in_flight;
    result["peak_memory"] = found.peak_bytes;
    return result;
}

}  // namespace

void bind_schedule(py::module_ &module) {
    module.def("schedule_jobs", &schedule_jobs, py::arg("graph"), py::arg("chunk_pipeline"), py::arg("links"),
               py::arg("backward"));
    module.def("schedule_lists", &schedule_lists, py::arg("graph"), py::arg("chunk_pipeline"), py::arg("links"),
               py::arg("generator"), py::arg("backward"), py::arg("reduce_grad"), py::arg("seconds"),
               py::arg("activation_bytes"), py::arg("memory_limit"), py::arg("in_flight"), py::arg("dispatch") = false);
    module.def("schedule_of_order", &schedule_of_order, py::arg("graph"), py::arg("chunk_pipeline"), py::arg("links"),
               py::arg("order"), py::arg("backward"), py::arg("reduce_grad"), py::arg("dispatch"));
    module.def("schedule_bound", &schedule_bound, py::arg("graph"), py::arg("chunk_pipeline"), py::arg("links"),
               py::arg("backward"), py::arg("seconds"));
    module.def("schedule_check", &schedule_check, py::arg("graph"), py::arg("chunk_pipeline"), py::arg("links"),
               py::arg("backward"), py::arg("reduce_grad"), py::arg("rows"), py::arg("first"),
               py::arg("activation_bytes"), py::arg("memory_limit"), py::arg("dispatch") = false);
}

}  // namespace interlace
