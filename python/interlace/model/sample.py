"""Sample and Media: items of datasets, packed by collation. SampleOutline: a sample without its tokens."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
"""Label of a position without a target."""

COPIES = 3
"""Number of copied positions from which labels are refused. A few may be chance if labels are not next tokens (a
class per token, the clean ids of a noisy text).
"""


class Media:
    """One image, video or clip.

    shape:  in the encoder's format: image (3, H, W) in pixels, (patches, numbers of a patch) or (tiles, 3, H, W); audio
            (mel bins, frames) or (samples,). docs/encoders.md has a table
    tokens: number of language-model tokens (= placeholders in the text) after encoder and projector
    data:   floating tensor of `shape`, normalised for the encoder; None on ranks that do not run the encoder and need
            only shapes
    about:  additional numbers about the item for the encoder, available on all ranks: {"grid_thw": (1, 16, 24)}
    load:   alternative to data: a function that returns it. The first access to `data`, from any thread, calls it and
            keeps the result. After an error, the next access calls it again

    Raises ValueError or TypeError if these contradict each other. The result of `load` is checked after the call.
    """

    __slots__ = ("_data", "_load", "_lock", "about", "shape", "tokens")

    def __init__(
        self,
        shape: Sequence[int],
        tokens: int,
        data: Tensor | None = None,
        load: Callable[[], Tensor] | None = None,
        about: Mapping[str, tuple[float, ...]] | None = None,
    ) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.tokens = tokens
        self.about = {key: tuple(numbers) for key, numbers in (about or {}).items()}
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"media of shape {self.shape} is empty: every dimension must be at least 1")
        if tokens < 1:
            raise ValueError(f"media of shape {self.shape} has tokens={tokens}; it must be at least 1")
        if data is not None and load is not None:
            raise ValueError(
                f"media of shape {self.shape} has data and a function that loads them: pass one of the two"
            )
        self._data, self._load = None if data is None else self._checked(data), load
        self._lock = threading.Lock() if load is not None else None

    @property
    def data(self) -> Tensor | None:
        """The item's tensor, loaded on first access; None if there is no data."""
        if self._lock is not None and self._data is None:
            with self._lock:
                if self._load is not None:
                    self._data, self._load = self._checked(self._load()), None
        return self._data

    @property
    def loaded(self) -> bool:
        """True if the data is in memory."""
        return self._data is not None

    @property
    def load(self) -> Callable[[], Tensor] | None:
        """Function that loads the data; None if the data is in memory or absent."""
        return self._load

    def without_data(self) -> Media:
        """The same item with its shape but without its data."""
        return Media(self.shape, self.tokens, about=self.about)

    def _checked(self, data: Tensor) -> Tensor:
        if tuple(data.shape) != self.shape:
            raise ValueError(f"media has shape {self.shape} but its data has {tuple(data.shape)}")
        if not data.is_floating_point():
            raise TypeError(f"media data is {data.dtype}; scale and normalise it to a floating dtype first")
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and other processes get the data itself: they may be unable to load it.
        return Media, (self.shape, self.tokens, self.data, None, self.about)

    def __repr__(self) -> str:
        state = "loaded" if self.loaded else "not loaded" if self._load is not None else "without data"
        return f"Media(shape={self.shape}, tokens={self.tokens}, {state})"


@dataclass
class Sample:
    """One training sample, uncollated.

    input_ids: int64 [L]; each media item appears as `tokens` consecutive copies of its modality's placeholder id
    labels:    int64 [L], already shifted: labels[t] is the target after input_ids[t]; IGNORE (-100) = no target.
               For unshifted labels (HuggingFace's convention), use Sample.from_unshifted
    media:     encoder name -> its items in order of appearance in input_ids; images and videos of one encoder are in
               one list. Every rank needs ids, labels and shapes of all samples. Only ranks that read an item need its
               data
    name:      for messages
    digest:    64-bit hash of ids and labels, set by the rank that read the sample from a stream. With it, ranks compare
               samples that only some of them hold

    Raises ValueError or TypeError if these contradict each other.
    """

    input_ids: Tensor
    labels: Tensor
    media: dict[str, list[Media]] = field(default_factory=dict)
    name: str = ""
    digest: int | None = None

    def __post_init__(self) -> None:
        for what, ids in (("input_ids", self.input_ids), ("labels", self.labels)):
            if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
                got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
                raise TypeError(f"sample {self.name!r}: {what} must be an int64 tensor [length], got {got}")
        if len(self.input_ids) == 0:
            raise ValueError(f"sample {self.name!r} has no tokens")
        if len(self.labels) != len(self.input_ids):
            raise ValueError(
                f"sample {self.name!r} has {len(self.input_ids)} input_ids but {len(self.labels)} labels: pass one "
                f"label per position, {IGNORE} for positions without a target"
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
        """A Sample from unshifted labels, which is HuggingFace's convention.

        labels: labels[t] is input_ids[t], or IGNORE for no target. None: every id is a target.
        """
        labels = shift_labels(input_ids if labels is None else labels)
        return cls(input_ids, labels, {key: list(items) for key, items in (media or {}).items()}, name)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def targets(self) -> int:
        """Number of positions with a target."""
        return int(np.count_nonzero(self.labels.numpy() != IGNORE))


@dataclass(frozen=True)
class SampleOutline:
    """A sample without its tokens, for ranks that do not compute with them. Step tables are made from it.

    length, targets: number of tokens, and of tokens with a target.
    media: shapes; also data if this rank has it.
    digest, name: as in Sample.
    starts: encoder name -> start of each of its items in the tokens.
    Access to ids or labels raises an error: they are on another rank.
    """

    length: int
    targets: int
    media: dict[str, list[Media]]
    digest: int
    name: str = ""
    starts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.length

    @property
    def input_ids(self) -> Tensor:
        """Raises RuntimeError."""
        raise RuntimeError(f"the tokens of {self.name} are on another rank: this rank does not need them")

    @property
    def labels(self) -> Tensor:
        """Raises RuntimeError."""
        raise RuntimeError(f"the labels of {self.name} are on another rank: this rank does not need them")


def check_samples(call: str, given: object) -> None:
    """Raise ValueError unless `given` is a list of samples. call: name of the called function, for the message."""
    items = given if isinstance(given, Sequence) and not isinstance(given, str) else None
    wrong = [given] if items is None else [item for item in items if not hasattr(item, "media")]
    if not wrong:
        return
    if isinstance(given, Mapping):
        hint = "pass a batch made by mllm.collate to mllm(**batch)"
    elif isinstance(given, Sample):
        hint = "put it in a list"
    else:
        hint = "make them with interlace.model.Sample(input_ids, labels, media)"
    kind = type(wrong[0]).__name__
    raise ValueError(f"{call} takes {'a list of samples' if items is None else 'samples'}, not a {kind}: {hint}")


def shift_labels(labels: Tensor) -> Tensor:
    """Shift labels by one position: afterwards, labels[t] is the id after input_ids[t].

    labels: int64 [..., L], one sequence per row, beside their own ids.
    Raises ValueError for a row without tokens.
    """
    if labels.dim() == 0 or labels.shape[-1] == 0:
        raise ValueError(f"labels {list(labels.shape)} have no tokens: pass at least one per row")
    return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], IGNORE)], dim=-1)


def refuse_copies(where: str, rows: Iterable[tuple[Tensor, Tensor]], *, warn: bool = False) -> None:
    """Raise ValueError if labels are unshifted copies of input_ids.

    rows: pairs of input_ids and labels, int64 [..., L].
    Labels count as copies if every target, in all rows, equals the id at its own position. Only positions whose next id
    differs are evidence, so texts of one repeated token pass. Fewer than COPIES such positions give a warning at most.
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
