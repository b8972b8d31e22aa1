"""Generations: the nodes that train together and their pipelines, until the next failure, join or leave.

Plain data, sent as JSON from the coordinator to every rank. A generation ends when one of its nodes is lost. It also
ends at a step boundary when nodes join or leave. The next generation has a higher number. Survivors keep their
processes and get new rank numbers in the order of `Generation.order`, pipeline after pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from interlace.resilience.wire import from_table, one_of

Kind = Literal["train", "save"]
Noticed = Literal["start", "death", "hang", "join", "leave", "failure", "restart"]
Answer = Literal["commit", "regroup", "abort"]


class Decision(NamedTuple):
    """Result of the vote on a step in a generation."""

    generation: int
    step: int
    answer: Answer

    @classmethod
    def from_table(cls, values: Any) -> Decision:
        """Raises ValueError."""
        generation, step, answer = values
        return cls(int(generation), int(step), one_of(Answer, answer))


@dataclass(frozen=True)
class Node:
    """A node during the lifetime of its supervisor. id: unique per supervisor start. ranks: training processes."""

    id: str
    ranks: int
    host: str


@dataclass(frozen=True)
class Event:
    """Cause of a new generation.

    kind: "death", "hang", "join" or "leave" of a node; "start" of the run; "failure" when a rank aborted the generation
    and no node is lost; "restart" when the coordinator was restarted while ranks were forming a generation.
    node: id of the node; "" for "start", "failure" and "restart".
    time: time of detection, in seconds since the epoch on the coordinator's clock. detail: description.
    """

    kind: Noticed
    node: str
    time: float
    detail: str = ""


@dataclass(frozen=True)
class Generation:
    """Nodes that train together.

    number: 1, 2, ... pipelines: node ids of each pipeline, in the order of `interlace.plan.reconfigure`.
    nodes: all nodes in pipelines and in leaving.
    kind: "train", or "save" when too few nodes are left to train: they save their state, and the run stops.
    leaving: nodes that no longer train; layers are copied from them while they are alive.
    cause: events that led to this generation. faults: number of failures that must be survivable.
    """

    number: int
    pipelines: tuple[tuple[str, ...], ...]
    nodes: Mapping[str, Node]
    kind: Kind = "train"
    cause: tuple[Event, ...] = ()
    faults: int = 1
    leaving: tuple[str, ...] = ()

    def order(self) -> tuple[str, ...]:
        """Ids of the training nodes, pipeline after pipeline. Ranks are numbered in this order."""
        return tuple(node for pipeline in self.pipelines for node in pipeline)

    @property
    def world(self) -> int:
        """Number of training ranks."""
        return sum(self.nodes[node].ranks for node in self.order())

    @property
    def sources(self) -> int:
        """Number of ranks that layers can be copied from: training ranks, followed by ranks of leaving nodes."""
        return self.world + sum(self.nodes[node].ranks for node in self.leaving)

    def ranks_of(self, node: str) -> range:
        """Rank numbers of a node; those of leaving nodes start at `world`. Raises KeyError for an unknown node."""
        first = 0
        for each in (*self.order(), *self.leaving):
            if each == node:
                return range(first, first + self.nodes[each].ranks)
            first += self.nodes[each].ranks
        raise KeyError(f"generation {self.number} has no node {node!r}")

    def to_json(self) -> str:
        table = asdict(self)
        table["nodes"] = [asdict(node) for node in self.nodes.values()]
        return json.dumps(table)

    @classmethod
    def from_json(cls, text: str | bytes) -> Generation:
        """Raises ValueError with the reason."""
        generation = from_table(cls, json.loads(text))
        nodes = [from_table(Node, each) for each in generation.nodes]  # a list in JSON
        generation = replace(generation, nodes={node.id: node for node in nodes})
        missing = {*generation.order(), *generation.leaving} - set(generation.nodes)
        if missing:
            raise ValueError(
                f"generation {generation.number} refers to nodes that it does not describe: {sorted(missing)}"
            )
        return generation
