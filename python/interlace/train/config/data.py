"""[data] of a training config: training and held-out data."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from interlace._hints import nearest
from interlace.train.config.base import IMPORT, MOST, WEEK, AbsolutePath, LocalPath, Positive, Section

STREAM = ("readers", "shuffle_buffer", "exchange_mb")
"""Keys for streams only."""
NOT_STREAM = ("prefetch", "cache_gb", "drop_last")
"""Keys that streams do not have."""
CHATS, OWN = "chats", "package.module:Class"
"""The built-in kind of dataset, and the form of names of the user's classes."""
Prepared = Literal["stamps", "digits"]
"""Chats that ``prepare`` writes."""
OF_CHATS = (
    *("sources", "mix_by", "sizes", "prompt", "limit", "media", "on_too_long", "on_broken", "decode_first"),
    *("video_fps", "max_video_tokens", "prepare", "reading"),
)
"""Keys for chats only."""
NOT_WHOLE = ("max_image_tokens", "on_too_large", "max_video_tokens", "max_audio_seconds", "placeholders")
"""Keys of chats only for models built from modules. For a whole checkpoint its processor decides these."""


class Source(Section):
    """One source of chats, in place of ``data.train``, ``validation``, ``limit`` and ``prepare``. An epoch draws as
    many samples as all sources have in total. Not with reading = "stream"."""

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[A-Za-z0-9_.-]+$")]
    """Name in metrics and reports: up to 40 letters, digits and ``._-``."""
    train: Annotated[list[AbsolutePath], Field(min_length=1)]
    """Files to train on, as ``data.train``."""
    validation: list[AbsolutePath] = []
    """Files to validate on. Default: ``data.held_out`` of this source's records."""
    weight: Annotated[float, Field(gt=0.0, le=1e9)] = 1.0
    """Share of the drawn samples or tokens (``mix_by``), relative to the other weights. It does not depend on the
    source's size: a source with a large weight is repeated several times per epoch."""
    limit: Positive | None = None
    """Maximum number of records to train on. They are chosen at random, the same ones each time."""
    media: AbsolutePath | None = None
    """Folder to which media paths are relative. Default: ``data.media``."""
    prompt: str | None = None
    """Question about the media of captions in tars. Default: ``data.prompt``."""


class Data(Section):
    """Training and held-out data. Most keys end with the setting that they belong to: (chats), (own): ``dataset``;
    (random), (stream): ``reading``; (ray): ``workers``. A whole checkpoint is a model given by [model] ``path``."""

    dataset: Annotated[str, Field(min_length=1)]
    """chats: your own files, given by ``train`` or ``sources``. "package.module:Class": a class of your own (own),
    derived from interlace.data.SampleDataset."""
    options: dict[str, Any] = {}
    """Arguments of your class, constructed as Class(split, setup, **options) for split "train" and "heldout" (own).
    With ``prepare``: settings of the chats to write, such as ``records``, ``seed``, ``held_out`` and ``languages``."""
    train: list[AbsolutePath] = []
    """Files of chats to train on: JSON lines, JSON, parquet, WebDataset tars (``shard-{000..015}.tar``), or folders
    saved by HuggingFace's datasets or prepared by Energon. Required unless ``sources`` is given (chats). Any files,
    given to your class as ``setup.train`` (own)."""
    validation: list[AbsolutePath] = []
    """Files of chats to validate on. Default: ``held_out`` of the training records. Required with reading = "stream"
    (chats). Any files, as ``setup.validation`` (own)."""
    sources: list[Source] = []
    """Several sources in place of ``train`` and ``validation``, as ``[[data.sources]]``. An epoch draws as many samples
    as all sources have in total, each by its weight (chats)."""
    mix_by: Literal["samples", "tokens"] = "samples"
    """Unit of the weights of sources: drawn samples, or their tokens (chats)."""
    limit: Positive | None = None
    """Maximum number of records to train on. They are chosen at random, the same ones each time (chats, random)."""
    prompt: str | None = None
    """Question about the media of captions in tars. Default: "Describe the picture.", and likewise for clips and
    videos. "": no question (chats)."""
    sizes: Literal["files", "records"] = "files"
    """Origin of media sizes. files: headers of the media files. records: sizes stated in the records, if present
    (images ``width`` and ``height``; clips ``samples`` and ``rate``; videos ``width``, ``height`` and ``seconds``).
    Media with a stated size are not opened before training reads them; a file of another size becomes a blank and is
    counted (chats)."""
    prepare: Prepared | None = None
    """Write missing files before the ranks start, into the folder of ``train``, as ``interlace data`` does. stamps:
    Debian's Tux Paint stamps (pictures, speech, captions in ten languages), or the digits if the stamps are not
    available. digits: scikit-learn's handwritten digits (chats)."""
    media: AbsolutePath | None = None
    """Folder to which media paths are relative. Default: the folder of the file that names them (chats)."""
    tokenizer: AbsolutePath | None = None
    """Folder of the tokenizer and, for whole checkpoints, the processor. Default: the model's folder (chats, own)."""
    chat_template: AbsolutePath | None = None
    """File with a chat template (Jinja), in place of the tokenizer's own (chats, own)."""
    end_of_turn: Annotated[str, Field(min_length=1)] | None = None
    """Special token after each answer, such as ``</s>``, which the model learns to write. For templates that end
    answers without one (LLaVA-1.5's): otherwise the model does not stop (chats, own)."""
    video_fps: Annotated[float, Field(gt=0.0, le=1000.0)] | None = None
    """Frames sampled from a video per second. Default: 1; for a whole checkpoint, the setting of its video processor,
    which may be all frames (chats)."""
    max_video_tokens: Positive = 512
    """Maximum language-model tokens of one video. A longer video gives fewer frames per second, at least one frame
    (chats, without a whole checkpoint)."""
    placeholders: dict[str, Annotated[str, Field(min_length=1)]] = {}
    """Encoder -> token of the tokenizer that stands for its media, such as a reserved one. Default: ``<image>``,
    ``<audio>`` or ``<name>``, added to the tokenizer if missing (chats, own, without a whole checkpoint)."""
    max_tokens: Annotated[int, Field(ge=2, le=MOST)] | None = None
    """Maximum tokens of a sample, media included, and of a row with ``pack``. Default: the model's number of positions
    (chats, own)."""
    on_too_long: Literal["cut", "skip", "error"] = "skip"
    """Handling of a sample over ``max_tokens``. cut: cut before the item that does not fit. skip: leave out and count.
    error: stop and name the sample (chats)."""
    on_broken: Literal["skip", "error"] = "skip"
    """Handling of an invalid record. skip: leave out and list in left_out.txt. error: stop (chats)."""
    decode_first: bool = True
    """Decode every picture and clip once before the first run, and leave out broken ones. false: read only headers;
    media that cannot be decoded in training become blanks, which are counted (chats)."""
    pack: bool = False
    """Fill each microbatch with whole samples up to ``max_tokens``, which is then required. ``train.batch_size`` then
    counts microbatches instead of samples: ``train.microbatches`` times the replicas of the language model (chats,
    own, random)."""
    reading: Literal["random", "stream"] = "random"
    """random: all records are counted before the run; each rank decodes the media that it computes with, and no samples
    are sent. stream: files are read in order, each by one rank, and samples are sent to the ranks that compute with
    them; needs ``validation`` and ``train.steps`` (chats)."""
    readers: Positive | None = None
    """Number of reading ranks, spread evenly. Default: all ranks (stream)."""
    shuffle_buffer: Annotated[int, Field(ge=0, le=MOST)] = 1000
    """Samples in the shuffle buffer of a reader, from which the next one is drawn at random. 0: file order (stream)."""
    exchange_mb: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Maximum size of the samples that one rank sends, or receives, per step [MiB]. Two such buffers are in memory
    (stream)."""
    cache: LocalPath | None = None
    """Folder for fetched files and decoded items. Default: ``$INTERLACE_CACHE``, else ``~/.cache/interlace``."""
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto", "ray"] = "auto"
    """Number of decoding processes per rank. 0: a thread of the rank decodes. ray: tasks on a Ray cluster, for many
    nodes. auto: half of a rank's cores, at most 4, and 0 with fewer than 4 cores. The samples are
    bit-identical with all values."""
    drop_last: bool = False
    """Leave out the samples at the end of an epoch that do not fill a batch, different ones in each epoch. false: the
    last step of an epoch takes the rest, in fewer or smaller microbatches, so that each epoch has all samples
    (random)."""
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    """Number of batches prepared ahead (random)."""
    cache_gb: Annotated[float, Field(ge=0.0, le=1e6)] = 1.0
    """Cache of decoded items during a run [GiB], filled by workers for all ranks of a node. It is in shared memory or,
    if that has no room, in ``cache``; with ray in its object store, for all nodes. Least recently used items are
    evicted first. 0: no cache (random)."""
    ray_address: Annotated[str, Field(min_length=1)] | None = None
    """Address of the Ray cluster. Default: ``$RAY_ADDRESS``, else the cluster that runs on this node (ray)."""
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Fraction of the records kept for validation and never trained on, without ``validation`` files (chats); your
    class has it as ``setup.held_out`` (own)."""
    max_image_tokens: Positive | None = None
    """Maximum patches of one image, before the encoder's ``downsample`` divides them. Default: the patches of the
    image size that the encoder was made for (without a whole checkpoint)."""
    on_too_large: Literal["downscale", "error"] = "downscale"
    """Handling of an image over ``max_image_tokens``. downscale: scale down and keep the aspect ratio. error: an error
    that names the image; a chat with it counts as broken (without a whole checkpoint)."""
    max_audio_seconds: Annotated[float, Field(gt=0.0, le=WEEK)] = 6.0
    """Maximum length of an audio clip [seconds]. Longer clips are skipped and counted (without a whole checkpoint)."""

    @property
    def own(self) -> bool:
        """True for a class of the user, False for chats."""
        return self.dataset != CHATS

    @property
    def of_earlier_version(self) -> bool:
        """True for chats in place of ``dataset = "digits"`` (`interlace.train.config.earlier`)."""
        return not self.own and "byte_encoders" in self.options

    @property
    def row_tokens(self) -> int | None:
        """Maximum tokens of a packed row; None if samples are not packed."""
        return self.max_tokens if self.pack else None

    def image_tokens(self, own: int) -> int:
        """Maximum patches of one image, for an encoder made for images of `own` patches."""
        return self.max_image_tokens or own

    @field_validator("dataset", mode="after")
    @classmethod
    def _known(cls, name: str) -> str:
        if name != CHATS and not re.match(IMPORT, name):
            written = f"; data.prepare = {name!r} writes them as chats" if name in get_args(Prepared) else ""
            raise ValueError(f"there is no dataset {name!r}; {nearest(name, [CHATS])}; your own is {OWN!r}{written}")
        return name

    @field_validator("workers", mode="before")
    @classmethod
    def _one_of_three(cls, value: Any) -> Any:
        if value in ("auto", "ray") or (type(value) is int and 0 <= value <= 1024):
            return value
        raise ValueError(f"a number of processes from 0 to 1024, 'auto' or 'ray' is wanted, not {value!r}")

    @model_validator(mode="after")
    def _keys_fit(self) -> Data:
        if self.ray_address is not None and self.workers != "ray":
            raise ValueError("ray_address is read with workers = 'ray' alone: set that, or remove it")
        if foreign := self.set_of(OF_CHATS if self.own else () if self.prepare else ("options",)):
            raise ValueError(
                f"{foreign[0]} is a key of dataset {CHATS if self.own else OWN!r}, not of {self.dataset!r}: remove it, "
                "or set dataset"
            )
        if not self.own and not self.train and not self.sources:
            raise ValueError(f"dataset {self.dataset!r} needs train, a list of files, or [[data.sources]]")
        own = [key for key in ("train", "validation", "limit", "prepare") if getattr(self, key)]
        if self.sources and own:
            raise ValueError(f"{own[0]} is said beside [[data.sources]]: say it of a source, or leave these out")
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"two sources are called {max(names, key=names.count)!r}: give each a name of its own")
        if self.pack and self.max_tokens is None:
            raise ValueError("pack fills rows up to max_tokens: say how many tokens a row takes")
        return self

    @model_validator(mode="after")
    def _reading_fits(self) -> Data:
        if self.reading == "stream":
            own = [key for key in ("sources", "limit") if getattr(self, key)]
            if own:
                raise ValueError(
                    f"{own[0]} is for data that are read at random: a stream takes one source whole; set "
                    "reading='random'"
                )
            if keys := self.set_of(NOT_STREAM):
                raise ValueError(
                    f"{keys[0]} is of data that are read at random: a stream works one batch ahead, keeps nothing and "
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
        elif keys := self.set_of(STREAM):
            raise ValueError(f"{keys[0]} is a key of reading 'stream', not of 'random': remove it, or set reading")
        return self

    def each_source(self) -> list[Source]:
        """The sources, with defaults from this section filled in; one named "data" if only ``train`` is given."""
        if not self.sources:
            only: dict[str, Any] = {"train": self.train, "validation": self.validation, "limit": self.limit}
            return [Source.model_construct(None, name="data", media=self.media, prompt=self.prompt, **only)]
        defaults = {"media": self.media, "prompt": self.prompt}
        return [
            source.model_copy(update={key: value for key, value in defaults.items() if getattr(source, key) is None})
            for source in self.sources
        ]

    def set_of(self, keys: tuple[str, ...]) -> list[str]:
        """Returns those of `keys` whose value differs from the default. Saved configs write all defaults out."""
        default = type(self).model_construct(dataset=self.dataset)
        return [key for key in keys if getattr(self, key) != getattr(default, key)]
