"""Keys of chat records: keys that are read, and keys that are refused by name because they change the meaning.

All other keys of a record, turn, typed item or file are ignored and listed by ``interlace data check``. A refused
key with empty content is skipped: tables write every column of every row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

FILE_KEYS = ("path", "url")
"""Keys for the path in an object that names a file."""
STATED = {
    "image": (("width", "height"), int),
    "video": (("width", "height", "seconds"), float),
    "audio": (("samples", "rate"), int),
}
"""Kind of media -> the keys with which a record may state a file's size, in the form of `headers.look_at`."""
MEDIA_KEYS = tuple(key for kind in STATED for key in (kind, f"{kind}s"))
"""Keys under which a record lists its files."""
WEIGHTS = ("weight", "train", "loss", "loss_scale")
"""Keys that enable the loss on an answer: 1 or true, 0 or false."""
TURNS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Key of a record's turns -> keys of a turn's role and text."""
RECORD = frozenset((*TURNS, *MEDIA_KEYS, "system", "kind"))

_TOOLS = "tools are not given to the chat template: write them and their calls as text of the turns"
_THOUGHT = (
    "thoughts beside an answer are not given to the chat template: put them into the content, as "
    "<think>...</think> before the answer, or remove the key"
)
_PREFERENCE = "preference training is not supported: remove the key to learn the answer in the turns alone"
_BOXES = "boxes are not written into the text: write them there as the model's family does, and remove the key"
_OF_FILE = 'say it of a file, as in "images": [{"path": "a.png", "max_pixels": 50176}]'
_MEDIA_IN_TURN = "files of a turn are typed items of its content, or listed beside the turns"

REFUSED_RECORD = {
    **dict.fromkeys(("tools", "functions"), _TOOLS),
    **dict.fromkeys(("objects", "bbox", "boxes"), _BOXES),
    **dict.fromkeys(
        ("rejected_response", "rejected_messages", "rejected_images", "chosen", "rejected", "kto_tag"), _PREFERENCE
    ),
    **dict.fromkeys(
        ("max_pixels", "min_pixels", "resized_height", "resized_width", "video_start", "video_end", "nframes"), _OF_FILE
    ),
    "history": "earlier turns belong into the list of turns",
    "chat_template_kwargs": "settings of the template are the same for all records: give a template as "
    "data.chat_template",
}
"""Key of a record -> reason why the record is left out, and the remedy."""
REFUSED_TURN = {
    **dict.fromkeys(("tool_calls", "function_call"), _TOOLS),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT),
    **dict.fromkeys(MEDIA_KEYS, _MEDIA_IN_TURN),
    **dict.fromkeys(("objects", "bbox", "boxes"), _BOXES),
    "train_detail": "a turn is learnt as a whole, or not: say train",
}
"""Key of a turn -> reason."""
REFUSED_FILE = {
    "detail": "the processor decides how finely a picture is read: say max_pixels, or remove the key",
    "bytes": "data inside of a record are not read: save them to a file and give its path",
    **dict.fromkeys(("bbox", "boxes"), _BOXES),
    **dict.fromkeys(("total_pixels", "min_frames", "max_frames"), "say max_pixels and nframes, or remove the key"),
    **dict.fromkeys(("audio_start", "audio_end"), "clips are read whole: cut the file, or remove the key"),
}
"""Key of a typed item, or of an object that names a file -> reason."""
HARMLESS = {"detail": "auto"}
"""Refused key -> a value without effect, which is accepted."""
NOTHING: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class Limits:
    """Limits that a record sets for a picture or a video, under the names of Qwen's vision utilities.

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

    def said(self) -> str:
        """The limits as text, in the record's notation."""
        return ", ".join(f"{key} = {value:g}" for key, value in vars(self).items() if value is not None)


NO_LIMITS = Limits()
_SECONDS = ("video_start", "video_end", "fps")
_OF_VIDEOS = (*_SECONDS, "nframes")
LIMITS = {
    "image": tuple(field.name for field in fields(Limits) if field.name not in _OF_VIDEOS),
    "video": tuple(field.name for field in fields(Limits)),
    "audio": (),
}
"""Kind of media -> the limits that a record may set for its files."""


def limits_of(said: Mapping[str, Any], kind: str) -> Limits:
    """The limits among the keys of a file. Raises ValueError for invalid values."""
    given = {key: said[key] for key in LIMITS[kind] if said.get(key) is not None}
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
        raise ValueError(f"{kind} has a size and limits on its pixels ({made.said()}): give one of the two")
    if made.fps is not None and made.nframes is not None:
        raise ValueError(f"{kind} has both fps and nframes: give one of the two")
    if made.min_pixels and made.max_pixels and made.min_pixels > made.max_pixels:
        raise ValueError(f"{kind} has {made.said()}: the least is more than the most")
    if made.video_end is not None and made.video_end <= (made.video_start or 0.0):
        raise ValueError(f"{kind} has {made.said()}: the end does not come after the start")
    return made


def unread(said: Mapping[str, Any], read: Collection[str], refused: Mapping[str, str]) -> list[str]:
    """The keys of `said` that are ignored: not among `read`. Raises ValueError for one that is refused."""
    ignored = [key for key in said if key not in read]
    for key in ignored:
        if key in refused and not _says_nothing(said[key]) and said[key] != HARMLESS.get(key, NOTHING):
            raise ValueError(f"has {key}: {refused[key]}")
    return [key for key in ignored if key not in refused]


def _says_nothing(value: Any) -> bool:
    """True for a value without content: an empty one, also as JSON text, or a list or table of such values."""
    if isinstance(value, str):
        return value.strip() in ("", "null", "[]", "{}")
    if isinstance(value, Mapping):
        return all(map(_says_nothing, value.values()))
    return value is None or (isinstance(value, (list, tuple)) and all(map(_says_nothing, value)))


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose names must be unique: of two values under one name, Python would keep only the last.

    Raises ValueError.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"an object names {twice!r} twice")
    return made
