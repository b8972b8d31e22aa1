"""Dispatch: samples to replicas of each module (`train.balance`), from lengths alone (OrchMLLM 5 and 6).

- "none": samples stay as drawn: replica r of dp has the r-th part of the batch, for every module
- "llm": balanced for the language model; encoders follow it if they have equally many replicas
- "per_module": each module by the costs of its own samples, each batch of an encoder on the node that reads most of it

Each phase (module) is balanced separately (`balance.post_balance`). The output of an encoder goes directly to the
replica that reads it, in one exchange instead of two (OrchMLLM section 6): the edge of the StepTable is that
composition. Microbatches are made inside a replica afterwards (`run/tables/assign.py`). Every rank computes the same
result by itself: costs consist of whole numbers, processed in one order by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from interlace import balance
from interlace.layout import Layout
from interlace.model import MultimodalModel
from interlace.model.rows import ROWS
from interlace.run.tables.table import Lengths
from interlace.run.tables.work import Work
from interlace.schedule import StepTable

Balance = Literal["none", "llm", "per_module"]
BALANCES: tuple[Balance, ...] = get_args(Balance)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Phase:
    """Cost of a batch of a module, in the terms of `balance.post_balance`: its batching and quadratic.

    per_row: tokens inside the module for each row that it outputs. in_items: a token attends only to its own item.
    `convolution` is not needed: padding of clips for an encoder's convolutions is removed before its first layer.
    """

    per_row: float = 1.0
    quadratic: float = 0.0
    batching: Literal["packed", "padded"] = "packed"
    in_items: bool = False

    def lengths(self, rows: Ints) -> Ints:
        """int64 [n], tokens inside the module for samples with these numbers of rows."""
        return np.rint(rows * self.per_row).astype(np.int64)

    def how(self, items: Ints) -> dict[str, Any]:
        """Further arguments of `post_balance` and `batch_costs` for samples with these numbers of items."""
        facts = {"batching": self.batching, "quadratic": self.quadratic}
        several = self.in_items and self.batching == "packed" and bool((items > 1).any())
        return facts | ({"items": np.maximum(items, 1)} if several else {})


def phases_of(mllm: MultimodalModel, work: Work) -> dict[str, Phase]:
    """Module -> its Phase, from the counted work of its layers and the model's batching.

    Layers of encoders never process padding; those of a language model that takes one row per sample do.
    """
    packing, phases = mllm.packing, {}
    for name, module in work.modules.items():
        token, pair = (float(each) for each in (module.forward + module.backward).sum(0))
        if module.causal:  # token and half a pair per token, half a pair per token squared
            token, pair = token + pair / 2, pair / 2
        batching: Literal["packed", "padded"] = "padded" if module.causal and packing[name] == ROWS else "packed"
        phases[name] = Phase(module.per_row, pair / token if token > 0 else 0.0, batching, in_items=not module.causal)
    return phases


@dataclass(frozen=True, eq=False)
class Dispatcher:
    """Assigns the samples of a run's batches to replicas.

    phases: module -> Phase. ranks_per_node: number of consecutive ranks on a node; None: all are on one node.
    """

    method: Balance
    layout: Layout
    phases: Mapping[str, Phase]
    ranks_per_node: int | None = None
    _nodes: dict[str, Ints] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {self.ranks_per_node}: it must be at least 1")
        size = self.ranks_per_node or self.layout.world
        *_, language_model = self.layout.modules
        for name in self.layout.modules:  # rows leave an encoder's last stage and enter the language model's first
            stages = [p.stages[0 if name == language_model else -1] for p in self.layout.pipelines(name)]
            self._nodes[name] = np.array([stage.lane.ranks[0] // size for stage in stages], np.int64)

    def __call__(self, lengths: Lengths, llm: Ints | None = None) -> dict[str, Ints]:
        """Module -> int64 [n], the replica of each sample of a batch; without encoders that follow the language model.

        -1: the sample has no item of the encoder. llm: the replicas of the language model, if these are given.
        """
        *encoders, language_model = self.layout.modules
        dp = {name: self.layout.spec(name).dp for name in self.layout.modules}
        n = len(lengths)
        replica: dict[str, Ints] = {}
        if llm is not None:
            replica[language_model] = llm
        elif self.method == "none":
            replica[language_model] = _parts(n, dp[language_model])
        else:
            replica[language_model] = self._dealt(language_model, lengths, np.arange(n))
        for name in encoders:
            used = np.flatnonzero(lengths.rows[name])
            if self.method == "llm" or not len(used):
                continue
            homes = np.full(n, -1, np.int64)
            if self.method == "per_module":
                batch = self._dealt(name, lengths, used)
                readers = replica[language_model][used]
                homes[used] = self._placed(name, batch, readers, lengths.rows[name][used])[batch]
            elif llm is None:
                homes[used] = _parts(n, dp[name])[used]
            else:
                homes[used] = _beside(llm[used], dp[language_model], dp[name])
            replica[name] = homes
        return replica

    def loads(self, module: str, lengths: Lengths, replica: Ints) -> Floats:
        """float64 [dp], cost of each replica of a module. replica: int64 [n], of each sample; -1: no replica."""
        rows, items = lengths.of_module(module)
        used = np.flatnonzero((replica >= 0) & (rows > 0))
        phase = self.phases[module]
        return balance.batch_costs(
            phase.lengths(rows[used]), replica[used], self.layout.spec(module).dp, **phase.how(items[used])
        )

    def as_drawn(self, lengths: Lengths) -> dict[str, Floats]:
        """Module -> float64 [dp], the loads of "none"."""
        return {
            name: self.loads(name, lengths, _parts(len(lengths), self.layout.spec(name).dp))
            for name in self.layout.modules
        }

    def computed(self, table: StepTable, lengths: Lengths) -> dict[str, Floats]:
        """Module -> float64 [dp], the loads of a step with this table over samples of these lengths."""
        return {name: self.loads(name, lengths, _replica_of(table, name, len(lengths))) for name in self.layout.modules}

    def crossing(self, table: StepTable) -> tuple[int, int]:
        """Rows that the language model reads from another rank, and the number of these from another node.

        A lane of several ranks counts as its first rank, and copies count as the first lane.
        """
        moved = between = 0
        *_, language_model = self.layout.modules
        reads = np.array([p.stages[0].lane.ranks[0] for p in self.layout.pipelines(language_model)])
        for edge in table.edges:
            makes = np.array([p.stages[-1].lane.ranks[0] for p in self.layout.pipelines(edge.producer)])
            if not len(edge.pieces):
                continue
            of_chunk = np.array([chunk.replica for chunk in table.chunks])
            source, reader = of_chunk[edge.pieces[:, 0]], of_chunk[edge.pieces[:, 2]]
            rows = edge.pieces[:, 4].astype(np.int64)
            moved += int(rows[makes[source] != reads[reader]].sum())
            between += int(rows[self._nodes[edge.producer][source] != self._nodes[language_model][reader]].sum())
        return moved, between

    def _dealt(self, module: str, lengths: Lengths, used: Ints) -> Ints:
        rows, items = lengths.of_module(module)
        phase = self.phases[module]
        dp = self.layout.spec(module).dp
        return balance.post_balance(phase.lengths(rows[used]), dp, **phase.how(items[used])).astype(np.int64)

    def _placed(self, encoder: str, batch: Ints, reader: Ints, rows: Ints) -> Ints:
        """int64 [dp], the replica of an encoder that takes each batch, chosen for little traffic between nodes.

        reader: the replica of the language model that reads each sample. Batches keep their order if everything is on
        one node, and if nodes have unequal numbers of replicas of the encoder.
        """
        *_, language_model = self.layout.modules
        reading = self._nodes[language_model]
        nodes, own = np.unique(self._nodes[encoder], return_inverse=True)
        dp, each = len(own), len(own) // len(nodes)
        stays = np.arange(dp)
        if dp == 1 or (own != stays // each).any():
            return stays
        if dp == each:  # one node: a rank with both modules encodes what it reads itself
            if len(reading) != dp or not self._together(encoder, language_model):
                return stays
            each = 1
        if (each == 1 and len(nodes) == 1) or (len(reading) == dp and np.array_equal(reading, self._nodes[encoder])):
            return balance.nodewise_placement_of_items(reader, batch, rows, dp, each).astype(np.int64)
        # Rows that a node reads, divided over its replicas of the encoder; rows for other nodes cross in any case.
        node = np.searchsorted(nodes, reading)
        node[~np.isin(reading, nodes)] = -1
        here = node[reader] >= 0
        among = np.bincount(node[reader[here]] * dp + batch[here], rows[here], len(nodes) * dp)
        volume = np.repeat(among.reshape(-1, dp) / each, each, axis=0)
        return balance.nodewise_placement(volume, each).astype(np.int64)

    def _together(self, encoder: str, language_model: str) -> bool:
        """Whether replicas of the same number hand over rows on one rank."""
        pairs = zip(self.layout.pipelines(encoder), self.layout.pipelines(language_model), strict=True)
        return all(mine.stages[-1].lane.ranks[0] == its.stages[0].lane.ranks[0] for mine, its in pairs)


def dispatcher_of(
    method: Balance,
    layout: Layout,
    mllm: MultimodalModel,
    *,
    recompute: bool = False,
    ranks_per_node: int | None = None,
) -> Dispatcher | None:
    """The Dispatcher for a model on a layout; None if no module has several replicas. recompute: see `Work.of`."""
    if all(spec.dp == 1 for spec, _ in layout.modules.values()):
        return None
    return Dispatcher(method, layout, phases_of(mllm, Work.of(mllm, recompute=recompute)), ranks_per_node)


def _parts(n: int, dp: int) -> Ints:
    """int64 [n]: the replica of each position in a batch that is cut into `dp` equal parts."""
    return np.arange(n) * dp // max(n, 1)


def _beside(replica: Ints, count: int, dp: int) -> Ints:
    """Map each sample's replica (of `count`) to the corresponding replica of `dp`; samples of one replica are spread
    evenly."""
    order = np.argsort(replica, kind="stable")
    members = np.bincount(replica, minlength=count)
    place = np.empty(len(replica), np.int64)
    place[order] = np.arange(len(replica)) - np.repeat(np.cumsum(members) - members, members)
    size = np.maximum(members[replica], 1)
    return (replica * size + place) * dp // (size * count)


def _replica_of(table: StepTable, module: str, n: int) -> Ints:
    """int64 [n], the replica of each sample in a table; -1 if the module does not have the sample."""
    replica = np.full(n, -1, np.int64)
    for chunk in table.chunks:
        if chunk.module == module:
            replica[chunk.samples] = chunk.replica
    return replica
