"""The section [data] of a training config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from interlace.train.schema_base import MOST, WEEK, LocalPath, Positive, Section

CHATS = (
    *(
        "sources",
        "mix_by",
        "sizes",
        "prompt",
        "limit",
        "train",
        "validation",
        "media",
        "tokenizer",
        "chat_template",
        "end_of_turn",
        "placeholders",
        "max_tokens",
        "pack",
    ),
    *("on_too_long", "on_broken", "decode_first", "video_fps", "max_video_tokens", "prepare", "reading"),
)
"""Keys that only chats have,"""
STREAM = ("readers", "shuffle_buffer", "exchange_mb")
"""Keys of streams alone,"""
NOT_STREAM = ("prefetch", "cache_gb", "drop_last")
"""and those that these have not."""
NOT_CHATS = ("digit_size", "digit_jitter")
"""that they have not,"""
NOT_WHOLE = ("max_image_tokens", "on_too_large", "max_video_tokens", "max_audio_seconds", "placeholders")
"""and that chats have for models put together from modules alone: a whole checkpoint's processor decides these."""


class Source(Section):
    """One of several sources of chats, each with its share of what is drawn."""

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[A-Za-z0-9_.-]+$")]
    """What metrics and reports call it."""
    train: Annotated[list[LocalPath], Field(min_length=1)]
    """Files to train on, as ``data.train``."""
    validation: list[LocalPath] = []
    """Files to measure with; by default ``data.held_out`` of this source's records is kept for it."""
    weight: Annotated[float, Field(gt=0.0, le=1e9)] = 1.0
    """Its share of what is drawn, relative to the other sources' weights (``mix_by``: of samples or tokens), whatever
    its size: one of a large weight is gone through several times an epoch."""
    limit: Positive | None = None
    """At most so many of its records to train on, chosen at random, the same ones each time."""
    media: LocalPath | None = None
    """Folder that relative paths of its media start at; by default ``data.media``."""
    prompt: str | None = None
    """What is asked about the media of captions in tars; by default ``data.prompt``."""

    @field_validator("train", "validation", mode="after")
    @classmethod
    def _absolute_files(cls, names: list[str]) -> list[str]:
        return [_absolute(name) for name in names]

    @field_validator("media", mode="after")
    @classmethod
    def _absolute_file(cls, name: str | None) -> str | None:
        return None if name is None else _absolute(name)


class Data(Section):
    """What the model learns from."""

    dataset: Literal["digits", "chats"]
    """digits: scikit-learn's handwritten digits, image -> "seven"; chats: files of your own, named by ``train``."""
    train: list[LocalPath] = []
    """Files of chats to train on: JSON lines, JSON, parquet, WebDataset tars (``shard-{000..015}.tar``), or folders
    that HuggingFace's datasets saved or Energon prepared; or say ``sources`` (chats)."""
    validation: list[LocalPath] = []
    """Files of chats to measure with; by default ``held_out`` of the training ones is kept for it (chats)."""
    sources: list[Source] = []
    """Several sources in place of ``train`` and ``validation``, as ``[[data.sources]]``. An epoch draws as many samples
    as they have in all, of each its share (chats)."""
    mix_by: Literal["samples", "tokens"] = "samples"
    """What weights of sources are shares of: the samples that are drawn, or their tokens (chats)."""
    limit: Positive | None = None
    """At most so many records to train on, chosen at random, the same ones each time (chats)."""
    prompt: str | None = None
    """What is asked about the media of captions in tars; by default "Describe the picture." and the like, "" asks
    nothing (chats)."""
    sizes: Literal["files", "records"] = "files"
    """Where sizes of media come from. files: their headers; records: what records state (``width`` and ``height``, of
    clips ``samples`` and ``rate``, of videos ``seconds``, too), where they do: these files are not opened before they
    are read, and one of another size becomes a blank that is counted (chats)."""
    prepare: Literal["stamps"] | None = None
    """Who writes these files where they are not there yet, before ranks start. stamps: what ``interlace data stamps``
    writes into the folder of ``train``: Debian's Tux Paint stamps (pictures, speech, captions in ten languages), or the
    digits when they cannot be had (chats)."""
    media: LocalPath | None = None
    """Folder that relative paths of media start at; by default that of the file which names them (chats)."""
    tokenizer: LocalPath | None = None
    """Folder with the tokenizer, and for whole checkpoints the processor; by default that of the model (chats)."""
    chat_template: LocalPath | None = None
    """File with a chat template (Jinja) in place of the tokenizer's own (chats)."""
    end_of_turn: Annotated[str, Field(min_length=1)] | None = None
    """Special token that is written and learnt behind each answer, such as ``</s>``, where the template ends answers
    with none (LLaVA-1.5's): a model that never learns it does not stop (chats)."""
    video_fps: Annotated[float, Field(gt=0.0, le=1000.0)] | None = None
    """Frames that are taken of a video per second; by default 1, and for a whole checkpoint what its video processor is
    set to, which may be all (chats)."""
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
    reading: Literal["random", "stream"] = "random"
    """random: all records are counted before the run, every rank decodes the media that it computes with, and nothing
    travels; stream: files are read in order, each by one rank, and samples travel to the ranks that compute with them
    (chats)."""
    readers: Positive | None = None
    """How many ranks read, spread evenly; by default all (stream)."""
    shuffle_buffer: Annotated[int, Field(ge=0, le=MOST)] = 1000
    """Samples of a reader among which the next one is drawn; 0: in the order of the files (stream)."""
    exchange_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Most MiB that one rank may send, or be sent, for a step; two such buffers are in memory (stream)."""
    cache: LocalPath | None = None
    """Folder for fetched files and decoded items; by default ``$INTERLACE_CACHE``, else ``~/.cache/interlace``."""
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto", "ray"] = "auto"
    """Who decodes: so many processes beside each rank; 0: a thread of the rank itself; ray: tasks on a Ray cluster, for
    many nodes. auto: of chats half of a rank's cores, at most 4, and 0 where it has fewer than 4; of digits 0. Samples
    have the same bits with any."""
    drop_last: bool = False
    """Leave out the samples at the end of an epoch that do not fill a batch, others in each epoch. false: the last step
    of an epoch has what is left, in fewer or smaller microbatches, so that each epoch has all samples (random)."""
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    """Batches that are made ahead."""
    cache_gb: Annotated[float, Field(ge=0.0, le=1e6)] = 1.0
    """GiB of decoded items that workers keep for all ranks of a node while the run lasts, in shared memory or, where
    that has no room for it, in ``cache``; with ray in its object store, for all nodes. What was used longest ago makes
    room. 0: none are kept."""
    ray_address: Annotated[str, Field(min_length=1)] | None = None
    """The Ray cluster; by default ``$RAY_ADDRESS``, else the one that runs on this node (ray)."""
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Fraction of the digits, or of the chats where ``validation`` names no files, that is never trained on."""
    max_image_tokens: Positive | None = None
    """Most patches of one image, before the encoder's ``downsample`` divides them; by default 64, and of chats as many
    as an image has of the size that the encoder was made for (not with a whole checkpoint)."""
    on_too_large: Literal["downscale", "error"] = "downscale"
    """What happens to an image over its budget: scaled down keeping its aspect, or an error that names it; a chat that
    has it is then broken (not with a whole checkpoint)."""
    max_audio_seconds: Annotated[float, Field(gt=0.0, le=WEEK)] = 6.0
    """Longer clips are skipped and counted (not with a whole checkpoint)."""
    digit_size: Positive | None = None
    """Side in pixels to which the 8 x 8 digits are enlarged; by default the patch size, at least 8 (digits)."""
    digit_jitter: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """Strength of random distortions of the training digits, new in every epoch; 1 moves them by up to half a pixel,
    turns them by up to 8 degrees and stretches them by up to 10 % (digits)."""

    @property
    def row_tokens(self) -> int | None:
        """Most tokens of a packed row; None where samples are not packed."""
        return self.max_tokens if self.pack else None

    def image_tokens(self, own: int) -> int:
        """Most patches of one image for an encoder that was made for images of `own` patches."""
        return self.max_image_tokens or (own if self.dataset == "chats" else 64)

    @field_validator("train", "validation", mode="after")
    @classmethod
    def _absolute_files(cls, names: list[str]) -> list[str]:
        return [_absolute(name) for name in names]  # a run goes on from any folder

    @field_validator("workers", mode="before")
    @classmethod
    def _one_of_three(cls, value: Any) -> Any:
        if value in ("auto", "ray") or (type(value) is int and 0 <= value <= 1024):
            return value
        raise ValueError(f"a number of processes from 0 to 1024, 'auto' or 'ray' is wanted, not {value!r}")

    @field_validator("media", "tokenizer", "chat_template", mode="after")
    @classmethod
    def _absolute_file(cls, name: str | None) -> str | None:
        return None if name is None else _absolute(name)

    @model_validator(mode="after")
    def _workers_fit(self) -> Data:
        if self.ray_address is not None and self.workers != "ray":
            raise ValueError("ray_address is read with workers = 'ray' alone: set that, or remove it")
        return self

    @model_validator(mode="after")
    def _chats_fit(self) -> Data:
        if self.dataset == "chats":
            if not self.train and not self.sources:
                raise ValueError("dataset 'chats' needs train, a list of files, or [[data.sources]]")
            own = [key for key in ("train", "validation", "limit", "prepare") if getattr(self, key)]
            if self.sources and own:
                raise ValueError(f"{own[0]} is said beside [[data.sources]]: say it of a source, or leave these out")
            names = [source.name for source in self.sources]
            if len(set(names)) < len(names):
                raise ValueError(f"two sources are called {max(names, key=names.count)!r}: give each a name of its own")
            if self.pack and self.max_tokens is None:
                raise ValueError("pack fills rows up to max_tokens: say how many tokens a row takes")
        if self.reading == "stream":
            own = [key for key in ("sources", "limit") if getattr(self, key)]
            if own:
                raise ValueError(
                    f"{own[0]} is for data that are read at random: a stream takes one source whole; set "
                    "reading='random'"
                )
            if said := self.set_of(NOT_STREAM):
                raise ValueError(
                    f"{said[0]} is of data that are read at random: a stream works one batch ahead, keeps nothing and "
                    "leaves nothing out; remove it, or set reading='random'"
                )
            if not self.validation:
                raise ValueError(
                    "reading 'stream' needs validation, a list of files: what of a stream is kept back nobody could "
                    "measure without reading all of it"
                )
            if self.pack:
                raise ValueError(
                    "pack needs the lengths of all samples, which a stream does not tell: set reading='random'"
                )
        elif said := self.set_of(STREAM):
            raise ValueError(f"{said[0]} is a key of reading 'stream', not of 'random': remove it, or set reading")
        chats = self.dataset == "chats"
        if said := self.set_of(NOT_CHATS if chats else CHATS):
            owner = f"dataset {'digits' if chats else 'chats'!r}"
            raise ValueError(f"{said[0]} is a key of {owner}, not of {self.dataset!r}: remove it, or set dataset")
        return self

    def each_source(self) -> list[Source]:
        """The sources, each with all that it takes from here; one called "data" where only ``train`` is given."""
        if not self.sources:
            only: dict[str, Any] = {"train": self.train, "validation": self.validation, "limit": self.limit}
            return [Source.model_construct(None, name="data", media=self.media, prompt=self.prompt, **only)]
        return [
            source.model_copy(
                update={
                    "media": self.media if source.media is None else source.media,
                    "prompt": self.prompt if source.prompt is None else source.prompt,
                }
            )
            for source in self.sources
        ]

    def set_of(self, keys: tuple[str, ...]) -> list[str]:
        """Which of `keys` ask for something: have another value than by default, which saved configs spell out."""
        default = type(self).model_construct(dataset=self.dataset)
        return [key for key in keys if getattr(self, key) != getattr(default, key)]


def _absolute(name: str) -> str:
    return str(Path(name).expanduser().absolute())
