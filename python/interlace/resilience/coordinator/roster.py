"""Roster: membership of the run and its next generation, without sockets or clocks.

Events of nodes: connected (`join`), ranks ready (`is_ready`), leaving (`leaves`), lost (`lost`), finished (`forget`).
`next` computes the generation that follows from them:

- First generation, when enough nodes are ready: the best combination of templates (`interlace.plan.instantiate`).
- After a loss: `interlace.plan.reconfigure` of the survivors, then `interlace.plan.admit` of waiting nodes. Waiting
  nodes replace lost ones if there are too few survivors.
- At a step boundary: the same for nodes that leave or join.
- Kind "save" if fewer than (faults + 1) * min_nodes nodes would be left: another failure could lose layers for good.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from interlace import plan
from interlace.resilience.errors import ResilienceError
from interlace.resilience.generation import Event, Generation, Kind, Node
from interlace.resilience.settings import Settings
from interlace.resilience.wire import from_table

Pipelines = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Templates:
    """Possible pipeline sizes: min_nodes, min_nodes + 1, ... nodes.

    min_nodes: fewest nodes whose memory holds the model. times: seconds per microbatch of a pipeline, for each size.
    microbatches: microbatches of a batch; each pipeline needs at least one.
    """

    min_nodes: int
    times: tuple[float, ...]
    microbatches: int

    @property
    def sizes(self) -> list[int]:
        return list(range(self.min_nodes, self.min_nodes + len(self.times)))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Templates:
        """Raises ValueError."""
        templates = from_table(cls, json.loads(text))
        if templates.min_nodes < 1 or templates.microbatches < 1 or not templates.times or min(templates.times) <= 0:
            raise ValueError(f"sizes, times and microbatches must be positive, got {templates}")
        return templates

    @classmethod
    def assumed(cls, settings: Settings) -> Templates:
        """Default without a proposal: stages of equal cost under 1F1B, with the paper's four microbatches per stage."""
        least = max(1, settings.min_nodes)
        counts = plan.node_counts(settings.nodes, settings.faults, least)
        times = tuple((1 + (n - 1) / (4 * n)) / n for n in map(int, counts))
        return cls(least, times, 4 * settings.nodes)


class Roster:
    """Nodes and their generation. Nodes for which no pipeline has room wait as spares."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.templates: Templates | None = None  # the ranks' proposal
        self.generation: Generation | None = None
        self.nodes: dict[str, Node] = {}  # live nodes, in order of arrival
        self.ready: list[str] = []  # in the order in which they became ready
        self.leaving: dict[str, Event] = {}
        self._lost: list[Event] = []
        self._joined: dict[str, Event] = {}

    def to_table(self) -> dict[str, Any]:
        """State as a table, without leaving nodes: they repeat their request to a restarted coordinator."""
        return {
            "settings": self.settings.to_table(),
            "templates": None if self.templates is None else self.templates.to_json(),
            "generation": None if self.generation is None else self.generation.to_json(),
            "nodes": [asdict(node) for node in self.nodes.values()],
            "ready": self.ready,
            "lost": [asdict(event) for event in self._lost],
            "joined": [asdict(event) for event in self._joined.values()],
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Roster:
        """Raises ValueError, KeyError, TypeError."""
        roster = cls(Settings.from_table(table["settings"]))
        roster.templates = None if table["templates"] is None else Templates.from_json(table["templates"])
        roster.generation = None if table["generation"] is None else Generation.from_json(table["generation"])
        nodes = [from_table(Node, node) for node in table["nodes"]]
        roster.nodes, roster.ready = {node.id: node for node in nodes}, [str(node) for node in table["ready"]]
        roster._lost = [from_table(Event, event) for event in table["lost"]]
        roster._joined = {event["node"]: from_table(Event, event) for event in table["joined"]}
        return roster

    def join(self, node: Node) -> None:
        self.nodes[node.id] = node

    def is_ready(self, node: str, time: float) -> None:
        """Records that all ranks of a node wait for a generation to join."""
        if node in self.nodes and node not in self.ready:
            self.ready.append(node)
            self._joined[node] = Event("join", node, time, f"from {self.nodes[node].host}")

    def leaves(self, event: Event) -> None:
        """Records that a node will leave at the next step boundary."""
        if event.node in self.nodes:
            self.leaving.setdefault(event.node, event)

    def lost(self, event: Event) -> bool:
        """Records a lost node; returns whether the generation ends.

        `event.node` is "" if a rank aborted the generation and no node is lost.
        """
        generation = self.generation
        ends = generation is not None and (not event.node or event.node in generation.nodes)
        self.forget(event.node)
        if ends:
            self._lost.append(event)
        return ends

    def forget(self, node: str) -> None:
        """Removes a node that has completed training or left."""
        self.nodes.pop(node, None)
        self.leaving.pop(node, None)
        self._joined.pop(node, None)
        if node in self.ready:
            self.ready.remove(node)

    def waiting(self) -> list[str]:
        """Nodes that are ready, not training and not leaving."""
        busy = set(self.generation.order()) if self.generation else set()
        return [node for node in self.ready if node not in busy and node not in self.leaving]

    def broken(self) -> bool:
        """True if the generation has ended because of a loss or failure."""
        return bool(self._lost)

    def wants_boundary(self) -> bool:
        """True if the generation should end at a step boundary: one of its nodes leaves, or a node can join."""
        if self.generation is None or self.generation.kind == "save":
            return False
        if any(node in self.leaving for node in self.generation.order()):
            return True
        return self._train_on(self.generation.pipelines, set()) != self.generation.pipelines

    def next(self, waited: float) -> Generation | None:
        """The next generation; None before the first one is due, or when no node is left.

        waited: seconds since the first node came. Raises ResilienceError if no pipelines can be made.
        """
        if self.generation is None:
            return self._first_generation(waited)
        before, lost = self.generation, {event.node for event in self._lost}
        going = [node for node in before.order() if node in self.leaving and node not in lost]
        cause = (*self._lost, *(self.leaving[node] for node in going))
        pipelines = self._train_on(before.pipelines, lost | set(going)) if before.kind == "train" else None
        still = [node for node in before.leaving if node in self.nodes]
        if pipelines is None:
            kept = tuple(tuple(node for node in pipeline if node not in lost) for pipeline in before.pipelines)
            return self._make("save", tuple(pipeline for pipeline in kept if pipeline), cause, still)
        return self._make("train", pipelines, cause, (*still, *going))

    def _first_generation(self, waited: float) -> Generation | None:
        ready, settings = self.waiting(), self.settings
        templates = self._templates()
        least = (settings.faults + 1) * templates.min_nodes
        if len(ready) < settings.nodes and (waited < settings.gather or len(ready) < least):
            return None
        if len(ready) < least:
            raise ResilienceError(
                f"{len(ready)} nodes cannot hold {settings.faults + 1} pipelines of {templates.min_nodes} nodes: raise "
                f"resilience.nodes to {least} or more, or lower resilience.faults"
            )
        problem = ValueError("")
        for count in range(len(ready), least - 1, -1):  # fewer only if no templates add up to all nodes
            sizes = [size for size in templates.sizes if size <= count - settings.faults * templates.min_nodes]
            try:
                instantiated = plan.instantiate(
                    sizes,
                    templates.times[: len(sizes)],
                    count,
                    faults=settings.faults,
                    microbatches=templates.microbatches,
                )
            except ValueError as error:
                problem = error
                continue
            return self._make("train", _assigned(ready, sizes, [int(n) for n in instantiated.counts]), (), ())
        raise ResilienceError(f"cannot form pipelines from {len(ready)} nodes: {problem}")

    def _train_on(self, pipelines: Pipelines, failed: set[str]) -> Pipelines | None:
        """Pipelines without the failed nodes and with waiting ones; None if too few nodes are left."""
        templates = self._templates()
        staying = [node for node in self.ready if node not in self.leaving]
        grouping = plan.regroup(
            pipelines,
            failed,
            staying,
            templates.sizes,
            faults=self.settings.faults,
            max_pipelines=templates.microbatches,
        )
        return None if grouping is None else tuple(grouping)

    def _make(
        self, kind: Kind, pipelines: Pipelines, cause: tuple[Event, ...], leaving: Sequence[str]
    ) -> Generation | None:
        self._lost.clear()
        order = [node for pipeline in pipelines for node in pipeline]
        if not order:
            return None
        before = self.generation
        joined = [self._joined.pop(node) for node in order if node in self._joined]
        number = 1 if before is None else before.number + 1
        nodes = {node: self.nodes[node] for node in (*order, *leaving)}
        if before is None:
            cause = (Event("start", "", max(event.time for event in joined)),)
        faults = self.settings.faults
        self.generation = Generation(number, pipelines, nodes, kind, (*cause, *joined), faults, tuple(leaving))
        return self.generation

    def _templates(self) -> Templates:
        return self.templates or Templates.assumed(self.settings)


def _assigned(nodes: Sequence[str], sizes: Sequence[int], counts: Sequence[int]) -> Pipelines:
    """Assigns nodes in order to `counts` pipelines of each of `sizes`."""
    rest, pipelines = list(nodes), []
    for size, count in zip(sizes, counts, strict=True):
        for _ in range(count):
            pipelines.append(tuple(rest[:size]))
            del rest[:size]
    return tuple(pipelines)
