"""Debian's Tux Paint stamps as chats: pictures, speech in ten languages and captions become questions and answers.

    category       a picture, "What is it?"                  -> the stamp's folder, such as "animals"
    language       a description, "Which language is it?"    -> its name, such as "French"
    image          a picture, "Describe it in French."       -> its caption
    speech         a description, "Write it down."           -> the caption in its language
    image+speech   both, "Write it down."                    -> the caption in the language of the speech
    images         pictures, "Describe them in French."      -> their captions, one per line
    text           a caption, "Say in French: ..."           -> the same caption in another language

The first two have one right answer of one word. Their records name their kind, so that runs count right answers.

Trade-offs: each kind goes through its own files in a seeded order, so every file is used once before any repeats. It
takes the number of records given by its share. There are only some 850 pictures to train on, so each use of one has
another distortion (`stamps_media`), up to `looks` of them. Held-out pictures are not distorted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from interlace.data.builtin.stamps_index import Clip, Stamp, StampIndex, is_held_out

LANGUAGES = {
    "en": "English", "fr": "French", "es": "Spanish", "ca": "Catalan", "ro": "Romanian",
    "da": "Danish", "ru": "Russian", "bg": "Bulgarian", "be": "Belarusian", "el": "Greek",
}  # fmt: skip
KINDS = ("category", "language", "image", "speech", "image+speech", "images", "text")
QUESTIONS = {"category": "What is it?", "language": "Which language is it?"}
HELD_OUT = {"category": None, "language": 512, "image": 64, "speech": 64, "image+speech": 64, "images": 32, "text": 64}
"""Maximum number of held-out records of each kind; None: one per file."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Settings of the chats.

    records: number of training records in total; each kind has its share in `mixture`. held_out: the share of stamps
    for validation, by a hash of the stamp: no stamp and no file is in both splits, in any language or kind.
    looks: number of different distortions of a picture. side: maximum side of a picture in pixels. seconds: maximum
    length of a clip; characters: of a caption; pictures: in a record with several. vocabulary: of the tokenizer.
    byte_encoders: for digits as earlier versions had them, with bytes as tokens: the model's encoders, which have
    placeholders. `looks` distortions of each picture, of `side` pixels, are then all records. None: chats as above.
    """

    records: int = 19_200
    seed: int = 0
    held_out: float = 0.1
    languages: tuple[str, ...] = tuple(LANGUAGES)
    mixture: Mapping[str, float] = field(
        default_factory=lambda: {
            "category": 0.5, "language": 0.2, "image": 0.1, "speech": 0.06, "image+speech": 0.06, "images": 0.04,
            "text": 0.04,
        }
    )  # fmt: skip
    looks: int = 12
    side: int = 128
    seconds: float = 6.0
    characters: int = 80
    pictures: int = 3
    vocabulary: int = 2048
    byte_encoders: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError with the name of an invalid setting."""
        if self.records < 1 or self.seed < 0:
            raise ValueError(f"records {self.records} is at least 1, seed {self.seed} at least 0")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is the share kept for validation, between 0 and 1: {self.held_out:g}")
        if unknown := [name for name in self.languages if name not in LANGUAGES]:
            raise ValueError(f"no language {unknown[0]!r}; there are {', '.join(LANGUAGES)}")
        if not self.languages:
            raise ValueError("languages is empty; name at least one, such as en")
        if unknown := [kind for kind in self.mixture if kind not in KINDS]:
            raise ValueError(f"no kind of record {unknown[0]!r}; there are {', '.join(KINDS)}")
        if min(self.mixture.values(), default=0) < 0 or not sum(self.mixture.values()):
            raise ValueError("the shares of the mixture are 0 or more, and not all 0")

    def table(self) -> dict[str, Any]:
        """The settings in JSON form, for comparison."""
        table = asdict(self) | {"languages": list(self.languages), "mixture": dict(self.mixture)}
        encoders = table.pop("byte_encoders")
        return table if encoders is None else table | {"byte_encoders": list(encoders)}


@dataclass(frozen=True)
class MediaFile:
    """A file to write: `target` from the first readable one of `sources`. A picture is distorted by `seed` unless None;
    a clip (.flac) is not."""

    target: str
    sources: tuple[str, ...]
    seed: tuple[int, ...] | None = None


@dataclass
class Drawn:
    """Records of both splits, their files, and what was left out: file -> why."""

    train: list[Record] = field(default_factory=list)
    validation: list[Record] = field(default_factory=list)
    files: dict[str, MediaFile] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def record(media: Sequence[str], text: str, answer: str, kind: str = "") -> Record:
    """A chat record: media, a text, its answer."""
    content: list[Record] = []
    for path in media:
        name = "audio" if path.endswith(".flac") else "image"
        content.append({"type": name, name: path})
    made: Record = {
        "messages": [
            {"role": "user", "content": [*content, {"type": "text", "text": text}]},
            {"role": "assistant", "content": answer},
        ]
    }
    return made | {"kind": kind} if kind in QUESTIONS else made


def media_of(made: Record) -> list[str]:
    """The files of a record."""
    return [part[part["type"]] for part in made["messages"][0]["content"] if part["type"] != "text"]


def texts_of(made: Record) -> list[str]:
    """The texts of a record."""
    question, answer = made["messages"]
    return [part["text"] for part in question["content"] if part["type"] == "text"] + [answer["content"]]


def shares(mixture: Mapping[str, float], records: int) -> dict[str, int]:
    """Number of records of each kind, by its share, rounded so that they add up to `records`."""
    exact = {kind: records * share / sum(mixture.values()) for kind, share in mixture.items()}
    counts = {kind: int(number) for kind, number in exact.items()}
    for kind in sorted(exact, key=lambda kind: counts[kind] - exact[kind])[: records - sum(counts.values())]:
        counts[kind] += 1
    return counts


def walk(size: int, count: int, seed: Sequence[int]) -> list[int]:
    """The first `count` indices of an endless walk through `size` items, with a new permutation in each pass."""
    passes = range(-(-count // size) if size else 0)
    walked = [place for number in passes for place in np.random.default_rng([*seed, number]).permutation(size).tolist()]
    return walked[:count]


def draw(index: StampIndex, settings: Settings) -> Drawn:
    """The records from an index of the package. Raises ValueError for a kind without any records."""
    drawn = Drawn()
    drawn.left_out |= index.failures
    for path, (reason, language) in index.skipped.items():
        if language in ("", *settings.languages):
            drawn.left_out[path] = reason
    for split, made in (("train", drawn.train), ("validation", drawn.validation)):
        held = split == "validation"
        stamps = [stamp for stamp in index.stamps if is_held_out(stamp, settings.held_out) == held]
        side = _Side([_Entry.of(stamp, settings, drawn.left_out) for stamp in stamps], settings, held, drawn)
        if held:
            counts = {kind: HELD_OUT[kind] for kind, share in settings.mixture.items() if share}
        else:
            counts = dict(shares(settings.mixture, settings.records))
        for kind, count in counts.items():
            made += side.draw(kind, count)
        order = np.random.default_rng([settings.seed, 3, held]).permutation(len(made))
        made[:] = [made[place] for place in order]
    return drawn


@dataclass(frozen=True)
class _Entry:
    """A stamp with its usable parts."""

    stamp: Stamp
    pictures: tuple[str, ...]
    captions: Mapping[str, str]
    clips: Sequence[Clip]

    @staticmethod
    def of(stamp: Stamp, settings: Settings, left_out: dict[str, str]) -> _Entry:
        captions = {}
        for language in settings.languages:
            caption = stamp.captions.get(language)
            if caption is not None and len(caption) <= settings.characters:
                captions[language] = caption
            elif caption is not None:
                left_out[f"{stamp.key}.txt [{language}]"] = f"a caption of more than {settings.characters} characters"
        clips = []
        for language in captions:
            clip = stamp.clips.get(language)
            if clip is not None and not 0.1 <= clip.seconds <= settings.seconds:
                left_out[clip.path] = f"shorter than 0.1 s or longer than {settings.seconds:g} s"
            elif clip is not None:
                clips.append(clip)
        return _Entry(stamp, tuple(image.path for image in stamp.images), captions, clips)


class _Side:
    """One split: pools of items, from which the records of each kind are drawn."""

    def __init__(self, entries: Sequence[_Entry], settings: Settings, held: bool, drawn: Drawn) -> None:
        self.entries, self.settings, self.held, self.drawn = entries, settings, held, drawn
        self.seen: Counter[str] = Counter()
        clips = [(entry, clip) for entry in entries for clip in entry.clips]
        seeing = [(entry, None) for entry in entries if entry.pictures and entry.captions]
        self.pools: dict[str, list[tuple[_Entry, Any]]] = {
            "category": seeing,
            "language": clips,
            "image": seeing,
            "speech": clips,
            "image+speech": [(entry, clip) for entry, clip in clips if entry.pictures],
            "images": seeing,
            "text": [(entry, None) for entry in entries if len(entry.captions) > 1],
        }
        self.speakers = {
            language: [entry for entry, _ in seeing if language in entry.captions] for language in settings.languages
        }

    def draw(self, kind: str, count: int | None) -> list[Record]:
        """`count` records of a kind, or one per file; at most one per file if held out."""
        pool = self.pools[kind]
        if self.held:
            count = min(len(pool), len(pool) if count is None else count)
        if count and len(pool) < (2 if kind == "images" else 1):
            split = "held-out" if self.held else "training"
            raise ValueError(f"no {split} record of kind {kind!r} can be made: leave it out of the mixture")
        seed = [self.settings.seed, KINDS.index(kind), self.held]
        made = []
        for number, place in enumerate(walk(len(pool), count or 0, [*seed, 0])):
            entry, clip = pool[place]
            rng = np.random.default_rng([*seed, 1, number])
            made.append(self._record(kind, entry, clip, rng))
        return made

    def _record(self, kind: str, entry: _Entry, clip: Clip | None, rng: np.random.Generator) -> Record:
        if kind == "category":
            folder = entry.stamp.key.partition("/")[0]
            return record([self._picture(entry)], QUESTIONS[kind], folder, kind)
        if clip is not None:
            sound, language = self._clip(clip), clip.language
            if kind == "language":
                return record([sound], QUESTIONS[kind], LANGUAGES[language], kind)
            seen = [self._picture(entry)] if kind == "image+speech" else []
            return record([*seen, sound], "Write it down.", entry.captions[language])
        languages = list(entry.captions)
        language = languages[int(rng.integers(len(languages)))]
        if kind == "text":
            others = [each for each in languages if each != language]
            text = entry.captions[others[int(rng.integers(len(others)))]]
            return record([], f"Say in {LANGUAGES[language]}: {text}", entry.captions[language])
        chosen = [entry]
        if kind == "images":
            others_pool = [each for each in self.speakers[language] if each is not entry]
            wanted = min(int(rng.integers(1, self.settings.pictures)), len(others_pool))
            chosen += [others_pool[int(i)] for i in rng.choice(len(others_pool), wanted, replace=False)]
        what = "it" if len(chosen) == 1 else "them"
        answer = "\n".join(each.captions[language] for each in chosen)
        return record([self._picture(e) for e in chosen], f"Describe {what} in {LANGUAGES[language]}.", answer)

    def _picture(self, entry: _Entry) -> str:
        """The file of the next look at a picture."""
        key = entry.stamp.key
        look = 0 if self.held else self.seen[key] % self.settings.looks
        self.seen[key] += 1
        target = f"media/{key}@{look}.png"  # the number after the last @ is the look
        seed = (self.settings.seed, look, *key.encode()) if look else None
        self.drawn.files.setdefault(target, MediaFile(target, entry.pictures, seed))
        return target

    def _clip(self, clip: Clip) -> str:
        target = f"media/{clip.path}.flac"  # the full name: a.ogg and a.wav are different clips
        self.drawn.files.setdefault(target, MediaFile(target, (clip.path,)))
        return target
