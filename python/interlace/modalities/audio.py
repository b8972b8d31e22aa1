"""Sound: clips as log-mel frames of an encoder, or as samples for a processor.

The number of frames follows from the header (``AudioSpec.shape``); ``decode_audio`` returns exactly that shape. Arrays
are float16 features, so that they can be cached on disk. Cached and freshly decoded items are equal bit for bit.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from interlace.modalities.base import DataSettings, Geometry, Modality, Scaling, Shape, Size, Spec
from interlace.modalities.errors import BrokenSampleError, DecodeError
from interlace.modalities.files import check_file, library, opened
from interlace.modalities.limits import Limits

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import WhisperFeatureExtractor

    from interlace.modalities.base import ProcessorPart

SAMPLE_RATE = 16_000
HOP = 160  # samples per mel frame: 10 ms
MIN_SAMPLES = 400  # one analysis window (25 ms): the shortest clip that can be transformed


@dataclass(frozen=True)
class AudioSpec:
    """Preprocessing of speech: ``mel_bins`` log-mel features per 10 ms frame. Longer clips are left out."""

    mel_bins: int = 80
    max_seconds: float = 8.0
    modality: ClassVar[str] = "audio"

    def __post_init__(self) -> None:
        if self.mel_bins < 1 or self.max_seconds <= 0:
            raise ValueError(f"mel_bins >= 1 and max_seconds > 0 wanted, got {self.mel_bins}, {self.max_seconds}")

    def shape(self, frames: int, rate: int) -> tuple[int, int]:
        """(mel_bins, mel frames) of a clip of ``frames`` samples at ``rate`` Hz."""
        shared = math.gcd(SAMPLE_RATE, rate)  # rounded as in scipy's polyphase resampler
        return self.mel_bins, -(-frames * (SAMPLE_RATE // shared) // (rate // shared)) // HOP

    def item_shape(self, path: str, size: Size, limits: Limits, *, strict: bool) -> Shape:
        """Shape (mel_bins, mel frames) of a clip of (samples, rate). Raises BrokenSampleError for one that is too long
        or too short."""
        samples, rate = int(size[0]), int(size[1])
        if samples > self.max_seconds * rate:
            raise BrokenSampleError("size", f"{path}: {samples / rate:.1f} s, longer than max_audio_seconds")
        shape = self.shape(samples, rate)
        if shape[1] < 2:
            raise BrokenSampleError("size", f"{path}: shorter than 20 ms")
        return shape

    def tensor(self, array: np.ndarray) -> Tensor:
        """float32 [mel_bins, frames], the features as they are."""
        import torch  # imported here: workers that decode clips do not need torch

        return torch.from_numpy(array.astype(np.float32))


def clip_info(path: str | Path) -> tuple[int, int]:
    """(samples, sample rate in Hz) from the container's headers. Raises DecodeError."""
    soundfile = library("soundfile")
    try:
        with opened(path) as file:
            info = soundfile.info(file)
    except Exception as error:  # libsndfile's own error types; any failure means an unusable file
        raise DecodeError(f"{path}: {error}") from error
    if info.frames <= 0 or info.samplerate <= 0:
        raise DecodeError(f"{path}: clip without samples")
    return int(info.frames), int(info.samplerate)


def whole_clip(path: str | Path) -> tuple[np.ndarray, int]:
    """(float32 [samples, channels], rate in Hz) of a clip that is as long as its header says. Raises DecodeError."""
    frames, _ = clip_info(path)
    samples, rate = _samples(path)
    if len(samples) != frames:
        raise DecodeError(f"{path}: has {len(samples)} samples, its header promises {frames}")
    if not np.isfinite(samples).all():
        raise DecodeError(f"{path}: samples are not finite")
    return samples, rate


def _samples(path: str | Path) -> tuple[np.ndarray, int]:
    """(float32 [samples, channels], rate in Hz) of a clip. Raises DecodeError."""
    soundfile = library("soundfile")
    try:
        with opened(path) as file:
            samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except Exception as error:  # libsndfile's own error types
        raise DecodeError(f"{path}: {error}") from error
    return samples, rate


def decode_audio(path: str | Path, spec: AudioSpec) -> np.ndarray:
    """float16 [mel_bins, frames]: mono mix, 16 kHz, Whisper's log-mel features. Raises DecodeError."""
    samples, rate = _samples(path)
    return log_mel(samples.mean(axis=1), rate, spec, name=str(path))


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Mono ``samples`` (float32 [n]), resampled from ``rate`` Hz to 16 kHz."""
    if rate == SAMPLE_RATE:
        return samples
    up, down = SAMPLE_RATE // math.gcd(SAMPLE_RATE, rate), rate // math.gcd(SAMPLE_RATE, rate)
    output: np.ndarray = library("scipy.signal").resample_poly(samples, up, down, window=_low_pass(up, down))
    return output


def log_mel(samples: np.ndarray, rate: int, spec: AudioSpec, name: str = "clip") -> np.ndarray:
    """float16 [mel_bins, frames] of mono ``samples`` (float32 [n]) at ``rate`` Hz. Raises DecodeError."""
    samples = resampled(samples, rate)
    if len(samples) < MIN_SAMPLES:
        raise DecodeError(f"{name}: {len(samples) / SAMPLE_RATE * 1000:.0f} ms is too short for a mel frame")
    if not np.isfinite(samples).all():
        raise DecodeError(f"{name}: samples are not finite")
    features = _extractor(spec.mel_bins)(
        samples, sampling_rate=SAMPLE_RATE, padding=False, truncation=False, return_tensors="np"
    )
    return np.ascontiguousarray(features["input_features"][0].astype(np.float16))


@lru_cache(maxsize=16)
def _low_pass(up: int, down: int) -> np.ndarray:
    """scipy's default anti-aliasing filter, cached per rate: designing it costs more than applying it."""
    rate = max(up, down)
    taps = library("scipy.signal").firwin(20 * rate + 1, 1.0 / rate, window=("kaiser", 5.0))
    return taps.astype(np.float32)


@lru_cache(maxsize=4)
def _extractor(mel_bins: int) -> WhisperFeatureExtractor:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=mel_bins, sampling_rate=SAMPLE_RATE, hop_length=HOP)


def load_audio(path: str | Path, spec: AudioSpec) -> Tensor:
    """float32 [mel_bins, frames] of one file: for generation and demos. Raises DecodeError, also when too long."""
    frames, rate = clip_info(path)
    if frames > spec.max_seconds * rate:
        raise DecodeError(
            f"{path}: {frames / rate:.1f} s is longer than max_audio_seconds = {spec.max_seconds:g}; "
            "cut the clip or raise the limit"
        )
    return spec.tensor(decode_audio(path, spec))


# --- for processors ---------------------------------------------------------------------------------------


def rate_of(part: ProcessorPart) -> int:
    """Sample rate of clips for a processor's part, in Hz."""
    return int(getattr(part, "sampling_rate", SAMPLE_RATE))


def clip_length(path: str, samples: int, rate: int, wanted: int) -> int:
    """Number of samples that `read_clip` returns. Raises ImportError with the missing resampling package."""
    if rate != wanted and importlib.util.find_spec("soxr") is None:
        raise ImportError(
            f"{path}: has {rate} Hz, its model's processor wants {wanted}, and HuggingFace resamples with soxr: "
            "pip install soxr"
        )
    return math.ceil(samples * wanted / rate)


def read_clip(path: str, rate: int) -> np.ndarray:
    """float32 [samples], mixed to mono, at `rate` Hz, by the same steps as HuggingFace's load_audio with
    soundfile (which needs soxr even without resampling). Raises DecodeError, and ImportError."""
    samples, sample_rate = _samples(path)
    mono = samples.T.mean(axis=0) if samples.shape[1] > 1 else samples[:, 0]
    length = clip_length(path, len(mono), sample_rate, rate)
    if sample_rate != rate:
        mono = importlib.import_module("soxr").resample(mono, sample_rate, rate, quality="soxr_hq")
        mono = np.pad(mono, (0, max(0, length - len(mono))))[:length]
    return np.ascontiguousarray(mono, dtype=np.float32)


# --- the modality -----------------------------------------------------------------------------------------


class Audio(Modality):
    """Clips of sound. Size: (samples, rate in Hz). Items: (mel bins, frames)."""

    name = "audio"
    suffixes = (".wav", ".flac", ".ogg", ".mp3", ".opus")
    question = "Describe the sound."
    wanted = "(mel bins, frames) of 10 ms"
    size_keys = ("samples", "rate")
    encoder = "audio"
    arguments = ("input_features", "input_values")
    processor_parts = ("audio_processor", "feature_extractor")
    processor_data = ("input_features", "input_values")
    processor_about: ClassVar[Mapping[str, str]] = {"feature_attention_mask": "frames"}
    processor_arguments: ClassVar[Mapping[str, Any]] = {"audio_kwargs": {"return_tensors": "pt"}}
    cached_apart = True

    def probe(self, path: str, *, decode: bool) -> Size:
        """See Modality."""
        check_file(path)
        try:
            if decode:
                whole_clip(path)
            return clip_info(path)
        except ImportError:
            raise
        except Exception as error:  # libsndfile's own error types
            raise BrokenSampleError("broken file", f"{path}: {str(error).removeprefix(f'{path}: ')}") from None

    def load(self, path: str, spec: Spec, shapes: Sequence[Shape], limits: Limits) -> list[np.ndarray]:
        """float16 [mel bins, frames]."""
        assert isinstance(spec, AudioSpec)
        return [decode_audio(path, spec)] * len(shapes)

    def spec(self, geometry: Geometry, data: DataSettings) -> AudioSpec | None:
        """See Modality."""
        return None if geometry.mel_bins is None else AudioSpec(geometry.mel_bins, data.max_audio_seconds)

    def nominal(self, shape: Shape, data: DataSettings) -> Shape:
        """Clips of the longest length that is read."""
        return (shape[0], min(shape[1], round(data.max_audio_seconds * 100))) if len(shape) == 2 else shape

    def blank(self, path: str, size: Size, limits: Limits, part: ProcessorPart, who: str) -> np.ndarray:
        """A silent clip, float32 [samples], rounded to whole frames: the number of frames is the same."""
        rate = rate_of(part)
        length = clip_length(path, int(size[0]), int(size[1]), rate)
        most = getattr(part, "n_samples", length)
        if length > most:
            raise BrokenSampleError(
                "size", f"{path}: {length / rate:.1f} s, of which {who} keeps {most / rate:g}: cut it"
            )
        hop = int(getattr(part, "hop_length", 1))
        return np.broadcast_to(
            np.float32(0), min(-(-length // hop) * hop, int(getattr(part, "n_samples", length + hop)))
        )

    def read(self, path: str, limits: Limits, part: ProcessorPart) -> np.ndarray:
        """float32 [samples]."""
        return read_clip(path, rate_of(part))

    def picture(self, data: Tensor, scaling: Scaling | None) -> tuple[str, np.ndarray] | None:
        """A grey spectrogram."""
        mel = data.float().flip(0)
        low, high = float(mel.min()), float(mel.max())
        grey = ((mel - low) / max(high - low, 1e-6) * 255).byte().numpy()
        return "speech", np.repeat(grey[:, :, None], 3, axis=2)
