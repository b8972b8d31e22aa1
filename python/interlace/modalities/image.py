"""Pictures: read at their own resolution, as pixels of an encoder or for a processor.

- Sizes are read from headers, without decoding. ``ImageSpec.fit`` computes the shape of the decoded item from them;
  ``decode_image`` returns exactly that shape.
- SVG is rendered directly at its target size (a tenth of the time of rendering at its nominal size).
- Arrays are uint8 pixels, so that they can be cached on disk. ``ImageSpec.tensor`` converts them to float32 inputs.
  Cached and freshly decoded items are equal bit for bit.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from interlace.modalities.base import DataSettings, Geometry, Modality, Scaling, Shape, Size, Spec
from interlace.modalities.errors import BrokenSampleError, DecodeError
from interlace.modalities.files import check_file, library, member_of, opened, read_head
from interlace.modalities.limits import PIXELS, Limits

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from torch import Tensor

    from interlace.modalities.base import ProcessorPart

SVG_DPI = 96.0  # CSS: 1in = 96px; without it resvg refuses sizes in pt, mm or cm
BLANK = (200, 90, 30)  # no channel is 0 after normalisation, which distinguishes it from padding (0)
THUMBNAIL = 160  # pixels per side


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
    modality: ClassVar[str] = "image"

    def __post_init__(self) -> None:
        if self.patch_size < 1 or self.max_tokens < 1:
            raise ValueError(f"patch_size and max_tokens must be at least 1, got {self.patch_size}, {self.max_tokens}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"mean and std need 3 values each, std > 0; got {self.mean}, {self.std}")

    def fit(self, width: float, height: float, name: str = "image", *, strict: bool = False) -> tuple[int, int, int]:
        """Shape (3, H, W) after resizing an image of this size (pixels).

        Raises ImageTooLarge when one side is more than ``max_tokens`` times the other: even a single row of patches
        could not keep its shape. With ``strict``, also raised when the image would be scaled down at all.
        """
        rows, columns = max(1, round(height / self.patch_size)), max(1, round(width / self.patch_size))
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

    def item_shape(self, path: str, size: Size, limits: Limits, *, strict: bool) -> Shape:
        """Shape (3, H, W) of a picture of `size` pixels, or of a frame. Raises ImageTooLarge, and BrokenSampleError for
        limits that it cannot keep."""
        width, height = (size[0], size[1]) if limits.resized_width is None else limits.resized
        shape = self.fit(width, height, path, strict=strict or limits.resized_width is not None)
        if limits.max_pixels is not None and shape[1] * shape[2] > limits.max_pixels:
            try:
                smaller = replace(self, max_tokens=limits.max_pixels // self.patch_size**2)
                shape = smaller.fit(width, height, path)
            except ValueError:
                raise BrokenSampleError(
                    "key",
                    f"{path}: {limits.text()}: too few for {width:g}x{height:g} in patches of {self.patch_size}",
                ) from None
        if shape[1] * shape[2] < (limits.min_pixels or 0):
            raise BrokenSampleError("key", f"{path}: {limits.text()}: pictures are never made larger here")
        return shape

    def tensor(self, array: np.ndarray) -> Tensor:
        """float32 [3, H, W] of uint8 pixels, normalised by mean and std."""
        import torch  # imported here: workers that decode pictures do not need torch

        mean = np.asarray(self.mean, dtype=np.float32)[:, None, None]
        std = np.asarray(self.std, dtype=np.float32)[:, None, None]
        return torch.from_numpy((array.astype(np.float32) / np.float32(255.0) - mean) / std)


# --- sizes without decoding -------------------------------------------------------------------------------
def image_size(path: str | Path) -> tuple[float, float]:
    """(width, height) in pixels from the header alone, as `picture_size`. Raises DecodeError."""
    try:
        return picture_size(str(path), decode=False)
    except BrokenSampleError as error:
        raise DecodeError(str(error)) from None


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


def picture_size(path: str, *, decode: bool) -> tuple[float, float]:
    """(width, height) of a picture as displayed, with its EXIF orientation applied; of a drawing, in CSS pixels.

    Read from the header; decode: also decode the whole file, which detects damaged ones. Raises BrokenSampleError.
    """
    check_file(path)
    image_module = library("PIL.Image")
    try:
        if path.lower().endswith(".svg"):
            size = svg_size(path)
            if decode:
                decode_image(path, (3, 16, 16))
            return size
        with opened(path) as source, image_module.open(source) as image:
            check_depth(image)
            # For PNG, Pillow also looks for EXIF data after the pixels, and decodes them on the way.
            must_decode = decode or image.format != "PNG" or "exif" in image.info
            width, height = upright_size(image) if must_decode else image.size
            if decode:
                image.load()
    except Exception as error:  # pillow raises many types on broken files
        raise BrokenSampleError("broken file", f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    return int(width), int(height)


# --- decoding ---------------------------------------------------------------------------------------------


def decode_image(path: str | Path, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 [3, H, W] of a PNG or SVG resized to ``shape``, on white. Raises DecodeError."""
    image_module = library("PIL.Image")
    _, height, width = shape
    try:
        if str(path).lower().endswith(".svg"):
            image = _render_svg(path, width, height)
        else:
            with opened(path) as source, image_module.open(source) as file:
                check_depth(file)
                image = library("PIL.ImageOps").exif_transpose(file)
        return fitted(image, shape)
    except DecodeError:
        raise
    except Exception as error:  # pillow and resvg raise many types on broken files
        raise DecodeError(f"{path}: {error}") from error


def fitted(image: Picture, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 [3, H, W] of a picture resized to ``shape``, on white."""
    image_module, (_, height, width) = library("PIL.Image"), shape
    image = image.convert("RGBA")
    if image.size != (width, height):
        # Premultiplied alpha: otherwise the colour of transparent pixels bleeds into the edges.
        resample = image_module.Resampling.BICUBIC
        image = image.convert("RGBa").resize((width, height), resample).convert("RGBA")
    white = image_module.new("RGBA", image.size, (255, 255, 255, 255))
    pixels = np.asarray(image_module.alpha_composite(white, image).convert("RGB"))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def check_depth(image: Picture) -> None:
    """Raises ValueError for a picture with more than 8 bits of grey: Pillow would clip them to white."""
    if image.mode[0] in "IF":
        raise ValueError("has pixels of 16 or 32 bits, which cannot be scaled as it was meant: save it with 8 bits")


def _render_svg(path: str | Path, width: int, height: int) -> Picture:
    resvg = library("resvg_py")
    own_width, own_height = svg_size(path)
    scale = max(width / own_width, height / own_height)  # cover the target; the resize after it only shrinks
    rendered = resvg.svg_to_bytes(
        **({"svg_path": str(path)} if member_of(path) is None else {"svg_string": read_head(path, -1).decode("utf-8")}),
        width=max(1, math.ceil(own_width * scale)),
        height=max(1, math.ceil(own_height * scale)),
        dpi=SVG_DPI,
        skip_system_fonts=True,  # the picture must not depend on the machine's fonts
    )
    image = library("PIL.Image").open(io.BytesIO(bytes(rendered))).convert("RGBA")
    if image.getextrema()[3][1] == 0:
        raise DecodeError(f"{path}: SVG renders to nothing (drawn with fonts only?)")
    return image


def load_image(path: str | Path, spec: ImageSpec) -> Tensor:
    """float32 [3, H, W] of one file, sized by the spec: for generation and demos. Raises DecodeError."""
    width, height = image_size(path)
    return spec.tensor(decode_image(path, spec.fit(width, height, str(path))))


def upright_size(image: Picture) -> tuple[int, int]:
    """(width, height) of an opened picture as displayed, with its EXIF orientation applied."""
    width, height = image.size
    return (height, width) if image.getexif().get(0x0112) in (5, 6, 7, 8) else (width, height)


# --- for processors ---------------------------------------------------------------------------------------


def read_picture(path: str) -> Picture:
    """The upright picture, as HuggingFace's processors load it. Raises DecodeError."""
    from transformers.image_utils import load_image

    try:
        check_file(path)
        with opened(path) as file:
            return load_image(file if isinstance(file, str) else library("PIL.Image").open(file))
    except Exception as error:
        raise DecodeError(f"{path}: {error}") from error


@lru_cache(maxsize=8)  # a large one takes a while to fill
def blank_picture(size: tuple[int, int]) -> Picture:
    """A uniform picture of `size`."""
    return library("PIL.Image").new("RGB", size, BLANK)


def _given_size(size: tuple[int, int], limits: Limits, part: ProcessorPart) -> tuple[int, int]:
    """(width, height) of a picture as passed to a processor's part. `resized_width` and `resized_height` are rounded to
    a size that the processor does not change."""
    if limits.resized == (0, 0):
        return size
    made = part([blank_picture(limits.resized)], return_tensors="pt")
    _, rows, columns = (int(side) for side in made["image_grid_thw"][0])
    return columns * part.patch_size, rows * part.patch_size


# --- the modality -----------------------------------------------------------------------------------------


class Image(Modality):
    """Pictures, and drawings (SVG). Size: (width, height) in pixels, upright. Items: (3, H, W)."""

    name = "image"
    suffixes = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".svg")
    question = "Describe the picture."
    wanted = "images (3, height, width) of square patches"
    size_keys = ("width", "height")
    limits = PIXELS
    encoder = "vision"
    arguments = ("pixel_values",)
    processor_parts = ("image_processor",)
    processor_data = ("pixel_values",)
    processor_about: ClassVar[Mapping[str, str]] = {"image_grid_thw": "grid_thw", "image_sizes": "image_sizes"}
    processor_arguments: ClassVar[Mapping[str, Any]] = {"images_kwargs": {"return_tensors": "pt"}}

    def probe(self, path: str, *, decode: bool) -> Size:
        """See Modality."""
        return picture_size(path, decode=decode)

    def load(self, path: str, spec: Spec, shapes: Sequence[Shape], limits: Limits) -> list[np.ndarray]:
        """uint8 [3, H, W] of each shape."""
        return [decode_image(path, (shape[0], shape[1], shape[2])) for shape in shapes]

    def spec(self, geometry: Geometry, data: DataSettings) -> ImageSpec | None:
        """See Modality."""
        patch = geometry.patch
        if patch is None or patch[0] != patch[1] or geometry.scaling is None:
            return None
        own = math.prod(side // patch[0] for side in geometry.shape[1:])
        budget = max(1, data.image_tokens(own) // geometry.unit**2)
        return ImageSpec(patch[0] * geometry.unit, budget, *geometry.scaling())

    def blank(self, path: str, size: Size, limits: Limits, part: ProcessorPart, who: str) -> Picture:
        """A uniform picture."""
        if path.lower().endswith(".svg"):
            raise BrokenSampleError(
                "no encoder", f"{path}: a drawing (SVG), which {who} does not read: save it as a PNG"
            )
        return blank_picture(_given_size((int(size[0]), int(size[1])), limits, part))

    def read(self, path: str, limits: Limits, part: ProcessorPart) -> Picture:
        """The upright picture."""
        picture = read_picture(path)
        size = _given_size(picture.size, limits, part)
        return picture if size == picture.size else picture.resize(size, resample=library("PIL.Image").BICUBIC)

    def preview(self, path: str, name: str) -> str:
        """A thumbnail with the size of the picture."""
        if path.lower().endswith(".svg"):
            return super().preview(path, name)
        picture = read_picture(path)
        size = f"{picture.width} x {picture.height}"
        picture.thumbnail((THUMBNAIL, THUMBNAIL), library("PIL.Image").Resampling.BILINEAR)
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=80)
        data = base64.b64encode(buffer.getvalue()).decode()
        return f'<img src="data:image/jpeg;base64,{data}" alt="{name}"><figcaption>{name}, {size}</figcaption>'

    def picture(self, data: Tensor, scaling: Scaling | None) -> tuple[str, np.ndarray] | None:
        """The pixels before they were normalised."""
        if scaling is None or data.dim() != 3:  # patches or tiles of a processor
            return None
        pixels = data.float()
        mean, std = (pixels.new_tensor(values).view(3, 1, 1) for values in scaling)
        pixels = (pixels * std + mean).clamp(0, 1)
        return self.name, (pixels * 255).round().byte().permute(1, 2, 0).numpy()
