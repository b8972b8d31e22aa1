"""scikit-learn's 1,797 handwritten digits: picture -> "seven". A small, real dataset that needs no download.

8x8 grey pixels become RGB and are enlarged to a multiple of the patch. With only 1,463 training pictures, small random
distortions help more than more steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from interlace.data.builtin.base import MediaRef, MultimodalDataset, Recipe
from interlace.data.builtin.byte_tokenizer import ByteTokenizer
from interlace.modalities.audio import AudioSpec
from interlace.modalities.errors import DecodeError
from interlace.modalities.files import library
from interlace.modalities.image import ImageSpec, ImageTooLarge

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ASKED_IN = "en"  # language tag of prompts: language of the answer


class DigitsDataset(MultimodalDataset):
    """One sample per digit of the split, in a fixed order (the loader shuffles).

    image_size: side in pixels, a multiple of patch_size; default: the smallest multiple of at least 8 pixels.
    held_out: share of digits in split "heldout", by a hash of the pixels, so equal pictures stay together.
    length: use only the first ``length`` digits of the split.
    jitter: strength of the distortion of training pictures, drawn anew in every epoch from (seed, epoch, digit). At 1
        they move by up to half a pixel of the 8, turn by up to 8 degrees and stretch by up to 10 % in each direction.
        Held-out pictures are not distorted.
    specs: encoder -> preprocessing of its pictures; by default one encoder "vision", with patch_size, mean etc.
    Raises ImportError without scikit-learn, ValueError for a size that is not a multiple or beyond max_image_tokens, or
    for a negative jitter.
    """

    name = "digits"

    def __init__(
        self,
        *,
        tokens: Mapping[str, Callable[[tuple[int, ...]], int]],
        split: str = "train",
        seed: int = 0,
        held_out: float = 0.2,
        length: int | None = None,
        patch_size: int = 8,
        image_size: int | None = None,
        max_image_tokens: int = 64,
        jitter: float = 0.0,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        specs: Mapping[str, ImageSpec | AudioSpec] | None = None,
        tokenizer: ByteTokenizer | None = None,
    ) -> None:
        if specs is None:
            specs = {"vision": ImageSpec(patch_size, max_image_tokens, tuple(mean), tuple(std)), "audio": AudioSpec()}
            if "vision" not in tokens:
                raise ValueError("the digits are pictures: the model needs a vision encoder (tokens has no 'vision')")
        super().__init__(tokens=tokens, specs=specs, split=split, seed=seed, tokenizer=tokenizer)
        eyes = {name: specs[name] for name in self.encoders("vision")}
        if not eyes:
            raise ValueError("the digits are pictures: the model needs an encoder of images")
        if not 0 < held_out < 1:
            raise ValueError(f"held_out is the share of digits kept for validation, between 0 and 1; got {held_out}")
        if jitter < 0:
            raise ValueError(f"jitter is the strength of the distortion, 0 (none) or more; got {jitter}")
        self.jitter = jitter if split == "train" else 0.0
        self.varies = bool(self.jitter)
        self.shapes = {name: _shape(spec, image_size) for name, spec in eyes.items() if isinstance(spec, ImageSpec)}
        for encoder, shape in self.shapes.items():
            self.count_tokens(encoder, shape)  # cached: a copy in another process cannot ask the encoder
        pictures, targets = digit_pictures()
        chosen = [i for i, p in enumerate(pictures) if digit_held_out(p, held_out) == (split == "heldout")]
        self.indices = chosen if length is None else chosen[:length]
        if not self.indices:
            raise ValueError(f"no digits in split {split!r} with held_out = {held_out}, length = {length}")
        self.targets = targets[self.indices]
        self._pictures = {f"digit/{i}": pictures[i] for i in self.indices}

    def __len__(self) -> int:
        return len(self.indices)

    def recipe(self, index: int, epoch: int | None = None) -> Recipe:
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"digit {index} of {len(self)}")
        index %= len(self)
        source = f"digit/{self.indices[index]}"
        if self.jitter:
            drawn = np.random.default_rng([self.seed, 5, self.epoch if epoch is None else epoch, self.indices[index]])
            source += "".join(f" {self.jitter * value:.4f}" for value in drawn.uniform(-1, 1, 5))
        media = tuple(MediaRef(encoder, source, shape) for encoder, shape in self.shapes.items())
        return Recipe("digit", media, ASKED_IN, WORDS[self.targets[index]])

    def questions(self) -> dict[str, list[Recipe]]:
        return {"digit": [self.recipe(index, 0) for index in range(len(self))]}

    def read(self, item: MediaRef) -> np.ndarray:
        name, *drawn = item.source.split()
        if name not in self._pictures:
            raise DecodeError(f"{item.source}: not a digit of this dataset")
        image_module = library("PIL.Image")
        grey = image_module.fromarray(np.minimum(self._pictures[name] * 16.0, 255).astype(np.uint8))
        if drawn:
            affine, bilinear = image_module.Transform.AFFINE, image_module.Resampling.BILINEAR
            grey = grey.transform(grey.size, affine, _affine(*map(float, drawn)), bilinear)
        if grey.size != item.shape[1:]:
            grey = grey.resize(item.shape[1:], image_module.Resampling.BILINEAR)
        return np.repeat(np.asarray(grey)[None], 3, axis=0)


def _shape(spec: ImageSpec, image_size: int | None) -> tuple[int, int, int]:
    """The shape of a digit for one encoder. Raises ValueError and ImageTooLarge."""
    patch_size = spec.patch_size
    size = -(-8 // patch_size) * patch_size if image_size is None else image_size
    if size < 1 or size % patch_size:
        raise ValueError(f"image_size {size} is no multiple of patch_size {patch_size}")
    side = size // patch_size
    if side * side > spec.max_tokens:
        raise ImageTooLarge(
            f"a digit of {size}x{size} pixels needs {side}x{side} = {side * side} image tokens, the budget is "
            f"{spec.max_tokens}; raise max_image_tokens, or make the digits smaller or the patches larger"
        )
    return 3, size, size


def _affine(right: float, down: float, turn: float, width: float, height: float) -> tuple[float, ...]:
    """Pillow's six coefficients: maps a position in the distorted 8 x 8 picture to one in the original, about the
    centre.

    Arguments in units of `DigitsDataset.jitter`.
    """
    angle = math.radians(8.0 * turn)
    a, b = math.cos(angle) * (1 + 0.1 * width), -math.sin(angle)
    d, e = math.sin(angle), math.cos(angle) * (1 + 0.1 * height)
    return a, b, 4 - 4 * (a + b) + 0.5 * right, d, e, 4 - 4 * (d + e) + 0.5 * down


def digit_pictures() -> tuple[np.ndarray, np.ndarray]:
    """The digits, uint8 [1797, 8, 8] with values 0..16, and their labels, int64 [1797]."""
    digits = library("sklearn.datasets").load_digits()
    return digits.images.astype(np.uint8), digits.target


def digit_held_out(picture: np.ndarray, fraction: float) -> bool:
    """True if a digit is held out, by a hash of its pixels."""
    return int.from_bytes(hashlib.sha256(picture.tobytes()).digest()[:8], "big") < fraction * 2**64
