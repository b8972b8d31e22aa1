"""Distribution of chunks among the context-parallel ranks of their lanes; see `interlace.parallel.context`.

Every rank can compute the owner rank of every token of every chunk of the language model. So a rank that sends features
to the chunk sends each rank only those of its own placeholders.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from interlace.balance import TokenShards
from interlace.layout import Layout
from interlace.model import IGNORE, MultimodalModel, Sample
from interlace.model.inputs.placeholders import blank_id, is_placeholder
from interlace.model.multimodal import LANGUAGE_MODEL
from interlace.parallel.context import Context, Share, assign_tokens
from interlace.parallel.route import Routes
from interlace.run.lanes import Place
from interlace.run.tables.table import Samples
from interlace.schedule import StepTable


class Deals:
    """The distributions of one step, for all ranks of this process. order: of `interlace.parallel.context.ORDERS`.

    Raises ValueError for a sample that a language model with context parallelism cannot process.
    """

    def __init__(self, mllm: MultimodalModel, layout: Layout, table: StepTable, samples: Samples, order: str) -> None:
        self._mllm, self._table, self._samples, self._order = mllm, table, samples, order
        self.ranks = layout.spec(LANGUAGE_MODEL).cp
        self._made: dict[int, tuple[TokenShards, dict[str, NDArray[np.int64]]]] = {}
        self._making = threading.Lock()
        limit = mllm.language_settings.limit
        if self.ranks > 1 and limit is not None:
            for i, sample in enumerate(samples):
                if len(sample) > limit:
                    raise ValueError(
                        f"sample {i} has {len(sample)} tokens: beyond {limit} tokens this language model's rotary "
                        f"frequencies depend on the longest sample, which cp = {self.ranks} does not support: shorten "
                        "the sample, or use cp = 1 for language_model"
                    )

    def inputs(self, module: str, chunk: int, place: Place, collated: dict[str, Any]) -> dict[str, Any]:
        """The part of a chunk's collated inputs for the rank at `place`; on the device of the inputs."""
        if place.cp.world == 1:
            return collated
        if module != LANGUAGE_MODEL:
            return {**collated, "context": Context(place.cp, self._order)}
        shards, _ = self._deal(chunk)
        share = Share.of(collated["mask"], shards, place.cp, self._mllm.language_settings.backend)
        return {
            "input_ids": share.shard(collated["input_ids"], pad=blank_id(self._mllm.placeholders)),
            "labels": share.shard(collated["labels"], pad=IGNORE),
            "position_ids": share.shard(collated["position_ids"]),
            "plan": share.plan,
            "attend": share.attend,
        }

    def routes(self, device: torch.device) -> Routes:
        """The routes of the step's table: each rank of the language model gets the rows of its own placeholders."""
        return Routes(self._table, device, ranks=self.ranks, owners=self._owners if self.ranks > 1 else None)

    def _owners(self, chunk: int, encoder: str) -> NDArray[np.int64]:
        return self._deal(chunk)[1][encoder]

    def _deal(self, chunk: int) -> tuple[TokenShards, dict[str, NDArray[np.int64]]]:
        with self._making:  # made once for all ranks of this process
            if chunk not in self._made:
                samples = cast(list[Sample], [self._samples[i] for i in self._table.chunks[chunk].samples])
                collated = self._mllm.collate_module(LANGUAGE_MODEL, samples)
                shards = assign_tokens(collated["mask"], self.ranks, self._order, collated["plan"])
                ids = collated["input_ids"]
                owner = np.repeat(shards.rank_of_block, shards.block, axis=1)[:, : ids.shape[1]]
                placeholders = self._mllm.placeholders.items()
                owners = {n: owner[is_placeholder(ids, token).numpy()].astype(np.int64) for n, token in placeholders}
                self._made[chunk] = shards, owners
            return self._made[chunk]
