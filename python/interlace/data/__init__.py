"""Datasets of uncollated multimodal samples, and what carries them to the trainer.

fetch (the stamps package into a cache) -> index (what it holds) -> media, pack (files to arrays, verified and kept)
-> stamps, digits (samples; base: what they share) -> loader (batches). tokenizer, baseline, statistics, load: as named.
Own chats: chats_files (records) -> chats_shapes (one shape, or broken) -> chats_template, chats_tokens, chats_media
(ids, targets, items; chats_video: frames; chats_load: tokenizers, processors) -> chats_store (prepared, kept) -> chats
(samples) -> rows (packed batches); chats_page: samples as the model will see them.

Names are imported when first used: a process that only decodes or fetches must not wait for torch and transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.data.base import MediaRef, MultimodalDataset, Recipe
    from interlace.data.baseline import unigram_nats
    from interlace.data.chats import ChatDataset, load_chats
    from interlace.data.digits import DigitsDataset
    from interlace.data.fetch import cache_folder, fetch_stamps, find_stamps
    from interlace.data.load import Splits, load_dataset
    from interlace.data.loader import Loader
    from interlace.data.media import AudioSpec, DecodeError, ImageSpec, ImageTooLarge, load_audio, load_image
    from interlace.data.rows import RowLoader
    from interlace.data.stamps import StampsDataset
    from interlace.data.statistics import summary
    from interlace.data.tokenizer import ByteTokenizer
    from interlace.model.sample import IGNORE, Media, Sample

_WHERE = {
    "interlace.data.base": ("MediaRef", "MultimodalDataset", "Recipe"),
    "interlace.data.baseline": ("unigram_nats",),
    "interlace.data.chats": ("ChatDataset", "load_chats"),
    "interlace.data.digits": ("DigitsDataset",),
    "interlace.data.fetch": ("cache_folder", "fetch_stamps", "find_stamps"),
    "interlace.data.load": ("Splits", "load_dataset"),
    "interlace.data.loader": ("Loader",),
    "interlace.data.media": ("AudioSpec", "DecodeError", "ImageSpec", "ImageTooLarge", "load_audio", "load_image"),
    "interlace.data.rows": ("RowLoader",),
    "interlace.data.stamps": ("StampsDataset",),
    "interlace.data.statistics": ("summary",),
    "interlace.data.tokenizer": ("ByteTokenizer",),
    "interlace.model.sample": ("IGNORE", "Media", "Sample"),
}
_MODULE = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "IGNORE",
    "AudioSpec",
    "ByteTokenizer",
    "ChatDataset",
    "DecodeError",
    "DigitsDataset",
    "ImageSpec",
    "ImageTooLarge",
    "Loader",
    "Media",
    "MediaRef",
    "MultimodalDataset",
    "Recipe",
    "RowLoader",
    "Sample",
    "Splits",
    "StampsDataset",
    "cache_folder",
    "fetch_stamps",
    "find_stamps",
    "load_audio",
    "load_chats",
    "load_dataset",
    "load_image",
    "summary",
    "unigram_nats",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Kept, so that the next use costs nothing.
    value = globals()[name] = getattr(import_module(_MODULE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
