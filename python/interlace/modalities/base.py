"""Modality: one kind of media, from the suffix of its files to the inputs of an encoder; and the registry of all.

To add a modality, subclass `Modality` in a module of your own and `register` one object of it. Everything else in the
package asks the registry: formats of chats, prepared data, encoders, processors, pages and the command line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np

from interlace.modalities.errors import BrokenSampleError
from interlace.modalities.limits import Limits

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import BaseImageProcessor, PretrainedConfig, SequenceFeatureExtractor

    ProcessorPart: TypeAlias = BaseImageProcessor | SequenceFeatureExtractor

Size = tuple[float, ...]
"""Numbers in the header of a file that determine its tokens, such as (width, height) in pixels; at most three."""
Shape = tuple[int, ...]
"""Shape of one item: what an encoder is given of a file."""
Scaling = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation per channel, of values in 0..1."""


class Spec(Protocol):
    """Preprocessing of files for one encoder. Its repr tells all settings: prepared data are named after it."""

    modality: ClassVar[str]
    """Name of the modality whose encoders have such a spec."""

    def item_shape(self, path: str, size: Size, limits: Limits, *, strict: bool) -> Shape:
        """Shape of an item of a file of this size. strict: do not scale it down. Raises BrokenSampleError and
        ValueError."""

    def tensor(self, array: np.ndarray) -> Tensor:
        """float32 input of the encoder, of a decoded array."""


class DataSettings(Protocol):
    """The keys of [data] in a config that bound media."""

    @property
    def video_fps(self) -> float | None: ...
    @property
    def max_video_tokens(self) -> int: ...
    @property
    def max_audio_seconds(self) -> float: ...
    def image_tokens(self, own: int) -> int:
        """Maximum patches of one picture, for an encoder made for pictures of `own` patches."""


@dataclass(frozen=True)
class Geometry:
    """Inputs of one encoder.

    shape: item of its configured size. patch: (height, width) in pixels, if items are pixels. mel_bins: if items are
    (mel bins, frames). unit: patches that its projector joins on each side. scaling: of pixels; raises ConfigError if
    it is unknown.
    """

    shape: Shape
    patch: tuple[int, int] | None = None
    mel_bins: int | None = None
    unit: int = 1
    scaling: Callable[[], Scaling] | None = None


class Modality(ABC):
    """One kind of media."""

    name: str
    """Type of a message item, such as "image"; also the key of its file, and its tag in a text: <image>."""
    suffixes: tuple[str, ...]
    """Endings of file names, in lower case and with the dot."""
    question: str
    """Asked about a file that has a caption and no question."""
    wanted: str
    """Items of its encoders, for messages."""
    size_keys: tuple[str, ...] = ()
    """Keys with which a record may state the size of a file, in the order of `probe`."""
    size_number: type[int] | type[float] = int
    limits: tuple[str, ...] = ()
    """The keys of `Limits` that a record may set for a file."""
    encoder: str = ""
    """Name of its encoder in a whole HuggingFace checkpoint; "": whole checkpoints do not have one."""
    arguments: tuple[str, ...] = ()
    """Main inputs of an encoder's forward that mark encoders of this modality."""

    processor_parts: tuple[str, ...] = ()
    """Attributes of a HuggingFace processor that read it; the first one that a processor has."""
    processor_library: str = ""
    """Package that HuggingFace's part needs beside Pillow."""
    processor_data: tuple[str, ...] = ()
    """Keys of a processor's output with its data; the first one that is there."""
    processor_about: ClassVar[Mapping[str, str]] = {}
    """Keys of a processor's output with numbers about each item -> the keyword of the encoder's call."""
    processor_arguments: ClassVar[Mapping[str, Any]] = {}
    """Arguments of each call of a processor."""
    cached_apart: bool = False
    """True if a chat's files rarely share a size: a processor's results are cached file by file."""

    @property
    def keys(self) -> tuple[str, str]:
        """Keys under which a record lists its files."""
        return self.name, f"{self.name}s"

    @property
    def tag(self) -> str:
        """Its tag in texts, also the default placeholder of its encoder."""
        return f"<{self.name}>"

    @property
    def token_names(self) -> tuple[str, str]:
        """Names of its placeholder in the config of a language model."""
        return f"{self.name}_token_id", f"{self.name}_token_index"

    @property
    def encoded_by(self) -> str:
        """Name of the modality whose encoders take it."""
        return self.name

    @property
    def has_tower(self) -> bool:
        """True if whole HuggingFace checkpoints may have a tower for it, under its name."""
        return bool(self.encoder) and self.encoded_by == self.name

    def item(self, value: Any) -> dict[str, Any]:
        """The item of a message for a file."""
        return {"type": self.name, self.name: value}

    # ------------------------------------------------------------------ files

    @abstractmethod
    def probe(self, path: str, *, decode: bool) -> Size:
        """Size of a file from its header. decode: also decode all of it, which detects damaged files.

        Raises BrokenSampleError.
        """

    def restored(self, numbers: Sequence[float]) -> Size:
        """Result of `probe`, from floats: whole numbers as int."""
        return tuple(int(number) if number == int(number) else number for number in numbers)

    @abstractmethod
    def load(self, path: str, spec: Spec, shapes: Sequence[Shape], limits: Limits) -> list[np.ndarray]:
        """The items of a file, decoded to these shapes. Raises DecodeError."""

    # ------------------------------------------------------------------ encoders

    def inputs(self, module: nn.Module, config: PretrainedConfig, layer_path: str) -> Sequence[Any]:
        """Kinds of inputs (interlace.model.inputs) that an encoder may take; (): those of HuggingFace's encoders.

        module: the encoder, with its layers at `layer_path`; config: of the module around the layers.
        """
        return ()

    @abstractmethod
    def spec(self, geometry: Geometry, data: DataSettings) -> Spec | None:
        """Preprocessing for an encoder; None if it takes other items than `wanted`."""

    def settings(self, data: DataSettings) -> Any:
        """Settings that do not depend on the encoder, for `count`; None: it has none."""
        return None

    def count(self, path: str, size: Size, limits: Limits, tokens: int, settings: Any) -> int:
        """Number of items of a file, each of `tokens` language-model tokens. Raises BrokenSampleError."""
        return 1

    def nominal(self, shape: Shape, data: DataSettings) -> Shape:
        """Shape of the largest item, for an encoder whose items have at most `shape`."""
        return shape

    # ------------------------------------------------------------------ processors

    def blank(self, path: str, size: Size, limits: Limits, part: ProcessorPart, who: str) -> Any:
        """A medium without content, of which a processor makes as many tokens as of the file.

        part: of the processor `who`. Raises BrokenSampleError for a file that it does not read.
        """
        raise BrokenSampleError("no encoder", f"{path}: {who} does not read files of kind {self.name}")

    def read(self, path: str, limits: Limits, part: ProcessorPart) -> Any:
        """The medium for a processor, as HuggingFace reads it. Raises DecodeError."""
        raise BrokenSampleError("no encoder", f"{path}: processors do not read files of kind {self.name}")

    # ------------------------------------------------------------------ pages and pictures

    def preview(self, path: str, name: str) -> str:
        """HTML that shows a file; `name`: of the file, as HTML. Raises DecodeError."""
        return f"<figcaption>{self.name}: {name}</figcaption>"

    def picture(self, data: Tensor, scaling: Scaling | None) -> tuple[str, np.ndarray] | None:
        """An item as (label, uint8 [H, W, 3]); None if it cannot be shown. scaling: of pixels, if it has them."""
        return None


class Sampled(Modality):
    """A modality of frames, of which a processor chooses some."""

    @abstractmethod
    def header(self, path: str, *, decode: bool) -> Any:
        """Size of a file in frames, for `clip`. Raises BrokenSampleError."""

    @abstractmethod
    def clip(self, path: str, header: Any, limits: Limits) -> tuple[int, Any]:
        """First frame shown, and the header of the part shown. Raises BrokenSampleError."""

    @abstractmethod
    def check(self, header: Any, part: ProcessorPart, who: str) -> None:
        """Raises BrokenSampleError for a file with too few frames for the processor's part."""

    @abstractmethod
    def choosing(self, headers: Sequence[Any], fps: float | None) -> dict[str, Any]:
        """Arguments of a processor that chooses frames. fps: frames per second; None: its own rule."""

    @abstractmethod
    def chosen(self, headers: Sequence[Any], frames: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Arguments of a processor that is given the chosen frames."""

    @abstractmethod
    def frames(self, path: str, numbers: Sequence[int]) -> Tensor:
        """The frames of these numbers, for a processor. Raises DecodeError."""


# ---------------------------------------------------------------------- registry

_REGISTERED: dict[str, Modality] = {}


def register(modality: Modality) -> Modality:
    """Adds a modality, in every process that reads its files. Raises ValueError for a name or a suffix that is taken.

    Registering a class a second time has no effect: its module may be imported twice.
    """
    name = modality.name
    if type(_REGISTERED.get(name)) is type(modality):
        return _REGISTERED[name]
    taken = {suffix: other.name for other in _REGISTERED.values() for suffix in other.suffixes}
    if name in _REGISTERED or name == "text":
        raise ValueError(f"the name {name!r} is taken by another modality: choose another one")
    for suffix in modality.suffixes:
        if suffix in taken:
            raise ValueError(f"files {suffix} belong to the modality {taken[suffix]!r} already")
    _REGISTERED[name] = modality
    return modality


def unregister(name: str) -> None:
    """Removes a modality; for tests."""
    del _REGISTERED[name]


def all_modalities() -> tuple[Modality, ...]:
    """All modalities in the order of registration."""
    return tuple(_REGISTERED.values())


def names() -> tuple[str, ...]:
    """Their names."""
    return tuple(_REGISTERED)


def named(name: str) -> Modality:
    """The modality of this name. Raises KeyError."""
    return _REGISTERED[name]


def of_suffix(name: str) -> Modality | None:
    """The modality of a file, by the ending of its name; None: no modality."""
    suffix = f".{name.lower().rpartition('.')[2]}"
    return next((each for each in _REGISTERED.values() if suffix in each.suffixes), None)


def of_argument(argument: str) -> Modality | None:
    """The modality of an encoder whose main input is `argument`."""
    return next((each for each in _REGISTERED.values() if argument in each.arguments), None)
