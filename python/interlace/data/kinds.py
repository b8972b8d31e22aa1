"""Kinds of datasets: facts that the trainer needs before any data are read.

Only the standard library is imported, because configs are also checked in processes without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DatasetKind:
    """A kind of dataset: one value of ``data.dataset``, or all classes of users."""

    name: str
    keys: tuple[str, ...]
    """Keys of [data] for this kind, apart from those for every kind."""
    tokenizer: Literal["model", "bytes", "any"] = "model"
    """model: that of the model's folder. bytes: `ByteTokenizer`. any: bytes only if no folder is configured."""
    files: bool = False
    """True if the samples are chats in the files of ``data.train`` or ``data.sources``."""
    media: tuple[str, ...] = ()
    """Kinds of media that the model needs an encoder for."""
    image_tokens: int | None = None
    """Default of ``data.max_image_tokens``; None: the patches of the encoder's own image size."""
    caption_tokens: int | None = None
    """Tokens of the longest sample without its picture, if each sample is one picture with a caption; else None."""
    workers: bool = True
    """True if decoding is slow enough for processes by default."""
    fixed: bool = False
    """True if the config alone determines the data, so one check per config is enough."""


MODEL_TOKENIZER = ("tokenizer", "chat_template", "end_of_turn", "placeholders")
BUDGET = ("max_tokens", "pack")
FILES = ("train", "validation")

CHATS = DatasetKind(
    "chats",
    (
        *("sources", "mix_by", "sizes", "prompt", "limit", *FILES, "media", *MODEL_TOKENIZER, *BUDGET),
        *("on_too_long", "on_broken", "decode_first", "video_fps", "max_video_tokens", "prepare", "reading"),
    ),
    files=True,
)
DIGITS = DatasetKind(
    "digits",
    ("digit_size", "digit_jitter"),
    tokenizer="bytes",
    media=("image",),
    image_tokens=64,
    caption_tokens=len("seven"),
    workers=False,
    fixed=True,
)
OWN = DatasetKind("package.module:Class", ("options", *FILES, *MODEL_TOKENIZER, *BUDGET), tokenizer="any")
"""A class of the user, derived from `SampleDataset`."""

KINDS = {kind.name: kind for kind in (CHATS, DIGITS)}


def kind_of(dataset: str) -> DatasetKind:
    """The kind of a value of ``data.dataset``."""
    return KINDS.get(dataset, OWN)


def owner_of(key: str) -> str:
    """Name of the first kind that has this key of [data]. Raises StopIteration for a key of every kind."""
    return next(kind.name for kind in (*KINDS.values(), OWN) if key in kind.keys)


def foreign_keys(kind: DatasetKind) -> tuple[str, ...]:
    """Keys of [data] that belong to other kinds only."""
    keys = dict.fromkeys(key for each in (*KINDS.values(), OWN) for key in each.keys)
    return tuple(key for key in keys if key not in kind.keys)
