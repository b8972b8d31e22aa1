"""Limits that a record may set for a file, such as the pixels of a picture or the part of a video that is shown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Limits that a record sets for a file, under the names of Qwen's vision utilities.

    max_pixels, min_pixels: of a picture, or of each frame, after the processor has resized it. resized_height,
    resized_width: its size in pixels before the processor. video_start, video_end: the part shown, in seconds; its
    times count from video_start. fps, nframes: number of frames taken, per second or in total.
    """

    max_pixels: int | None = None
    min_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    video_start: float | None = None
    video_end: float | None = None
    fps: float | None = None
    nframes: int | None = None

    @property
    def resized(self) -> tuple[int, int]:
        """(width, height) before the processor; (0, 0): unchanged from the file."""
        return self.resized_width or 0, self.resized_height or 0

    def text(self) -> str:
        """The limits as text, in the record's notation."""
        return ", ".join(f"{key} = {value:g}" for key, value in vars(self).items() if value is not None)


NO_LIMITS = Limits()
PIXELS = ("max_pixels", "min_pixels", "resized_height", "resized_width")
_SECONDS = ("video_start", "video_end", "fps")
FRAMES = (*_SECONDS, "nframes")


def limits_of(settings: Mapping[str, Any], kind: str, names: Collection[str]) -> Limits:
    """The limits among the keys of a file of this kind, which may have those of `names`. Raises ValueError for invalid
    values."""
    given = {key: settings[key] for key in names if settings.get(key) is not None}
    if not given:
        return NO_LIMITS
    for key, value in given.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**31
        if not number or (value == 0 and key != "video_start") or (key not in _SECONDS and value != int(value)):
            what = "number" if key in _SECONDS else "whole number"
            raise ValueError(f"{kind} has {key} = {value!r}; a {what} above 0 is wanted")
    kept: dict[str, Any] = {key: (float if key in _SECONDS else int)(value) for key, value in given.items()}
    made = Limits(**kept)
    if (made.resized_height is None) != (made.resized_width is None):
        raise ValueError(f"{kind} has only one of resized_height and resized_width: give both")
    if made.resized_height is not None and (made.max_pixels or made.min_pixels):
        raise ValueError(f"{kind} has a size and limits on its pixels ({made.text()}): give one of the two")
    if made.fps is not None and made.nframes is not None:
        raise ValueError(f"{kind} has both fps and nframes: give one of the two")
    if made.min_pixels and made.max_pixels and made.min_pixels > made.max_pixels:
        raise ValueError(f"{kind} has {made.text()}: the least is more than the most")
    if made.video_end is not None and made.video_end <= (made.video_start or 0.0):
        raise ValueError(f"{kind} has {made.text()}: the end does not come after the start")
    return made
