"""The section [data] of a training config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from interlace.train.schema_base import MOST, WEEK, Positive, Rate, Section

CHATS = (
    *("train", "validation", "media", "tokenizer", "chat_template", "placeholders", "max_tokens", "pack"),
    *("on_too_long", "on_broken", "decode_first", "video_fps", "max_video_tokens"),
)
"""Keys that only chats have,"""
NOT_CHATS = ("mixture", "languages", "max_images", "max_caption_bytes", "digit_size", "digit_jitter")
"""that they have not,"""
NOT_WHOLE = ("max_image_tokens", "on_too_large", "video_fps", "max_video_tokens", "max_audio_seconds", "placeholders")
"""and that chats have for models put together from modules alone: a whole checkpoint's processor decides these."""


class Mixture(Section):
    """Relative weights of the kinds of samples drawn from the stamps; 0 leaves a kind out."""

    image: Rate = 0.25
    """One picture, answer its caption."""
    speech: Rate = 0.15
    """A spoken description, answer it in writing, in the language of the speech."""
    image_speech: Rate = 0.15
    """A picture and the speech about it, answer the caption."""
    images: Rate = 0.1
    """Several pictures, answer all their captions."""
    text: Rate = 0.1
    """A caption, answer it in another language."""
    category: Rate = 0.15
    """One picture, answer the folder that it lies in, such as "animals"."""
    language: Rate = 0.1
    """A spoken description, answer the code of its language."""


class Data(Section):
    """What the model learns from."""

    dataset: Literal["stamps", "digits", "chats"]
    """stamps: Debian's Tux Paint stamps (images, speech, captions in many languages), fetched on first use, or the
    digits when they cannot be had; digits: scikit-learn's handwritten digits, image -> "seven"; chats: files of your
    own, named by ``train``."""
    train: list[Annotated[str, Field(min_length=1)]] = []
    """Files of chats to train on: JSON lines, JSON, parquet, or folders that HuggingFace's datasets saved (chats)."""
    validation: list[Annotated[str, Field(min_length=1)]] = []
    """Files of chats to measure with; by default ``held_out`` of the training ones is kept for it (chats)."""
    media: Annotated[str, Field(min_length=1)] | None = None
    """Folder that relative paths of media start at; by default that of the file which names them (chats)."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """Folder with the tokenizer, and for whole checkpoints the processor; by default that of the model (chats)."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """File with a chat template (Jinja) in place of the tokenizer's own (chats)."""
    video_fps: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """Frames of a video that become pictures, per second (chats, without a whole checkpoint)."""
    max_video_tokens: Positive = 512
    """Most language model tokens of one video; a longer one gives fewer frames per second, at least one (chats,
    without a whole checkpoint)."""
    placeholders: dict[str, Annotated[str, Field(min_length=1)]] = {}
    """Encoder -> the token of the tokenizer that stands for its media, such as a reserved one; by default ``<image>``,
    ``<audio>`` or ``<name>``, added to the tokenizer where it lacks it (chats, without a whole checkpoint)."""
    max_tokens: Annotated[int, Field(ge=2, le=MOST)] | None = None
    """Most tokens of a sample, media included, and of a row with ``pack``; by default the model's positions (chats)."""
    on_too_long: Literal["cut", "skip", "error"] = "skip"
    """What happens to a longer sample: cut before the item that does not fit, left out and counted, or an error that
    names it (chats)."""
    on_broken: Literal["skip", "error"] = "skip"
    """What happens to a record that is no sample: left out and listed in left_out.txt, or an error (chats)."""
    decode_first: bool = True
    """Decode every picture and clip once before the first run, so that broken ones are left out; false reads headers
    alone, and what cannot be decoded in training becomes a blank that is counted (chats)."""
    pack: bool = False
    """Fill each microbatch with whole samples up to ``max_tokens``; ``train.batch_size`` then counts microbatches of
    all replicas, in place of samples (chats)."""
    cache: str | None = None
    """Folder for fetched files and decoded items; by default ``$INTERLACE_CACHE``, else ``~/.cache/interlace``."""
    mixture: Mixture = Field(default_factory=Mixture)
    """Weights of the kinds of samples (stamps); kinds whose encoder the model lacks are left out."""
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    """Language codes of captions and speech to use, such as ``["en", "fr"]``; by default the ten with most speech
    (stamps)."""
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Fraction of the stamps (with all their languages), of the digits, or of the chats where ``validation`` names no
    files, that is never trained on."""
    max_image_tokens: Positive | None = None
    """Most patches of one image, before the encoder's ``downsample`` divides them; by default 64, and of chats as many
    as an image has of the size that the encoder was made for (not with a whole checkpoint)."""
    on_too_large: Literal["downscale", "error"] = "downscale"
    """What happens to an image over its budget: scaled down keeping its aspect, or an error that names it; a chat that
    has it is then broken (not with a whole checkpoint)."""
    max_images: Annotated[int, Field(ge=2, le=MOST)] = 3
    """Most pictures in a sample with several (stamps)."""
    max_audio_seconds: Annotated[float, Field(gt=0.0, le=WEEK)] = 6.0
    """Longer clips are skipped and counted (not with a whole checkpoint)."""
    max_caption_bytes: Positive = 160
    """Longer captions are skipped and counted (stamps)."""
    digit_size: Positive | None = None
    """Side in pixels to which the 8 x 8 digits are enlarged; by default the patch size, at least 8 (digits)."""
    digit_jitter: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """Strength of random distortions of the training digits, new in every epoch; 1 moves them by up to half a pixel,
    turns them by up to 8 degrees and stretches them by up to 10 % (digits)."""

    def image_tokens(self, own: int) -> int:
        """Most patches of one image for an encoder that was made for images of `own` patches."""
        return self.max_image_tokens or (own if self.dataset == "chats" else 64)

    @field_validator("train", "validation", mode="after")
    @classmethod
    def _absolute_files(cls, names: list[str]) -> list[str]:
        return [_absolute(name) for name in names]  # a run goes on from any folder

    @field_validator("media", "tokenizer", "chat_template", mode="after")
    @classmethod
    def _absolute_file(cls, name: str | None) -> str | None:
        return None if name is None else _absolute(name)

    @model_validator(mode="after")
    def _chats_fit(self) -> Data:
        if self.dataset == "chats":
            if not self.train:
                raise ValueError("dataset 'chats' needs train, a list of files")
            if self.pack and self.max_tokens is None:
                raise ValueError("pack fills rows up to max_tokens: say how many tokens a row takes")
        chats = self.dataset == "chats"
        if said := self.set_of(NOT_CHATS if chats else CHATS):
            owner = "datasets 'stamps' and 'digits'" if chats else "dataset 'chats'"
            raise ValueError(f"{said[0]} is a key of {owner}, not of {self.dataset!r}: remove it, or set dataset")
        return self

    def set_of(self, keys: tuple[str, ...]) -> list[str]:
        """Which of `keys` ask for something: have another value than by default, which saved configs spell out."""
        default = type(self).model_construct(dataset=self.dataset)
        return [key for key in keys if getattr(self, key) != getattr(default, key)]


def _absolute(name: str) -> str:
    return str(Path(name).expanduser().absolute())
