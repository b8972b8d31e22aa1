"""Multimodal datasets and the loaders that feed them to the trainer.

- `dataset`: protocol of a dataset. `reading`: items that cannot be read. `loader`: batches. `mixture`: several sources.
  `rows`: packed batches.
- `chats/`: chats in common formats. `streams/`: data that can only be read in order.
- `workers/`: decoding and encoding ahead, in processes or on Ray. `builtin/`: chats about digits and stamps.

Names are imported on first use: a process that only decodes or fetches does not wait for torch and transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.data.builtin.baseline import unigram_nats
    from interlace.data.builtin.byte_tokenizer import ByteTokenizer
    from interlace.data.builtin.fetch import cache_folder, find_stamps
    from interlace.data.chats.dataset import ChatDataset, load_chats
    from interlace.data.dataset import DatasetSetup, Question, SampleDataset, Tokenizer
    from interlace.data.loader import Loader
    from interlace.data.mixture import MixedDataset, Part, by_source
    from interlace.data.rows import RowLoader
    from interlace.data.streams.base import IterableStream, SampleStream
    from interlace.data.streams.batches import StreamError, StreamLoader, StreamOptions
    from interlace.data.workers.produced import ReadAhead
    from interlace.modalities.audio import AudioSpec, load_audio
    from interlace.modalities.errors import DecodeError
    from interlace.modalities.image import ImageSpec, ImageTooLarge, load_image
    from interlace.model.sample import IGNORE, Media, Sample

_WHERE = {
    "interlace.data.builtin.baseline": ("unigram_nats",),
    "interlace.data.chats.dataset": ("ChatDataset", "load_chats"),
    "interlace.data.dataset": ("DatasetSetup", "Question", "SampleDataset", "Tokenizer"),
    "interlace.data.builtin.fetch": ("cache_folder", "find_stamps"),
    "interlace.data.loader": ("Loader",),
    "interlace.modalities.audio": ("AudioSpec", "load_audio"),
    "interlace.modalities.errors": ("DecodeError",),
    "interlace.modalities.image": ("ImageSpec", "ImageTooLarge", "load_image"),
    "interlace.data.mixture": ("MixedDataset", "Part", "by_source"),
    "interlace.data.rows": ("RowLoader",),
    "interlace.data.streams.base": ("IterableStream", "SampleStream"),
    "interlace.data.streams.batches": ("StreamError", "StreamLoader", "StreamOptions"),
    "interlace.data.workers.produced": ("ReadAhead",),
    "interlace.data.builtin.byte_tokenizer": ("ByteTokenizer",),
    "interlace.model.sample": ("IGNORE", "Media", "Sample"),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "IGNORE",
    "AudioSpec",
    "ByteTokenizer",
    "ChatDataset",
    "DatasetSetup",
    "DecodeError",
    "ImageSpec",
    "ImageTooLarge",
    "IterableStream",
    "Loader",
    "Media",
    "MixedDataset",
    "Part",
    "Question",
    "ReadAhead",
    "RowLoader",
    "Sample",
    "SampleDataset",
    "SampleStream",
    "StreamError",
    "StreamLoader",
    "StreamOptions",
    "Tokenizer",
    "by_source",
    "cache_folder",
    "find_stamps",
    "load_audio",
    "load_chats",
    "load_image",
    "unigram_nats",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Cached: the next use costs nothing.
    value = globals()[name] = getattr(import_module(_MODULE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
