"""1F1B over a graph of modules: memory bounded by the distance to the sink, not by the number of microbatches.

Where ranks do not feed each other in a cycle, each rank is one pipeline unit: it runs all its stages for a
microbatch in one go, and the classical closed form holds with d = the rank's longest path to a sink
(`StageGraph.rank_depths`; Cornstarch section 4.1 counts the same):

    F_0 .. F_{d-1}, then F_{d+j} B_j for j = 0, 1, ..., until the forwards run out, then the last backwards.

Why it cannot deadlock: give F_k of a unit the time 2k - d and B_k the time 2k + d + 1. A consumer has a smaller
d than its producers, so every dependency, and every step along a rank's list, goes to a strictly later time.

Absent modules. A unit counts its microbatches: those in which it or anything before it has work, so an encoder
that is absent from most of them runs ahead as far as its memory allows. Let p_j be its j-th one; F of p_j then
waits for B of p_{j-d-1} only, at time 2 p_{j-d-1} + d + 1. A consumer counts at least the same microbatches, so
going back fewer of them (its d is smaller) ends at a later one: times still increase along every edge.

Where ranks do feed each other in a cycle, `order.play` decides under the same caps; also where `durations` are given
and that finishes earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from interlace.schedule.actions import Op
from interlace.schedule.costs import Durations, duration_of
from interlace.schedule.graph import Node, StageGraph
from interlace.schedule.order import play, span
from interlace.schedule.schedule import Compute, Schedule, assemble
from interlace.schedule.work import Work, works


def one_f_one_b(
    graph: StageGraph,
    presence: Sequence[Collection[str]],
    *,
    reduce_grad: bool = True,
    active: Collection[str] = (),
    durations: Durations | None = None,
) -> Schedule:
    """The 1F1B schedule of `graph` for one step.

    presence: per microbatch, the modules that run in it (`graph.everything(m)`: all in each of m).
    reduce_grad: end each rank's list with REDUCE_GRAD for its stages that have parameter gradients.
    active: modules that other replicas run in this step; their gradients are reduced here as well.
    durations: seconds of FORWARD and BACKWARD, as in `simulate`. Given, ranks take what is ready by these costs
        wherever that finishes earlier than the classical order (transfers left out); either way each copy holds at
        most `graph.in_flight_caps` microbatches.
    """
    step = works(graph, presence)
    compute: list[list[Compute]] | None = None
    if graph.rank_depths is not None:
        compute = [_unit(graph, step, rank, depth) for rank, depth in enumerate(graph.rank_depths)]
    if compute is None or durations is not None:
        cost = _cost(graph, durations)
        greedy = play(graph, step, graph.in_flight_caps, cost)
        if compute is None or span(step, greedy, cost) < span(step, compute, cost):
            compute = greedy
    return assemble("1f1b", graph, presence, compute, reduce_grad=reduce_grad, active=active)


def _unit(graph: StageGraph, step: Sequence[Work], rank: int, depth: int) -> list[Compute]:
    """The closed form for one rank."""
    stages = graph.hosted(rank)
    upstream = _upstream_modules(graph, rank)
    counted = [
        k for k, work in enumerate(step) if any(graph.stages[node[0]].module in upstream for node in work.forward)
    ]
    out: list[Compute] = []
    for j in range(len(counted) + depth):
        if j < len(counted):
            work = step[counted[j]]
            out.extend((Op.FORWARD, (s, rank), counted[j]) for s in stages if (s, rank) in work.inputs)
        if j >= depth:
            k = counted[j - depth]
            out.extend((Op.BACKWARD, (s, rank), k) for s in reversed(stages) if (s, rank) in step[k].gradients)
    return out


def _upstream_modules(graph: StageGraph, rank: int) -> set[str]:
    """The modules on this rank and on all ranks that feed it, directly or not."""
    feeds: dict[int, set[int]] = {}
    for producer, consumer in graph.copy_edges:
        feeds.setdefault(consumer[1], set()).add(producer[1])
    reached, todo = {rank}, [rank]
    while todo:
        for before in feeds.get(todo.pop(), ()):
            if before not in reached:
                reached.add(before)
                todo.append(before)
    return {graph.stages[s].module for s, where in graph.nodes if where in reached}


def _cost(graph: StageGraph, durations: Durations | None) -> Callable[[Op, Node, int], float]:
    if durations is None:
        # A backward costs about two forwards; only the order among equals depends on it.
        return lambda op, node, k: 1.0 if op is Op.FORWARD else 2.0
    lookup = duration_of(durations)

    def cost(op: Op, node: Node, k: int) -> float:
        stage = graph.stages[node[0]]
        return lookup(op, stage.module, stage.index, k)

    return cost
