"""Files to arrays: images at their own resolution, speech to log-mel frames.

- Sizes are read from headers, without decoding (``png_size``, ``svg_size``, ``clip_info``). ``ImageSpec.fit`` and
  ``AudioSpec.shape`` compute the shape of the decoded item from them; ``decode_*`` returns exactly that shape.
- SVG is rendered directly at its target size (a tenth of the time of rendering at its nominal size).
- Arrays are compact (uint8 pixels, float16 mel) so that they can be cached on disk. ``to_tensor`` converts them to
  float32 inputs. Cached and freshly decoded items are equal bit for bit.
"""

from __future__ import annotations

import importlib
import io
import math
import re
import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from interlace.data.opened import member_of, opened, read_head

if TYPE_CHECKING:
    import torch

SAMPLE_RATE = 16_000
HOP = 160  # samples per mel frame: 10 ms
MIN_SAMPLES = 400  # one analysis window (25 ms): the shortest clip that can be transformed
SVG_DPI = 96.0  # CSS: 1in = 96px; without it resvg refuses sizes in pt, mm or cm


class DecodeError(ValueError):
    """An unusable file; the message has its name and the reason."""


class ImageTooLarge(DecodeError):
    """An image that exceeds the token budget."""


@dataclass(frozen=True)
class ImageSpec:
    """Preprocessing of images.

    patch_size: sides are resized to multiples of it (pixels). Use patch x merge when the model merges patches.
    max_tokens: most patches (patch_size squares) per image. Larger images are scaled down, keeping their aspect.
    mean, std: per channel, of pixels in 0..1 (default: SigLIP's, which map pixels to -1..1).
    """

    patch_size: int = 16
    max_tokens: int = 64
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.patch_size < 1 or self.max_tokens < 1:
            raise ValueError(f"patch_size and max_tokens must be at least 1, got {self.patch_size}, {self.max_tokens}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"mean and std need 3 values each, std > 0; got {self.mean}, {self.std}")

    def patches(self, width: float, height: float) -> tuple[int, int]:
        """(rows, columns) at the image's own resolution, ignoring the budget."""
        return max(1, round(height / self.patch_size)), max(1, round(width / self.patch_size))

    def fit(self, width: float, height: float, name: str = "image", *, strict: bool = False) -> tuple[int, int, int]:
        """Shape (3, H, W) after resizing an image of this size (pixels).

        Raises ImageTooLarge when one side is more than ``max_tokens`` times the other: even a single row of patches
        could not keep its shape. With ``strict``, also raised when the image would be scaled down at all.
        """
        rows, columns = self.patches(width, height)
        budget = self.max_tokens
        if max(width, height) > budget * min(width, height):
            raise ImageTooLarge(
                f"{name}: {width:g}x{height:g} pixels is too elongated for {budget} image tokens of "
                f"{self.patch_size}x{self.patch_size}; raise max_image_tokens or leave the file out"
            )
        if rows * columns > budget:
            if strict:
                raise ImageTooLarge(
                    f"{name}: {width:g}x{height:g} pixels needs {rows}x{columns} = {rows * columns} image tokens, "
                    f'the budget is {budget}; raise max_image_tokens or set on_too_large="downscale"'
                )
            exact_rows, exact_columns = height / self.patch_size, width / self.patch_size
            scale = math.sqrt(budget / (exact_rows * exact_columns))
            rows, columns = max(1, int(exact_rows * scale)), max(1, int(exact_columns * scale))
            # If one side is clamped to one patch, the other can exceed the budget.
            rows, columns = min(rows, budget // columns or 1), min(columns, budget // rows or 1)
        return 3, rows * self.patch_size, columns * self.patch_size


@dataclass(frozen=True)
class AudioSpec:
    """Preprocessing of speech: ``mel_bins`` log-mel features per 10 ms frame. Longer clips are left out."""

    mel_bins: int = 80
    max_seconds: float = 8.0

    def __post_init__(self) -> None:
        if self.mel_bins < 1 or self.max_seconds <= 0:
            raise ValueError(f"mel_bins >= 1 and max_seconds > 0 wanted, got {self.mel_bins}, {self.max_seconds}")

    def shape(self, frames: int, rate: int) -> tuple[int, int]:
        """(mel_bins, mel frames) of a clip of ``frames`` samples at ``rate`` Hz."""
        return self.mel_bins, resampled_length(frames, rate) // HOP


def resampled_length(frames: int, rate: int) -> int:
    """Number of samples after resampling ``frames`` samples from ``rate`` Hz to 16 kHz, rounded as in scipy's
    polyphase resampler."""
    shared = math.gcd(SAMPLE_RATE, rate)
    return -(-frames * (SAMPLE_RATE // shared) // (rate // shared))


# --- sizes without decoding -------------------------------------------------------------------------------


def image_size(path: str | Path) -> tuple[float, float]:
    """(width, height) in pixels from the header alone. Raises DecodeError."""
    return svg_size(path) if str(path).lower().endswith(".svg") else png_size(path)


def png_size(path: str | Path) -> tuple[int, int]:
    """(width, height) from the IHDR chunk. Raises DecodeError for a file that is not a PNG."""
    with open(path, "rb") as file:
        head = file.read(24)
    if len(head) < 24 or head[:8] != b"\x89PNG\r\n\x1a\n" or head[12:16] != b"IHDR":
        raise DecodeError(f"{path}: not a PNG file (its header is missing or cut short)")
    width, height = struct.unpack(">II", head[16:24])
    if not width or not height:
        raise DecodeError(f"{path}: PNG of {width}x{height} pixels")
    return width, height


_UNITS = {"": 1.0, "px": 1.0, "pt": 96 / 72, "pc": 16.0, "in": 96.0, "cm": 96 / 2.54, "mm": 96 / 25.4}


def svg_size(path: str | Path) -> tuple[float, float]:
    """(width, height) in CSS pixels: the root's attributes, else its viewBox. Raises DecodeError."""
    text = read_head(path, 1 << 16).decode("utf-8", errors="replace")
    root = re.search(r"<(?:\w+:)?svg\b[^>]*>", text, re.DOTALL)
    if root is None:
        raise DecodeError(f"{path}: no <svg> element in the first 64 KiB")
    attributes = dict(re.findall(r"\s([\w:]+)\s*=\s*[\"']([^\"']*)[\"']", root[0]))
    box = [float(x) for x in re.findall(r"[-+]?[\d.]+(?:e[-+]?\d+)?", attributes.get("viewBox", ""))]
    box_width, box_height = box[2:4] if len(box) == 4 else (0.0, 0.0)
    width = _css_length(attributes.get("width", "")) or box_width
    height = _css_length(attributes.get("height", "")) or box_height
    if width <= 0 or height <= 0:
        raise DecodeError(f"{path}: SVG without a usable width and height or viewBox")
    return width, height


def _css_length(value: str) -> float:
    match = re.fullmatch(r"\s*([\d.]+(?:e[-+]?\d+)?)\s*(px|pt|pc|in|cm|mm)?\s*", value, re.IGNORECASE)
    return float(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0.0


def clip_info(path: str | Path) -> tuple[int, int]:
    """(samples, sample rate in Hz) from the container's headers. Raises DecodeError."""
    soundfile = _library("soundfile")
    try:
        with opened(path) as file:
            info = soundfile.info(file)
    except Exception as error:  # libsndfile's own error types; any failure means an unusable file
        raise DecodeError(f"{path}: {error}") from error
    if info.frames <= 0 or info.samplerate <= 0:
        raise DecodeError(f"{path}: clip without samples")
    return int(info.frames), int(info.samplerate)


# --- decoding ---------------------------------------------------------------------------------------------


def decode_image(path: str | Path, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 [3, H, W] of a PNG or SVG resized to ``shape``, on white. Raises DecodeError."""
    image_module = _library("PIL.Image")
    _, height, width = shape
    try:
        if str(path).lower().endswith(".svg"):
            image = _render_svg(path, width, height)
        else:
            with opened(path) as source, image_module.open(source) as file:
                check_depth(file)
                image = _library("PIL.ImageOps").exif_transpose(file)
        return fitted(image, shape)
    except DecodeError:
        raise
    except Exception as error:  # pillow and resvg raise many types on broken files
        raise DecodeError(f"{path}: {error}") from error


def fitted(image: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 [3, H, W] of a picture (PIL) resized to ``shape``, on white."""
    image_module, (_, height, width) = _library("PIL.Image"), shape
    image = image.convert("RGBA")
    if image.size != (width, height):
        # Premultiplied alpha: otherwise the colour of transparent pixels bleeds into the edges.
        resample = image_module.Resampling.BICUBIC
        image = image.convert("RGBa").resize((width, height), resample).convert("RGBA")
    white = image_module.new("RGBA", image.size, (255, 255, 255, 255))
    pixels = np.asarray(image_module.alpha_composite(white, image).convert("RGB"))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def check_depth(image: Any) -> None:
    """Raises ValueError for a picture (PIL) with more than 8 bits of grey: Pillow would clip them to white."""
    if image.mode[0] in "IF":
        raise ValueError("has pixels of 16 or 32 bits, which cannot be scaled as it was meant: save it with 8 bits")


def _render_svg(path: str | Path, width: int, height: int) -> Any:
    resvg = _library("resvg_py")
    own_width, own_height = svg_size(path)
    scale = max(width / own_width, height / own_height)  # cover the target; the resize after it only shrinks
    rendered = resvg.svg_to_bytes(
        **({"svg_path": str(path)} if member_of(path) is None else {"svg_string": read_head(path, -1).decode("utf-8")}),
        width=max(1, math.ceil(own_width * scale)),
        height=max(1, math.ceil(own_height * scale)),
        dpi=SVG_DPI,
        skip_system_fonts=True,  # the picture must not depend on the machine's fonts
    )
    image = _library("PIL.Image").open(io.BytesIO(bytes(rendered))).convert("RGBA")
    if image.getextrema()[3][1] == 0:
        raise DecodeError(f"{path}: SVG renders to nothing (drawn with fonts only?)")
    return image


def decode_audio(path: str | Path, spec: AudioSpec) -> np.ndarray:
    """float16 [mel_bins, frames]: mono mix, 16 kHz, Whisper's log-mel features. Raises DecodeError."""
    soundfile = _library("soundfile")
    try:
        with opened(path) as file:
            samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except Exception as error:  # libsndfile's own error types
        raise DecodeError(f"{path}: {error}") from error
    return log_mel(samples.mean(axis=1), rate, spec, name=str(path))


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Mono ``samples`` (float32 [n]), resampled from ``rate`` Hz to 16 kHz."""
    if rate == SAMPLE_RATE:
        return samples
    up, down = SAMPLE_RATE // math.gcd(SAMPLE_RATE, rate), rate // math.gcd(SAMPLE_RATE, rate)
    found: np.ndarray = _library("scipy.signal").resample_poly(samples, up, down, window=_low_pass(up, down))
    return found


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
    taps = _library("scipy.signal").firwin(20 * rate + 1, 1.0 / rate, window=("kaiser", 5.0))
    return taps.astype(np.float32)


@lru_cache(maxsize=4)
def _extractor(mel_bins: int) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=mel_bins, sampling_rate=SAMPLE_RATE, hop_length=HOP)


def to_tensor(array: np.ndarray, spec: ImageSpec | AudioSpec) -> torch.Tensor:
    """float32 model input: pixels normalised by the spec's mean and std, mel features as they are."""
    import torch  # imported here: workers that decode pictures do not need torch

    if isinstance(spec, AudioSpec):
        return torch.from_numpy(array.astype(np.float32))
    mean = np.asarray(spec.mean, dtype=np.float32)[:, None, None]
    std = np.asarray(spec.std, dtype=np.float32)[:, None, None]
    return torch.from_numpy((array.astype(np.float32) / np.float32(255.0) - mean) / std)


def load_image(path: str | Path, spec: ImageSpec) -> torch.Tensor:
    """float32 [3, H, W] of one file, sized by the spec: for generation and demos. Raises DecodeError."""
    try:
        size = svg_size(path) if str(path).lower().endswith(".svg") else _pillow_size(path)
    except OSError as error:
        raise DecodeError(f"{path}: {error}") from error
    return to_tensor(decode_image(path, spec.fit(size[0], size[1], str(path))), spec)


def _pillow_size(path: str | Path) -> tuple[int, int]:
    with _library("PIL.Image").open(path) as image:
        return upright_size(image)


def upright_size(image: Any) -> tuple[int, int]:
    """(width, height) of an opened picture (PIL) as displayed, with its EXIF orientation applied."""
    width, height = image.size
    return (height, width) if image.getexif().get(0x0112) in (5, 6, 7, 8) else (width, height)


def load_audio(path: str | Path, spec: AudioSpec) -> torch.Tensor:
    """float32 [mel_bins, frames] of one file: for generation and demos. Raises DecodeError, also when too long."""
    frames, rate = clip_info(path)
    if frames > spec.max_seconds * rate:
        raise DecodeError(
            f"{path}: {frames / rate:.1f} s is longer than max_audio_seconds = {spec.max_seconds:g}; "
            "cut the clip or raise the limit"
        )
    return to_tensor(decode_audio(path, spec), spec)


def modality_of(spec: ImageSpec | AudioSpec) -> str:
    """ "vision" or "audio": the modality of a spec."""
    return "audio" if isinstance(spec, AudioSpec) else "vision"


@cache
def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{_missing(name)} ({error})") from error


def _missing(name: str) -> str:
    return f"{name} is needed to read this data: pip install 'interlace[data]'"
