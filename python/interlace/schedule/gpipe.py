"""GPipe: all forwards, then all backwards.

Simplest and fastest to start, but every microbatch is held at once: memory grows with their number. Backwards
run in the order of the forwards, so that gradients add up in the same order as under 1F1B.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from interlace.schedule.actions import Op
from interlace.schedule.graph import StageGraph
from interlace.schedule.order import play
from interlace.schedule.schedule import Compute, Schedule, assemble
from interlace.schedule.work import works


def gpipe(
    graph: StageGraph,
    presence: Sequence[Collection[str]],
    *,
    reduce_grad: bool = True,
    active: Collection[str] = (),
) -> Schedule:
    """The GPipe schedule of `graph` for one step.

    presence: per microbatch, the modules that run in it (`graph.everything(m)`: all in each of m).
    reduce_grad: end each rank's list with REDUCE_GRAD for its stages that have parameter gradients.
    active: modules that other replicas run in this step; their gradients are reduced here as well.
    """
    step = works(graph, presence)
    compute: list[list[Compute]] = [[] for _ in range(graph.num_ranks)]
    if graph.rank_depths is not None:
        for k, work in enumerate(step):
            for node in work.forward:
                compute[node[1]].append((Op.FORWARD, node, k))
        for k, work in enumerate(step):
            for node in work.backward:
                compute[node[1]].append((Op.BACKWARD, node, k))
    else:
        unlimited = dict.fromkeys(graph.nodes, len(step))
        for op in (Op.FORWARD, Op.BACKWARD):
            for rank, part in enumerate(play(graph, step, unlimited, lambda *_: 1.0, ops=(op,))):
                compute[rank].extend(part)
    return assemble("gpipe", graph, presence, compute, reduce_grad=reduce_grad, active=active)
