"""Parts of samples that each rank needs, from the step's table; equal on every rank.

A part of a sample is its text (ids and labels) or its media of one encoder. All ranks of the language model's replica
that has the sample need its text. With context parallelism the ranks that send features to it need the text too,
because they send each rank only the features of its own placeholders. Ranks of the first stage of the encoder's replica
need the media.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from interlace.balance.rearrange import AllToAllPlan, all_to_all_plan
from interlace.layout import Layout
from interlace.model.naming import LANGUAGE_MODEL
from interlace.run.tables.table import Samples
from interlace.schedule import StepTable


@dataclass(frozen=True, eq=False)
class Needs:
    """parts: their names; the text is named LANGUAGE_MODEL. rows: int64 [n, 3], sorted and unique: index of a sample in
    the batch, index of a part, a rank that needs it."""

    parts: tuple[str, ...]
    rows: NDArray[np.int64]

    def transfers(
        self, readers: Sequence[int], sizes: NDArray[np.int64], ranks: int
    ) -> tuple[AllToAllPlan, NDArray[np.int64]]:
        """The exchange of parts that are not on the rank that needs them, in bytes, and the rows of its items.

        readers: for each sample, the rank that has read it. sizes: int64 [samples, parts], bytes.
        """
        source = np.asarray(readers, np.int64)[self.rows[:, 0]]
        away = source != self.rows[:, 2]
        items = self.rows[away]
        return all_to_all_plan(source[away], items[:, 2], ranks, sizes=sizes[items[:, 0], items[:, 1]]), items

    def of_rank(self, rank: int) -> dict[int, set[str]]:
        """Sample -> the parts of it that a rank needs."""
        needs: dict[int, set[str]] = {}
        for sample, part, _ in self.rows[self.rows[:, 2] == rank].tolist():
            needs.setdefault(sample, set()).add(self.parts[part])
        return needs


def needs_of(layout: Layout, table: StepTable, samples: Samples) -> Needs:
    """The Needs of a step with this table; its parts are the layout's modules in their order."""
    parts = tuple(layout.modules)
    needed: list[NDArray[np.int64]] = []

    def need(members: NDArray[np.int64], part: str, ranks: Sequence[int]) -> None:
        each = np.array(sorted(set(ranks)), np.int64)
        rows = np.empty((len(members) * len(each), 3), np.int64)
        rows[:, 0], rows[:, 1] = np.repeat(members, len(each)), parts.index(part)
        rows[:, 2] = np.tile(each, len(members))
        needed.append(rows)

    for chunk in table.chunks:
        stages = layout.pipelines(chunk.module)[chunk.replica].stages
        members = chunk.samples.astype(np.int64)
        if chunk.module == LANGUAGE_MODEL:
            need(members, LANGUAGE_MODEL, [rank for stage in stages for rank in stage.ranks])
        else:
            filled = [i for i in members.tolist() if samples[i].media.get(chunk.module)]
            need(np.array(filled, np.int64), chunk.module, stages[0].ranks)
    if layout.spec(LANGUAGE_MODEL).cp > 1:
        for producer, reader in table.links.tolist():
            sender = table.chunks[producer]
            last = layout.pipelines(sender.module)[sender.replica].stages[-1]
            need(table.chunks[reader].samples.astype(np.int64), LANGUAGE_MODEL, last.ranks)
    rows = np.unique(np.concatenate(needed), axis=0)
    return Needs(parts, rows)
