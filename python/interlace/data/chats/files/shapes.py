"""Record formats: converts one record of the two common formats to a chat, or reports what is wrong with it.

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "<image>\\n..."}, {"from": "gpt", "value": "..."}], "image": "a.png"}

Mixed forms are supported: messages whose text has tags (<image>, <video>, <audio>) with the files listed beside them
(`images`, `videos`, `audios`); typed items without a file, which take the next of these lists; `system` beside the
turns.

Every key is read, refused by name or recorded as ignored (`keys` has the tables).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from interlace.data.chats.files.keys import (
    FILE_KEYS,
    NOTHING,
    REFUSED_FILE,
    REFUSED_RECORD,
    TURNS,
    WEIGHTS,
    record_keys,
    refused_turn,
    unread,
)
from interlace.modalities import all_modalities, named, names
from interlace.modalities.errors import BrokenSampleError
from interlace.modalities.limits import NO_LIMITS, Limits, limits_of

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
NO_WORD = re.compile(r"[^\w.-]+")
LONGEST_KIND = 40


@dataclass(frozen=True)
class Part:
    """Part of a turn: kind "text" with its text, or the name of a modality with the path of its file.

    stated: size in the record, in the form of `Modality.probe`; (): none. limits: limits set in the record.
    """

    kind: str
    text: str = ""
    path: str = ""
    stated: tuple[float, ...] = ()
    limits: Limits = NO_LIMITS


@dataclass(frozen=True)
class Turn:
    """One message. learn: True if it has a loss (assistant turns only)."""

    role: str
    parts: tuple[Part, ...]
    learn: bool


@dataclass(frozen=True)
class Chat:
    """A checked record: an optional system turn, then alternating user and assistant turns, the assistant last.

    A chat that ends with a user turn is a prompt: the model's turn comes next.

    kind: kind of the question, from the record; its first answer is then scored as right or wrong. "": not a question.
    ignored: keys of the record that are not used, those of turns as "messages[].mood".
    """

    turns: tuple[Turn, ...]
    kind: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def media(self) -> list[Part]:
        """Its media in the order of the text."""
        return [part for turn in self.turns for part in turn.parts if part.kind != "text"]

    @property
    def is_prompt(self) -> bool:
        return self.turns[-1].role != "assistant"

    def prompt(self) -> Chat:
        """The turns before the first answer."""
        first = next(place for place, turn in enumerate(self.turns) if turn.role == "assistant")
        return Chat(self.turns[:first])


def tags() -> re.Pattern[str]:
    """Pattern of the tags that stand for files in a text, such as <image>; its group is the modality."""
    return re.compile(f"<({'|'.join(map(re.escape, names()))})>")


def parse(record: object, folder: Path) -> Chat:
    """The chat of a record; relative paths start at `folder`. Raises BrokenSampleError."""
    if not isinstance(record, Mapping):
        raise BrokenSampleError("record", f"the record is {_kind(record)}, not an object")
    reading = _Reading(record, folder)
    turns = record[reading.key]
    if not isinstance(turns, (list, tuple)) or not turns:
        raise BrokenSampleError("turns", f"{reading.key} is {_kind(turns)}; a list of at least one turn is wanted")
    made = [_turn(turn, number, reading) for number, turn in enumerate(turns, 1)]
    system = record.get("system")
    if not isinstance(system, str) and system not in NOTHING:
        raise BrokenSampleError("content", f"system is {_kind(system)}; text is wanted")
    if system and system.strip():
        made.insert(0, Turn("system", (Part("text", system),), False))
    for beside in reading.files.values():
        beside.check_used()
    _check_order(made)
    if not any(turn.learn for turn in made):
        raise BrokenSampleError("targets", "every answer has weight 0: nothing is left to learn")
    kind = _question(record.get("kind"))
    if not kind and record.get("kind") not in NOTHING:
        reading.ignored["kind"] = None
    return Chat(tuple(made), kind, tuple(reading.ignored))


class _Reading:
    """Parser state for a record: its turns, its files, and the keys that are ignored."""

    def __init__(self, record: Mapping[str, object], folder: Path) -> None:
        given = [key for key in TURNS if record.get(key) not in NOTHING]
        self.key = next(iter(given or [key for key in TURNS if key in record]), "")
        if not self.key:
            raise BrokenSampleError(
                "record",
                f"has neither messages nor conversations, but {sorted(map(str, record))}: write its turns as messages",
            )
        if len(given) > 1:
            raise BrokenSampleError("key", "has both messages and conversations: give one of the two")
        self.folder = folder
        self.ignored: dict[str, None] = {}
        self.files = {kind: _Files(kind, record, self) for kind in names()}
        sizes = {key for each in all_modalities() if self.files[each.name].given for key in each.size_keys}
        self.note("", record, record_keys() | sizes, REFUSED_RECORD)
        if isinstance(record.get("label"), bool):  # otherwise a class label of the user
            raise BrokenSampleError("key", f"has label: {REFUSED_RECORD['chosen']}")

    def note(
        self, where: str, given: Mapping[str, object], read: Collection[str], refused: Mapping[str, str], turn: int = 0
    ) -> None:
        """Records the keys of `given` that are ignored. where: their container, such as "messages[]"; turn: number of
        the turn, if any. Raises BrokenSampleError for a refused key."""
        try:
            for key in unread(given, read, refused):
                self.ignored[f"{where}.{key}" if where else str(key)] = None
        except ValueError as error:
            who = f"turn {turn} " if turn else where and f"{where} "
            raise BrokenSampleError("key", f"{who}{error}") from None

    def file(self, kind: str, value: object, where: str) -> Part:
        """The file given by a path, or by an object with one."""
        path = local_path(value, kind, self.folder)
        if not isinstance(value, Mapping):
            return Part(kind, path=path)
        self.note(where, value, (*FILE_KEYS, *named(kind).size_keys, *named(kind).limits), REFUSED_FILE)
        return Part(kind, path=path, stated=self.sizes(kind, value, where), limits=_limits(value, kind, where))

    def sizes(self, kind: str, given: Mapping[str, object], where: str, *place: int) -> tuple[float, ...]:
        """Same as `stated`; records keys without a usable size as ignored."""
        return stated(kind, given, *place) or self.unsized(kind, given, where)

    def unsized(self, kind: str, given: Mapping[str, object], where: str) -> tuple[()]:
        """Records size keys without a usable size as ignored."""
        for key in named(kind).size_keys:
            if given.get(key) is not None:
                self.ignored[f"{where}.{key}" if where else key] = None
        return ()


def _limits(given: Mapping[str, object], kind: str, where: str) -> Limits:
    try:
        return limits_of(given, kind, named(kind).limits)
    except ValueError as error:
        raise BrokenSampleError("key", f"{where}: {error}") from None


def _question(kind: object) -> str:
    """The kind of question in a record, in a form usable for metric and file names; "": none."""
    if not isinstance(kind, (str, int)) or isinstance(kind, bool):
        return ""  # a user column with another meaning
    word = NO_WORD.sub("_", str(kind).strip()).strip("_.-")
    return word if len(word) <= LONGEST_KIND else ""


class _Files:
    """The files of one kind that a record lists beside its turns, taken in order."""

    def __init__(self, kind: str, record: Mapping[str, object], reading: _Reading) -> None:
        self.kind, self.record, self.reading, self.tags = kind, record, reading, 0
        keys = [key for key in named(kind).keys if record.get(key) is not None]
        if len(keys) > 1:
            raise BrokenSampleError("media key", f"has both {keys[0]} and {keys[1]}: give one of the two")
        value = record[keys[0]] if keys else []
        self.key = keys[0] if keys else ""
        self.given = bool(keys)
        self.paths = list(value) if isinstance(value, (list, tuple)) else [value]

    def next(self) -> Part:
        self.tags += 1
        if self.tags > len(self.paths):
            return Part(self.kind)  # reported by check_used, which has the total number of tags
        part = self.reading.file(self.kind, self.paths[self.tags - 1], f"{self.key}[]")
        if part.stated:
            self.reading.unsized(self.kind, self.record, "")
            return part
        return replace(part, stated=self.reading.sizes(self.kind, self.record, "", self.tags - 1, len(self.paths)))

    def check_used(self) -> None:
        if self.tags == len(self.paths):
            return
        tag = named(self.kind).tag
        way = f"put {tag} where each file belongs"
        if self.tags > len(self.paths):
            way = f'a tag that is meant as text goes into a typed item: {{"type": "text", "text": "{tag}"}}'
        raise BrokenSampleError(
            "media count", f"the text has {self.tags} {self.kind} tags, but {len(self.paths)} files are listed: {way}"
        )


def stated(kind: str, given: object, place: int = 0, count: int = 1) -> tuple[float, ...]:
    """The size that a record states for a file; () if it is not usable. `given`: the object with the file, or the
    record, whose values are numbers or, for several files, lists (entry `place` of `count`)."""
    if not isinstance(given, Mapping):
        return ()
    sizes = []
    for key in named(kind).size_keys:
        value = given.get(key)
        if isinstance(value, (list, tuple)):
            value = value[place] if len(value) == count else None
        elif count > 1:
            return ()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**31:
            return ()
        sizes.append(named(kind).size_number(value))
    return tuple(sizes)


def local_path(value: object, kind: str, folder: Path) -> str:
    """The absolute path of a file reference. Raises BrokenSampleError for URLs and inline data."""
    if isinstance(value, Mapping):  # {"path": ...}, OpenAI's {"url": ...}
        given = [key for key in FILE_KEYS if value.get(key) not in NOTHING]
        if len(given) > 1 and value[given[0]] != value[given[1]]:
            raise BrokenSampleError("media key", f"{kind} has both {given[0]} and {given[1]}: give one of the two")
        value = value[given[0]] if given else None
    if not isinstance(value, str) or not value:
        raise BrokenSampleError("media key", f"{kind} is {_kind(value)}; the path of a file is wanted")
    if value.startswith("data:"):
        raise BrokenSampleError("url", f"{kind} is inline data: save it to a file and give its path")
    if value[:8].lower() == "file:///":
        value = unquote(urlsplit(value).path)
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", value):
        raise BrokenSampleError(
            "url",
            f"{kind} is {value[:120]}: training reads local files only, as a network that fails would change the "
            "samples; save it to a file and give its path",
        )
    return os.path.join(folder, value)  # an absolute value replaces the folder


def _turn(turn: object, number: int, reading: _Reading) -> Turn:
    role_key, text_key = TURNS[reading.key]
    if not isinstance(turn, Mapping):
        raise BrokenSampleError("turns", f"turn {number} is {_kind(turn)}, not an object")
    reading.note(f"{reading.key}[]", turn, (role_key, text_key, *WEIGHTS), refused_turn(), number)
    missing = [key for key in (role_key, text_key) if key not in turn]
    if missing:
        raise BrokenSampleError("turns", f"turn {number} has no {' and no '.join(missing)}")
    if not isinstance(turn[role_key], str) or turn[role_key] not in ROLES:
        raise BrokenSampleError("role", f"turn {number} is from {turn[role_key]!r}; known: {', '.join(ROLES)}")
    role, content = ROLES[turn[role_key]], turn[text_key]
    if isinstance(content, str):
        parts = _tagged(content, reading.files, newline=reading.key == "conversations")
    elif isinstance(content, (list, tuple)):
        parts = [_typed(item, number, f"{reading.key}[].{text_key}[]", reading) for item in content]
    else:
        raise BrokenSampleError("content", f"turn {number} has content {_kind(content)}; text or a list is wanted")
    learn, media = _learns(turn, role, number), [part.kind for part in parts if part.kind != "text"]
    if learn and media:
        raise BrokenSampleError(
            "type",
            f"turn {number} is an answer with {media[0]} in it, which is not learnt: give the turn "
            '"loss": false, or leave the medium out',
        )
    text = "".join(part.text for part in parts).strip()
    if not text and (role == "system" or not media):
        raise BrokenSampleError("empty", f"turn {number} ({role}) is empty")
    return Turn(role, _merged(parts), learn)


def _tagged(text: str, files: Mapping[str, _Files], *, newline: bool) -> list[Part]:
    """Text split at its tags. newline: one line break next to a tag belongs to the tag, as in LLaVA's files."""
    parts: list[Part] = []
    at = 0
    for tag in tags().finditer(text):
        before = text[at : tag.start()]
        at = tag.end()
        if newline and text.startswith("\n", at):
            at += 1
        elif newline and before.endswith("\n"):
            before = before[:-1]
        parts += [Part("text", before), files[tag[1]].next()]
    return [*parts, Part("text", text[at:])]


def _typed(item: object, number: int, where: str, reading: _Reading) -> Part:
    if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
        raise BrokenSampleError("content", f"turn {number} has an item without a type: {_kind(item)}")
    kind = item["type"].removesuffix("_url")  # image_url: OpenAI's name
    if kind == "text":
        reading.note(where, item, ("type", "text"), refused_turn(), number)
        if not isinstance(item.get("text"), str):
            raise BrokenSampleError("content", f"turn {number} has a text item whose text is {_kind(item.get('text'))}")
        return Part("text", item["text"])
    if kind not in names():
        raise BrokenSampleError("type", f"turn {number} has an item of type {item['type']!r}; known: text, image, ...")
    keys = tuple(dict.fromkeys((item["type"], kind, *FILE_KEYS)))
    refused = REFUSED_FILE | {"text": f"the text of a turn is an item of its own, no key of {kind}"}
    reading.note(where, item, ("type", *keys, *named(kind).size_keys, *named(kind).limits), refused, number)
    given = [key for key in keys if item.get(key) is not None]
    if len(given) > 1:
        raise BrokenSampleError("media key", f"{kind} has both {given[0]} and {given[1]}: give one of the two")
    if given or not reading.files[kind].given:
        part = reading.file(kind, item[given[0]] if given else None, ".".join((where, *given)))
    else:
        part = reading.files[kind].next()
    limits = _limits(item, kind, where)
    if NO_LIMITS not in (limits, part.limits):
        raise BrokenSampleError("key", f"{where} has {limits.text()}, and its file {part.limits.text()}: give one")
    known = part.stated or reading.sizes(kind, item, where)
    if part.stated:
        reading.unsized(kind, item, where)
    return replace(part, stated=known, limits=part.limits if limits == NO_LIMITS else limits)


def _merged(parts: list[Part]) -> tuple[Part, ...]:
    """Joins adjacent texts and drops empty ones."""
    merged: list[Part] = []
    for part in parts:
        if part.kind == "text" and merged and merged[-1].kind == "text":
            merged[-1] = Part("text", merged[-1].text + part.text)
        elif part.kind != "text" or part.text:
            merged.append(part)
    return tuple(merged)


def _learns(turn: Mapping[str, object], role: str, number: int) -> bool:
    """True if a turn has a loss: assistant turns do, unless one of WEIGHTS is 0."""
    weights = {key: turn[key] for key in WEIGHTS if turn.get(key) is not None}
    for key, value in weights.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise BrokenSampleError("weight", f"turn {number} has {key} {value!r}; a turn is learnt (1) or not (0)")
    if len(set(map(bool, weights.values()))) > 1:
        raise BrokenSampleError("weight", f"turn {number} has {weights}, which contradict each other: give one of them")
    if role != "assistant" and any(weights.values()):
        raise BrokenSampleError("weight", f"turn {number} is to be learnt, but is the {role}'s: only answers can be")
    return role == "assistant" and all(weights.values())


def _check_order(turns: list[Turn]) -> None:
    roles = [turn.role for turn in turns]
    if "system" in roles[1:]:
        raise BrokenSampleError(
            "order", f"turn {roles.index('system', 1) + 1} is the system's, which can only be first"
        )
    spoken = roles[1:] if roles[0] == "system" else roles
    for place, role in enumerate(spoken):
        wanted = "assistant" if place % 2 else "user"
        if role != wanted:
            where = place + 1 + len(roles) - len(spoken)
            raise BrokenSampleError("order", f"turn {where} is the {role}'s, where the {wanted}'s was due")
    if not spoken or spoken[-1] != "assistant":
        raise BrokenSampleError("order", "the last turn is not the assistant's: there is no answer to learn")


def _kind(value: object) -> str:
    """Type of a JSON value, for messages."""
    if value is None:
        return "missing"
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number"}
    name = words.get(type(value), "a number" if isinstance(value, float) else type(value).__name__)
    return f"an empty {name.split()[-1]}" if value in ("", [], {}) else name
