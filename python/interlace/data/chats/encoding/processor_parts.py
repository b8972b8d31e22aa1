"""Wrappers for the parts of a HuggingFace processor, used by processor.py: results for blank media are cached by size.

The shapes that a part makes of a picture, a clip or a video depend only on its size. Everything except the call is
passed through to the part.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interlace.data.chats.files.shapes import Part as Medium
from interlace.modalities import Sampled, named
from interlace.modalities.errors import BrokenSampleError
from interlace.modalities.limits import NO_LIMITS

REMEMBERED = 4096


class Part:
    """Wrapper of a part of a processor. `last` is its last output; processors drop it when they only count.

    asked: for each medium of the next call, attributes of the part for this medium, from its record; (): the same
    settings for all.
    """

    asked: Sequence[Mapping[str, Any]] = ()

    def __init__(self, part: Any) -> None:
        self._part = part
        self.last: Mapping[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, media: Any, **kwargs: Any) -> Any:
        from transformers import BatchFeature

        self.last = self._apart(media, kwargs) if any(self.asked) else self._made(media, kwargs, {})
        return BatchFeature(dict(self.last))

    def _made(self, media: Any, kwargs: Mapping[str, Any], settings: Mapping[str, object]) -> dict[str, Any]:
        part = self._part
        if settings:
            part = copy.copy(part)
            vars(part).update(settings)
        return dict(part(media, **kwargs))

    def _apart(self, media: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Processes each medium alone and concatenates the results."""
        metadata = list(_flat(kwargs.get("video_metadata") or ()))
        made = []
        for place, (medium, settings) in enumerate(zip(_flat(media), self.asked, strict=True)):
            own = {name: value for name, value in kwargs.items() if name not in settings}
            if metadata:
                own["video_metadata"] = metadata[place : place + 1]
            made.append(self._made([medium], own, settings))
        return {name: _beside([one[name] for one in made]) for name in made[0]}


def settings_of(medium: Medium, part: Any, who: str, *, sampling: bool) -> dict[str, Any]:
    """Attributes of a processor's part for a medium whose record sets limits. who: the processor;
    sampling: True if the part chooses frames. Raises BrokenSampleError for limits that the part does not support."""
    limits = medium.limits
    if limits == NO_LIMITS:
        return {}
    made: dict[str, Any] = {}
    pixels = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
    if any(pixels.values()) or limits.resized != (0, 0):
        known = getattr(getattr(part, "valid_kwargs", None), "__annotations__", {})
        if not {"min_pixels", "max_pixels"} <= known.keys() or (
            isinstance(named(medium.kind), Sampled) and limits.resized != (0, 0)
        ):
            raise BrokenSampleError(
                "key", f"{medium.path}: {limits.text()}: {who} takes no such limits of one {medium.kind}: remove them"
            )
    if any(pixels.values()):
        low, high = (pixels[edge] or int(part.size[edge]) for edge in pixels)
        low, high = (min(low, high), high) if limits.max_pixels else (low, max(low, high))
        made["size"] = type(part.size)(shortest_edge=low, longest_edge=high)
    if sampling and (limits.fps or limits.nframes):
        made |= {"do_sample_frames": True, "fps": limits.fps, "num_frames": limits.nframes}
    return made


class Videos(Part):
    """Video part for tensors on the meta device. `metadata` is that of the last call, with the frames taken."""

    metadata: Sequence[Any] = ()

    def __call__(self, media: Any, **kwargs: Any) -> Any:
        self.metadata = list(_flat(kwargs.get("video_metadata") or ()))  # the part writes the chosen frames into these
        return super().__call__(media, **kwargs)

    def _made(self, media: Any, kwargs: Mapping[str, Any], settings: Mapping[str, object]) -> dict[str, Any]:
        return {name: _shown(value) for name, value in super()._made(media, kwargs, settings).items()}


class Remembered(Part):
    """A part that caches its results for blank media, by their sizes.

    Cached tensors take no memory. For pictures they are flags (blank or padding), expanded to the shape.
    """

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._kept: OrderedDict[Any, dict[str, Any]] = OrderedDict()

    def _made(self, media: Any, kwargs: Mapping[str, Any], settings: Mapping[str, object]) -> dict[str, Any]:
        key = (_sizes(media), repr(sorted(kwargs.items(), key=lambda item: item[0])), repr(settings))
        if key not in self._kept:
            made = super()._made(media, kwargs, settings)
            self._kept[key] = {name: _light(value) for name, value in made.items()}
            if len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


class RememberedApart(Remembered):
    """A cache with one entry per medium if all give the same shapes, for media that rarely share a size in a chat."""

    def __call__(self, media: Any, **kwargs: Any) -> Any:
        from transformers import BatchFeature

        outputs = [self._made([medium], kwargs, {}) for medium in media]
        shapes = {tuple((name, tuple(value.shape)) for name, value in one.items()) for one in outputs}
        if len(shapes) > 1:
            return super().__call__(media, **kwargs)
        self.last = {name: torch.cat([torch.as_tensor(one[name]) for one in outputs]) for name in outputs[0]}
        return BatchFeature(dict(self.last))


def _flat(media: object) -> Iterator[Any]:
    """Flattens nested lists of media."""
    if isinstance(media, (list, tuple)):
        for one in media:
            yield from _flat(one)
    else:
        yield media


def _beside(values: Sequence[Any]) -> Any:
    """Concatenates results for single media into the result for all of them."""
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    return [one for value in values for one in value]


def _shown(value: object) -> object:
    """Replaces tensors on the meta device by ones: processors concatenate videos and pictures."""
    if isinstance(value, (list, tuple)):
        return [_shown(one) for one in value]
    if isinstance(value, Tensor) and value.is_meta:
        return torch.ones((), dtype=value.dtype).expand(value.shape)
    return value


def _sizes(media: Any) -> Any:
    if isinstance(media, (list, tuple)):
        return tuple(_sizes(one) for one in media)
    return media.size


def _light(value: object) -> object:
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, Tensor) for one in value):
        return [_light(one) for one in value]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return value
    per_item = 3 if value.dim() > 3 else value.dim()
    kept = value.abs().flatten(-per_item).amax(-1).sign()
    return kept[(..., *[None] * per_item)].expand(value.shape)
