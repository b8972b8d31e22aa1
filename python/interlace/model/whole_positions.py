"""Positions of whole models whose tokens have several each: Qwen2-VL's time, row and column (M-RoPE).

They are HuggingFace's own: get_rope_index of the model's base, asked for each sample alone, with the grids of its media
(`Media.about["grid_thw"]`). The mask keeps positions of its own, 0, 1, 2 ... in each sample.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from interlace.model.sample import Sample

GRID, SECONDS = "grid_thw", "second_per_grid_ts"


class RopeIndex:
    """sample -> int64 [L, 3]. base: HuggingFace's model with get_rope_index; tokens: placeholders of images and videos,
    as far as the model has them, in this order."""

    def __init__(self, base: Any, encoder: str, tokens: tuple[int, ...]):
        self.base, self.encoder, self.tokens = base, encoder, tokens
        self._takes_seconds = SECONDS in inspect.signature(base.get_rope_index).parameters

    def __call__(self, sample: Sample) -> Tensor:
        """Raises ValueError, naming the sample, for media without a grid and for two that touch."""
        ids, items = sample.input_ids, sample.media.get(self.encoder, [])
        if not items:
            return torch.arange(len(ids)).unsqueeze(1).expand(-1, 3)
        where = f"sample {sample.name!r}"
        kinds = torch.zeros_like(ids)
        for number, token in enumerate(self.tokens, start=1):
            kinds[ids == token] = number
        grids: dict[int, list[tuple[float, ...]]] = {}
        seconds: list[float] = []
        behind = -1
        for i, places in enumerate(kinds.nonzero().squeeze(1).split([item.tokens for item in items])):
            kind, first = int(kinds[places[0]]), int(places[0])
            if first == behind and int(kinds[first - 1]) == kind:
                raise ValueError(
                    f"{where}, {self.encoder} item {i} begins where the one before it ends, so they would get the "
                    "positions of one item: write a token between them, as the model's processor does"
                )
            behind = int(places[-1]) + 1
            if GRID not in items[i].about:
                raise ValueError(
                    f"{where}, {self.encoder} item {i} has no {GRID} in Media.about: no positions are known"
                )
            grids.setdefault(kind, []).append(items[i].about[GRID])
            seconds += items[i].about.get(SECONDS, ()) if kind == 2 else ()
        given: dict[str, Any] = {
            name: torch.tensor(grids[kind], dtype=torch.int64)
            for kind, name in ((1, "image_grid_thw"), (2, "video_grid_thw"))
            if kind in grids
        }
        if self._takes_seconds and seconds:
            if len(seconds) != len(grids.get(2, ())):
                raise ValueError(f"{where}: some of its videos have {SECONDS} in Media.about, others do not")
            given[SECONDS] = torch.tensor(seconds)
        try:
            positions = self.base.get_rope_index(ids[None], mm_token_type_ids=kinds[None].int(), **given)[0]
        except (RuntimeError, StopIteration, IndexError) as error:
            raise ValueError(f"{where}: its media and their {GRID} do not fit its placeholders: {error}") from None
        made: Tensor = positions[:, 0].T.contiguous()
        return made
