"""Modalities: kinds of media, from the suffix of a file to the inputs of an encoder, behind one registry.

- `base`: `Modality`, its registry, and the types that it shares with data and models.
- `image`, `video`, `audio`: the built-in ones. `limits`: limits of single files. `files`: paths and members of tars.

A modality of your own is a subclass of `Modality` and a call of `register`.
"""

from __future__ import annotations

from interlace.modalities.audio import Audio
from interlace.modalities.base import (
    Modality,
    Sampled,
    all_modalities,
    named,
    names,
    of_argument,
    of_suffix,
    register,
    unregister,
)
from interlace.modalities.image import Image
from interlace.modalities.video import Video

# This order numbers the kinds of media in prepared data.
IMAGE, VIDEO, AUDIO = register(Image()), register(Video()), register(Audio())

__all__ = [
    "AUDIO",
    "IMAGE",
    "VIDEO",
    "Modality",
    "Sampled",
    "all_modalities",
    "named",
    "names",
    "of_argument",
    "of_suffix",
    "register",
    "unregister",
]
