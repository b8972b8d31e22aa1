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
    from interlace.data.builtin.baseline import unigram_nats as unigram_nats
    from interlace.data.builtin.byte_tokenizer import ByteTokenizer as ByteTokenizer
    from interlace.data.builtin.fetch import (
        cache_folder as cache_folder,
    )
    from interlace.data.builtin.fetch import (
        fetch_stamps as fetch_stamps,
    )
    from interlace.data.builtin.fetch import (
        find_stamps as find_stamps,
    )
    from interlace.data.chats.dataset import ChatDataset as ChatDataset
    from interlace.data.chats.dataset import load_chats as load_chats
    from interlace.data.dataset import (
        DatasetSetup as DatasetSetup,
    )
    from interlace.data.dataset import (
        Question as Question,
    )
    from interlace.data.dataset import (
        SampleDataset as SampleDataset,
    )
    from interlace.data.dataset import (
        Tokenizer as Tokenizer,
    )
    from interlace.data.loader import Loader as Loader
    from interlace.data.mixture import MixedDataset as MixedDataset
    from interlace.data.mixture import Part as Part
    from interlace.data.mixture import by_source as by_source
    from interlace.data.rows import RowLoader as RowLoader
    from interlace.data.streams.base import IterableStream as IterableStream
    from interlace.data.streams.base import SampleStream as SampleStream
    from interlace.data.streams.batches import (
        StreamBatch as StreamBatch,
    )
    from interlace.data.streams.batches import (
        StreamError as StreamError,
    )
    from interlace.data.streams.batches import (
        StreamLoader as StreamLoader,
    )
    from interlace.data.streams.batches import (
        StreamOptions as StreamOptions,
    )
    from interlace.data.workers.produced import ReadAhead as ReadAhead
    from interlace.modalities.audio import AudioSpec as AudioSpec
    from interlace.modalities.audio import load_audio as load_audio
    from interlace.modalities.errors import DecodeError as DecodeError
    from interlace.modalities.image import (
        ImageSpec as ImageSpec,
    )
    from interlace.modalities.image import (
        ImageTooLarge as ImageTooLarge,
    )
    from interlace.modalities.image import (
        load_image as load_image,
    )
    from interlace.model.sample import IGNORE as IGNORE
    from interlace.model.sample import Media as Media
    from interlace.model.sample import Sample as Sample

_WHERE = {
    "interlace.data.builtin.baseline": ("unigram_nats",),
    "interlace.data.chats.dataset": ("ChatDataset", "load_chats"),
    "interlace.data.dataset": ("DatasetSetup", "Question", "SampleDataset", "Tokenizer"),
    "interlace.data.builtin.fetch": ("cache_folder", "fetch_stamps", "find_stamps"),
    "interlace.data.loader": ("Loader",),
    "interlace.modalities.audio": ("AudioSpec", "load_audio"),
    "interlace.modalities.errors": ("DecodeError",),
    "interlace.modalities.image": ("ImageSpec", "ImageTooLarge", "load_image"),
    "interlace.data.mixture": ("MixedDataset", "Part", "by_source"),
    "interlace.data.rows": ("RowLoader",),
    "interlace.data.streams.base": ("IterableStream", "SampleStream"),
    "interlace.data.streams.batches": ("StreamBatch", "StreamError", "StreamLoader", "StreamOptions"),
    "interlace.data.workers.produced": ("ReadAhead",),
    "interlace.data.builtin.byte_tokenizer": ("ByteTokenizer",),
    "interlace.model.sample": ("IGNORE", "Media", "Sample"),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Cached: the next use costs nothing.
    value = globals()[name] = getattr(import_module(_MODULE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
