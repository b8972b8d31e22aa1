"""Sample and Media: what datasets yield and collation packs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

IGNORE = -100
"""Label of a position without a target."""

COPIES = 3
"""Positions that labels must merely repeat before they are refused: fewer can be chance where labels are no next tokens
(a class per token, the clean ids of a noisy text)."""


@dataclass
class Media:
    """One image or clip.

    shape:  image (3, H, W) in pixels; audio (mel bins, frames)
    tokens: language-model tokens (= placeholders in the text) that it becomes after encoder and projector
    data:   floating tensor of `shape`, normalised as the encoder wants it; None on ranks that do not run the encoder,
            which need shapes only

    Raises ValueError or TypeError when these contradict each other.
    """

    shape: tuple[int, ...]
    tokens: int
    data: Tensor | None = None

    def __post_init__(self) -> None:
        self.shape = tuple(int(size) for size in self.shape)
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"media of shape {self.shape} is empty: every dimension must be at least 1")
        if self.tokens < 1:
            raise ValueError(f"media of shape {self.shape} has tokens={self.tokens}; every item becomes at least 1")
        if self.data is not None:
            if tuple(self.data.shape) != self.shape:
                raise ValueError(f"media says shape {self.shape} but its data has {tuple(self.data.shape)}")
            if not self.data.is_floating_point():
                raise TypeError(f"media data is {self.data.dtype}; scale and normalise it to a floating dtype first")


@dataclass
class Sample:
    """One training sample, uncollated.

    input_ids: int64 [L]; each media item appears as `tokens` consecutive copies of its modality's placeholder id
    labels:    int64 [L], already shifted: labels[t] is the id wanted after input_ids[t]; IGNORE (-100) = no target.
               Labels that lie beside their own ids, as HuggingFace's models want them: Sample.from_unshifted
    media:     modality -> its items in order of appearance in input_ids
    name:      for messages

    Raises ValueError or TypeError when these contradict each other.
    """

    input_ids: Tensor
    labels: Tensor
    media: dict[str, list[Media]] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        for what, ids in (("input_ids", self.input_ids), ("labels", self.labels)):
            if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
                got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
                raise TypeError(f"sample {self.name!r}: {what} must be an int64 tensor [length], got {got}")
        if len(self.input_ids) == 0:
            raise ValueError(f"sample {self.name!r} has no tokens")
        if len(self.labels) != len(self.input_ids):
            raise ValueError(
                f"sample {self.name!r} has {len(self.input_ids)} input_ids but {len(self.labels)} labels: give every "
                f"position a target, {IGNORE} where there is none"
            )
        refuse_copies(f"sample {self.name!r}", [(self.input_ids, self.labels)], warn=True)

    @classmethod
    def from_unshifted(
        cls,
        input_ids: Tensor,
        labels: Tensor | None = None,
        media: Mapping[str, Sequence[Media]] | None = None,
        name: str = "",
    ) -> Sample:
        """A Sample of labels that lie beside their own ids, as HuggingFace's models want them.

        labels[t] is input_ids[t], or IGNORE for no target; None: every id is one.
        """
        labels = shift_labels(input_ids if labels is None else labels)
        return cls(input_ids, labels, {key: list(items) for key, items in (media or {}).items()}, name)

    def __len__(self) -> int:
        return len(self.input_ids)


def shift_labels(labels: Tensor) -> Tensor:
    """Labels that lie beside their own ids, int64 [..., L] with one sequence per row -> each beside the id before it.

    Raises ValueError for a row without tokens.
    """
    if labels.dim() == 0 or labels.shape[-1] == 0:
        raise ValueError(f"labels {list(labels.shape)} hold no tokens: give at least one per row")
    return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], IGNORE)], dim=-1)


def refuse_copies(where: str, rows: Iterable[tuple[Tensor, Tensor]], *, warn: bool = False) -> None:
    """Raise ValueError if labels repeat input_ids instead of being what follows them.

    rows: pairs of input_ids and labels, int64 [..., L]. Labels repeat if each target, in all rows, is the id of its own
    position. Only a position whose next id is another one tells the two readings apart, so texts of one repeated token
    pass. Fewer than COPIES such positions are warned of, if at all.
    """
    copies = 0
    for ids, labels in rows:
        valid = labels != IGNORE
        if not torch.equal(labels[valid], ids[valid]):
            return
        copies += int((valid[..., :-1] & (ids[..., :-1] != ids[..., 1:])).sum())
    message = (
        f"{where}: labels repeat input_ids at every position with a target, so a model would learn to copy. labels[t] "
        "must be the id that follows input_ids[t]: use Sample.from_unshifted(input_ids, labels), or "
        "interlace.model.shift_labels(labels)"
    )
    if copies >= COPIES:
        raise ValueError(message)
    if copies and warn:
        warnings.warn(message, stacklevel=4)
