"""Keys of chat records: keys that are read, and keys that are refused by name because they change the meaning.

All other keys of a record, turn, typed item or file are ignored and listed by ``interlace data check``. A refused
key with empty content is skipped: tables write every column of every row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from interlace.modalities import all_modalities

FILE_KEYS = ("path", "url")
"""Keys for the path in an object that names a file."""
WEIGHTS = ("weight", "train", "loss", "loss_scale")
"""Keys that enable the loss on an answer: 1 or true, 0 or false."""
TURNS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Key of a record's turns -> keys of a turn's role and text."""

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
_REFUSED_TURN = {
    **dict.fromkeys(("tool_calls", "function_call"), _TOOLS),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT),
    **dict.fromkeys(("objects", "bbox", "boxes"), _BOXES),
    "train_detail": "a turn is learnt as a whole, or not: say train",
}
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


def media_keys() -> tuple[str, ...]:
    """Keys under which a record lists its files."""
    return tuple(key for modality in all_modalities() for key in modality.keys)


def record_keys() -> frozenset[str]:
    """Keys of a record that are read."""
    return frozenset((*TURNS, *media_keys(), "system", "kind"))


def refused_turn() -> dict[str, str]:
    """Key of a turn -> reason why the record is left out."""
    return {**_REFUSED_TURN, **dict.fromkeys(media_keys(), _MEDIA_IN_TURN)}


def unread(given: Mapping[str, Any], read: Collection[str], refused: Mapping[str, str]) -> list[str]:
    """The keys of `given` that are ignored: not among `read`. Raises ValueError for one that is refused."""
    ignored = [key for key in given if key not in read]
    for key in ignored:
        if key in refused and not _says_nothing(given[key]) and given[key] != HARMLESS.get(key, NOTHING):
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
