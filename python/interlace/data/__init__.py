"""Datasets of uncollated multimodal samples, and what carries them to the trainer.

fetch (the stamps package into a cache) -> index (what it holds) -> media, pack (files to arrays, verified and kept)
-> stamps, digits (samples; base: what they share) -> loader (batches). tokenizer, baseline, summary, load: as named.
"""

from interlace.data.base import IGNORE, MediaRef, MultimodalDataset, Recipe
from interlace.data.baseline import unigram_nats
from interlace.data.digits import DigitsDataset
from interlace.data.fetch import cache_folder, fetch_stamps, find_stamps
from interlace.data.load import Splits, load_dataset
from interlace.data.loader import Loader
from interlace.data.media import AudioSpec, DecodeError, ImageSpec, ImageTooLarge, load_audio, load_image
from interlace.data.stamps import StampsDataset
from interlace.data.summary import summary
from interlace.data.tokenizer import ByteTokenizer
from interlace.data.types import Media, Sample

__all__ = [
    "IGNORE",
    "AudioSpec",
    "ByteTokenizer",
    "DecodeError",
    "DigitsDataset",
    "ImageSpec",
    "ImageTooLarge",
    "Loader",
    "Media",
    "MediaRef",
    "MultimodalDataset",
    "Recipe",
    "Sample",
    "Splits",
    "StampsDataset",
    "cache_folder",
    "fetch_stamps",
    "find_stamps",
    "load_audio",
    "load_dataset",
    "load_image",
    "summary",
    "unigram_nats",
]
