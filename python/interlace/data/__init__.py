"""Datasets of uncollated multimodal samples, and what carries them to the trainer.

digits (samples; base, tokenizer: what they are made with) -> loader (batches; ahead: its thread). media: decodes files.
Apart from training: producing (tasks and answers) in worker processes (workers, worker_process) or on Ray (ray_tasks)
-> decoded (items that the ranks of a node share) -> produced (batches of them in the trainer).
The stamps: fetch (Debian's package into a cache) -> index (what it holds) -> stamps (records; stamps_media: files;
chats_bpe: a tokenizer) -> stamps_folder (chats like one's own; stamps_digits: what stands in for them).
Chats: chats_files (records; chats_tar: of tars, opened: members read in place) -> chats_shapes (one shape, or broken;
chats_keys: which keys; chats_records: by rules) -> chats_look (sizes; chats_index: of large data, made by processes:
chats_index_pool, chats_index_worker) -> chats_template, chats_tokens, chats_media, chats_examine (ids, targets, items;
chats_processor: of whole checkpoints, chats_parts: what their processors are made of; chats_video: frames; chats_load:
tokenizers, processors) -> chats_store (prepared, kept) -> chats (samples) -> mixture (of sources) -> rows (packed
batches); chats_page: samples as the model will see them.
Streams: stream (what is read in order, and the reader of a share of it; chats_stream: of chats) -> streams (batches of
what all readers read).

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
    from interlace.data.loader import Loader
    from interlace.data.media import AudioSpec, DecodeError, ImageSpec, ImageTooLarge, load_audio, load_image
    from interlace.data.mixture import MixedDataset, Part, by_source
    from interlace.data.rows import RowLoader
    from interlace.data.stream import IterableStream, SampleStream
    from interlace.data.streams import StreamBatch, StreamError, StreamLoader
    from interlace.data.tokenizer import ByteTokenizer
    from interlace.model.sample import IGNORE, Media, Sample

_WHERE = {
    "interlace.data.base": ("MediaRef", "MultimodalDataset", "Recipe"),
    "interlace.data.baseline": ("unigram_nats",),
    "interlace.data.chats": ("ChatDataset", "load_chats"),
    "interlace.data.digits": ("DigitsDataset",),
    "interlace.data.fetch": ("cache_folder", "fetch_stamps", "find_stamps"),
    "interlace.data.loader": ("Loader",),
    "interlace.data.media": ("AudioSpec", "DecodeError", "ImageSpec", "ImageTooLarge", "load_audio", "load_image"),
    "interlace.data.mixture": ("MixedDataset", "Part", "by_source"),
    "interlace.data.rows": ("RowLoader",),
    "interlace.data.stream": ("IterableStream", "SampleStream"),
    "interlace.data.streams": ("StreamBatch", "StreamError", "StreamLoader"),
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
    "IterableStream",
    "Loader",
    "Media",
    "MediaRef",
    "MixedDataset",
    "MultimodalDataset",
    "Part",
    "Recipe",
    "RowLoader",
    "Sample",
    "SampleStream",
    "StreamBatch",
    "StreamError",
    "StreamLoader",
    "by_source",
    "cache_folder",
    "fetch_stamps",
    "find_stamps",
    "load_audio",
    "load_chats",
    "load_image",
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
