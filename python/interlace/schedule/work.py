"""What one microbatch demands of a stage graph: which copies run, and what each waits for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from interlace.schedule.graph import Node, StageGraph


@dataclass(frozen=True)
class Work:
    """The work of a microbatch in which `present` modules run.

    forward: copies that run FORWARD, producers first; backward: copies that run BACKWARD, consumers first.
    inputs[node]: the copies whose outputs its FORWARD reads.
    gradients[node]: the copies whose BACKWARD gives a gradient of its output (empty: its own loss does).
    """

    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    inputs: dict[Node, tuple[Node, ...]]
    gradients: dict[Node, tuple[Node, ...]]

    @classmethod
    def of(cls, graph: StageGraph, present: frozenset[str]) -> Work:
        stages = graph.stages
        forward = tuple(node for node in graph.nodes if stages[node[0]].module in present)
        inputs: dict[Node, list[Node]] = {node: [] for node in forward}
        readers: dict[Node, list[Node]] = {node: [] for node in forward}
        for producer, consumer in graph.copy_edges:
            if producer in inputs and consumer in inputs:
                inputs[consumer].append(producer)
                readers[producer].append(consumer)

        # A stage that only passes gradients on has nothing to do if nobody before it wants one this time.
        wanted: dict[int, bool] = {}
        for node in forward:
            stage = stages[node[0]]
            passed = any(wanted[producer[0]] for producer in inputs[node])
            wanted[node[0]] = stage.backward and (passed or not stage.pass_through)

        gradients: dict[Node, tuple[Node, ...]] = {}
        for node in reversed(forward):
            if not wanted[node[0]]:
                continue
            copies = [(node[0], rank) for rank in stages[node[0]].ranks]
            received = tuple(reader for reader in readers[node] if reader in gradients)
            if received:
                gradients[node] = received
            elif node == copies[0] and not any(r in gradients for copy in copies for r in readers[copy]):
                gradients[node] = ()  # nobody reads any copy: the stage ends in a loss of its own
        return cls(
            forward,
            tuple(node for node in reversed(forward) if node in gradients),
            {node: tuple(producers) for node, producers in inputs.items()},
            gradients,
        )


def works(graph: StageGraph, presence: Sequence[Collection[str]]) -> list[Work]:
    """The Work of every microbatch. Raises ValueError for unknown modules and for a step without microbatches."""
    if not presence:
        raise ValueError("a step needs at least one microbatch: presence is empty")
    known = frozenset(graph.modules)
    cache: dict[frozenset[str], Work] = {}
    found = []
    for microbatch, names in enumerate(presence):
        if isinstance(names, str):
            raise ValueError(f"presence[{microbatch}] is the string {names!r}; give a set of module names")
        present = frozenset(names)
        if not present <= known:
            unknown = sorted(present - known)[0]
            raise ValueError(f"presence[{microbatch}] names {unknown!r}; modules: {', '.join(graph.modules)}")
        if present not in cache:
            cache[present] = Work.of(graph, present)
        found.append(cache[present])
    return found
