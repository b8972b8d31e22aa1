"""M-RoPE positions of whole models: the time, row and column of a token (Qwen2-VL and its relatives).

They come from get_rope_index of HuggingFace's base model, called for each sample alone. It takes the grids of the
sample's media (`Media.about["grid_thw"]`). A model that counts time in seconds (Qwen2.5-VL) also takes the seconds from
one frame of a video's grid to the next (`Media.about["second_per_grid_ts"]`, one number). The mask keeps its own
positions, 0, 1, 2 ... in each sample.

In transformers 5.0 to 5.24, text after a media item continues after the item's rows and columns only. So text after a
long video gets positions inside the video. `_past_the_media` moves it behind the video, as in transformers 4 and in the
families' own code.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interlace.model.sample import Media, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRID, SECONDS = "grid_thw", "second_per_grid_ts"
VIDEO = 2  # type of video tokens in get_rope_index


class RopeIndex:
    """Positions of a sample: sample -> int64 [L, 3].

    base: HuggingFace's model with get_rope_index.
    tokens: placeholders of images and videos, in this order, if the model has them.
    """

    def __init__(self, base: PreTrainedModel, encoder: str, tokens: tuple[int, ...]):
        self.base, self.encoder, self.tokens = base, encoder, tokens
        self._takes_seconds = SECONDS in inspect.signature(base.get_rope_index).parameters

    def __call__(self, sample: Sample) -> Tensor:
        """Raises ValueError, with the sample's name, for media without a grid and for adjacent items."""
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
                    f"{where}, {self.encoder} item {i} directly follows another item, so both would get the positions "
                    "of one item: write a token between them, as the model's processor does"
                )
            behind = int(places[-1]) + 1
            if GRID not in items[i].about:
                raise ValueError(
                    f"{where}, {self.encoder} item {i} has no {GRID} in Media.about, so its positions "
                    "are unknown: add it"
                )
            grids.setdefault(kind, []).append(items[i].about[GRID])
            if self._takes_seconds and kind == VIDEO:
                seconds.append(_seconds_of(items[i], f"{where}, {self.encoder} item {i}"))
        given: dict[str, Any] = {
            name: torch.tensor(grids[kind], dtype=torch.int64)
            for kind, name in ((1, "image_grid_thw"), (VIDEO, "video_grid_thw"))
            if kind in grids
        }
        if seconds:
            given[SECONDS] = torch.tensor(seconds)
        try:
            positions = self.base.get_rope_index(ids[None], mm_token_type_ids=kinds[None].int(), **given)[0]
        except (RuntimeError, StopIteration, IndexError) as error:
            raise ValueError(f"{where}: its media and their {GRID} do not fit its placeholders: {error}") from None
        return _past_the_media(positions[:, 0], kinds).T.contiguous()


def _past_the_media(positions: Tensor, kinds: Tensor) -> Tensor:
    """Shift `positions` [3, L] so that tokens after a media item start behind the item's largest position.

    kinds: [L], 0 for text, another number for the tokens of media. A larger gap made by the model is kept.
    """
    lengths = kinds.unique_consecutive(return_counts=True)[1].tolist()
    pieces: list[Tensor] = []
    shift, behind_media = 0, False
    for piece, kind in zip(positions.split(lengths, dim=1), kinds.split(lengths)):
        if behind_media:
            shift += max(0, int(pieces[-1].max()) + 1 - int(piece.min()) - shift)
        pieces.append(piece + shift)
        behind_media = bool(kind[0])
    return torch.cat(pieces, dim=1)


def _seconds_of(item: Media, where: str) -> float:
    """Seconds per frame of the grid of a video. Raises ValueError if they are not given."""
    given = item.about.get(SECONDS, ())
    if len(given) == 1 and given[0] > 0:
        return float(given[0])
    if given or item.about[GRID][0] > 1:  # a single frame has no time step
        raise ValueError(
            f"{where} is a video and its Media.about has {SECONDS} = {given or None}: pass (seconds,), the time from "
            "one frame of its grid to the next, from which this model computes positions"
        )
    return 1.0
