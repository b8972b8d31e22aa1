"""The parts of a HuggingFace processor as chats_processor.py asks them: once per size of blank media, and of real ones
each time.

What a part makes of a picture, a clip or a video depends on its size alone, as far as shapes go. Everything but the
call is the part's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

REMEMBERED = 4096


class Part:
    """A part of a processor; `last` is what it returned last, which processors drop where they only count with it."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.last: Mapping[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._part(*args, **kwargs)
        self.last = dict(made)
        return made


class Videos(Part):
    """A part for videos without memory; `metadata` is what it was told of the last ones, and which frames it took."""

    metadata: Any = ()

    def __call__(self, videos: Any, **kwargs: Any) -> Any:
        from transformers import BatchFeature

        self.metadata = kwargs.get("video_metadata") or ()  # the part writes its choice into these
        return BatchFeature({name: _shown(value) for name, value in super().__call__(videos, **kwargs).items()})


class Remembered(Part):
    """A part that keeps, by the sizes of blank media, what it made of them.

    Kept tensors are without memory: of pictures, whether each is blank (padding) or not, spread over its shape.
    """

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._kept: OrderedDict[Any, dict[str, Any]] = OrderedDict()

    def _of(self, media: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        key = (_sizes(media), repr(sorted(kwargs.items(), key=lambda item: item[0])))
        if key not in self._kept:
            made = dict(self._part(media, **kwargs))
            self._kept[key] = {name: _light(value) for name, value in made.items()}
            if len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def __call__(self, media: Any, **kwargs: Any) -> Any:
        from transformers import BatchFeature

        self.last = self._of(media, kwargs)
        return BatchFeature(dict(self.last))


class RememberedClips(Remembered):
    """Of clips, each by itself where all get one length: hardly two chats have clips of the same lengths."""

    def __call__(self, media: Any, **kwargs: Any) -> Any:
        from transformers import BatchFeature

        found = [self._of([clip], kwargs) for clip in media]
        shapes = {tuple((name, tuple(value.shape)) for name, value in one.items()) for one in found}
        if len(shapes) > 1:
            return super().__call__(media, **kwargs)
        self.last = {name: torch.cat([torch.as_tensor(one[name]) for one in found]) for name in found[0]}
        return BatchFeature(dict(self.last))


def _shown(value: Any) -> Any:
    """Ones in place of what is on the meta device: processors put videos beside pictures."""
    if isinstance(value, (list, tuple)):
        return [_shown(one) for one in value]
    if isinstance(value, Tensor) and value.is_meta:
        return torch.ones((), dtype=value.dtype).expand(value.shape)
    return value


def _sizes(media: Any) -> Any:
    if isinstance(media, (list, tuple)):
        return tuple(_sizes(one) for one in media)
    return media.size


def _light(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, Tensor) for one in value):
        return [_light(one) for one in value]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return value
    per_item = 3 if value.dim() > 3 else value.dim()
    kept = value.abs().flatten(-per_item).amax(-1).sign()
    return kept[(..., *[None] * per_item)].expand(value.shape)
