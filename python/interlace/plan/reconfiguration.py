"""Reconfiguration: pipelines after failures and joins, as pure functions of node sets (dissertation 2.5.1, A.2)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Node = TypeVar("Node", bound=Hashable)
Change = Literal["kept", "shrunk", "borrowed", "lent", "merged", "grown", "new"]


@dataclass(frozen=True)
class Reconfigured(Generic[Node]):
    """One pipeline after a reconfiguration.

    nodes: its nodes; nodes that stay come first, in their old order.
    sources: indices of the old pipelines that its nodes come from or that it replaces, its own first.
    change: "kept" unchanged; "shrunk" to its survivors (Figure 2.8a); "borrowed" nodes (2.8b); "lent" nodes to another
        pipeline; "merged" from several pipelines (2.8c); "grown" by joined nodes; "new", made of joined nodes only. All
        but "kept" are instantiated again.
    """

    nodes: tuple[Node, ...]
    sources: tuple[int, ...]
    change: Change


def reconfigure(
    pipelines: Sequence[Sequence[Node]], failed: Collection[Node], node_counts: Sequence[int], *, faults: int = 0
) -> list[Reconfigured[Node]]:
    """Pipelines that use every surviving node, changed as little as the paper's three steps allow.

    1. A pipeline continues with its survivors if these suffice for the smallest template.
    2. A pipeline with fewer survivors borrows from the pipeline that can spare most (ties: lower index), its last node
       first.
    3. If no pipeline can spare a node, pipelines merge: the broken ones together, then with the smallest intact ones,
       until the smallest template fits (theorem 2: a template of that size exists).

    A pipeline without survivors is dropped if faults + 1 others remain; otherwise it borrows all its nodes. O(nodes *
    pipelines).

    Args:
        pipelines: nodes of each pipeline, each node once. Nodes may be any hashable values, such as ranks.
        failed: lost nodes. Names that are in no pipeline are ignored.
        node_counts: sizes of the pipeline templates, consecutive (see `interlace.plan.node_counts`).
        faults: failures that must still be survivable: at least faults + 1 pipelines remain.

    Returns:
        The new pipelines in the order of their first source.

    Raises:
        ValueError: a node is in two pipelines, sizes are not consecutive, or the survivors are too few.
    """
    smallest, largest = _smallest_and_largest(node_counts)
    pipeline_of = _pipeline_of(pipelines)
    lost = set(failed)
    remaining = [[node for node in pipeline if node not in lost] for pipeline in pipelines]
    total = sum(map(len, remaining))
    if total < max(1, (faults + 1) * smallest):
        raise ValueError(
            f"{total} nodes remain, too few for {faults + 1} pipelines of at least {smallest} nodes: restart from a "
            "checkpoint with a lower `faults`, or wait for nodes"
        )
    for index, nodes in enumerate(remaining):
        if len(nodes) > largest:
            raise ValueError(f"pipelines[{index}] keeps {len(nodes)} nodes, more than the largest template ({largest})")

    change: list[Change] = [
        "kept" if len(new) == len(old) else "shrunk" for new, old in zip(remaining, pipelines, strict=True)
    ]
    sources = [[index] for index in range(len(remaining))]
    active = [index for index in range(len(remaining)) if remaining[index]]
    # Empty pipelines are restored only up to the required number of pipelines.
    empty = [index for index in range(len(remaining)) if not remaining[index]]
    active = sorted(active + empty[: max(0, faults + 1 - len(active))])

    while broken := [index for index in active if len(remaining[index]) < smallest]:
        # The pipeline that lacks the fewest nodes borrows first, so that spare nodes repair as many pipelines as
        # possible. A merged pipeline lacks fewer nodes than its parts, so it may borrow when they could not.
        index = min(broken, key=lambda i: (smallest - len(remaining[i]), i))
        if sum(max(0, len(remaining[i]) - smallest) for i in active) >= smallest - len(remaining[index]):
            while len(remaining[index]) < smallest:
                lender = max((i for i in active if len(remaining[i]) > smallest), key=lambda i: (len(remaining[i]), -i))
                node = remaining[lender].pop()
                remaining[index].append(node)
                change[lender] = "lent" if change[lender] == "kept" else change[lender]
                sources[index] += [pipeline_of[node]] if pipeline_of[node] not in sources[index] else []
            change[index] = "borrowed" if change[index] != "merged" else "merged"
            continue
        candidates = [i for i in active if i != index]
        partner = min(candidates, key=lambda i: (len(remaining[i]) >= smallest, len(remaining[i]), i))
        keeper, joined = sorted((index, partner))
        remaining[keeper] += remaining[joined]
        sources[keeper] += [source for source in sources[joined] if source not in sources[keeper]]
        change[keeper] = "merged"
        active.remove(joined)
    return [Reconfigured(tuple(remaining[index]), tuple(sources[index]), change[index]) for index in active]


def admit(
    pipelines: Sequence[Sequence[Node]],
    joined: Sequence[Node],
    node_counts: Sequence[int],
    *,
    max_pipelines: int | None = None,
) -> list[Reconfigured[Node]]:
    """Adds joined nodes to the pipelines, and changes as few existing pipelines as possible.

    Joined nodes, in order, form as many new pipelines of the smallest template's size as possible. The remaining nodes
    join the smallest pipelines, including new ones, one node at a time (ties: lower index). All other pipelines are
    kept, so that only layers for new nodes move. (In the paper nodes join only at a restart.) O(nodes * pipelines).

    Args:
        pipelines: nodes of each pipeline, as returned by `reconfigure`.
        joined: nodes that are in no pipeline.
        node_counts: sizes of the pipeline templates, consecutive.
        max_pipelines: most pipelines, such as the microbatches of a batch, since each pipeline needs one.

    Returns:
        The old pipelines in their order, then the new ones. Nodes for which no template has room are in none.

    Raises:
        ValueError: a node is given twice, or sizes are not consecutive.
    """
    smallest, largest = _smallest_and_largest(node_counts)
    _pipeline_of([*pipelines, joined])
    new_pipelines = len(joined) // smallest
    if max_pipelines is not None:
        new_pipelines = min(new_pipelines, max(0, max_pipelines - len(pipelines)))
    nodes = [*map(list, pipelines), *(list(joined[i * smallest : (i + 1) * smallest]) for i in range(new_pipelines))]
    for node in joined[new_pipelines * smallest :]:
        index = min(range(len(nodes)), key=lambda i: (len(nodes[i]), i), default=-1)
        if index < 0 or len(nodes[index]) >= largest:
            break
        nodes[index].append(node)
    old = [
        Reconfigured(tuple(new), (index,), "kept" if len(new) == len(pipeline) else "grown")
        for index, (new, pipeline) in enumerate(zip(nodes, pipelines))
    ]
    return old + [Reconfigured(tuple(members), (), "new") for members in nodes[len(pipelines) :]]


def regroup(
    pipelines: Sequence[Sequence[Node]],
    failed: Collection[Node],
    nodes: Sequence[Node],
    node_counts: Sequence[int],
    *,
    faults: int = 0,
    max_pipelines: int | None = None,
) -> list[tuple[Node, ...]] | None:
    """Pipelines after simultaneous failures and joins: `reconfigure`, then `admit`.

    Waiting nodes join after the repair, as whole new pipelines where possible. If the survivors alone are too few,
    waiting nodes first replace failed ones.

    Args:
        pipelines, failed, node_counts, faults: as in `reconfigure`. max_pipelines: as in `admit`.
        nodes: all live nodes, in order of arrival.

    Returns:
        The nodes of each pipeline; None if fewer than (faults + 1) times the smallest template's nodes are left.
    """
    smallest, largest = _smallest_and_largest(node_counts)
    lost, assigned = set(failed), {node for pipeline in pipelines for node in pipeline}
    spare = iter([node for node in nodes if node not in assigned and node not in lost])
    replaced = [[next(spare, node) if node in lost else node for node in pipeline] for pipeline in pipelines]
    for start in (pipelines, replaced):
        if sum(node not in lost for pipeline in start for node in pipeline) >= max(1, (faults + 1) * smallest):
            # A merged pipeline may be longer than the largest template: its surplus nodes wait.
            cut = [repaired.nodes[:largest] for repaired in reconfigure(start, lost, node_counts, faults=faults)]
            assigned = {node for pipeline in cut for node in pipeline}
            rest = [node for node in nodes if node not in assigned and node not in lost]
            return [repaired.nodes for repaired in admit(cut, rest, node_counts, max_pipelines=max_pipelines)]
    return None


def _smallest_and_largest(node_counts: Sequence[int]) -> tuple[int, int]:
    sizes = sorted(node_counts)
    if not sizes or sizes[0] < 1 or sizes != list(range(sizes[0], sizes[-1] + 1)):
        raise ValueError(f"node_counts must be consecutive positive integers, got {list(node_counts)}")
    return sizes[0], sizes[-1]


def _pipeline_of(pipelines: Sequence[Sequence[Node]]) -> dict[Node, int]:
    """The pipeline of each node."""
    pipeline_of: dict[Node, int] = {}
    for index, pipeline in enumerate(pipelines):
        for node in pipeline:
            if node in pipeline_of:
                raise ValueError(f"pipelines[{index}] repeats node {node!r}: use each node in one pipeline")
            pipeline_of[node] = index
    return pipeline_of
