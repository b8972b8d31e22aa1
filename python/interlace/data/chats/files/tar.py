"""Samples of WebDataset tars, and of Megatron Energon datasets (such tars with metadata beside them).

Members whose names are equal up to the first dot of the last path component form one sample: ``0001.jpg``,
``0001.json``. Its text is in ``json`` (messages or conversations, a list of turns, or an object with a caption), else
in ``txt``, a caption. A sample becomes a record as in other files; media stay in the tar (`opened`). An unusable sample
is a broken record, counted and listed like others, and so is the end of a truncated tar.

For Energon's format (version 7; ``.nv-meta`` beside the tars), ``split.yaml`` lists the tars of each part and
``dataset.yaml`` maps members to fields. Energon's own package is not needed. Python code in its files (sample
loaders, part filters, crude datasets with cookers) is refused: data files never run code here.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlace.data.chats.files.keys import FILE_KEYS, unique
from interlace.modalities import IMAGE, named, of_suffix
from interlace.modalities.files import Member, read_head

META = ".nv-meta"
WORDS = ("caption", "text", "txt")
"""Keys for the caption in an object without turns."""


class ChatFileError(ValueError):
    """A data file that cannot be read at all; the message has its name and the remedy."""


class NoSampleError(ValueError):
    """Members that do not form a sample; the message has the reason."""


@dataclass(frozen=True)
class Fields:
    """Field mapping of Energon's ``dataset.yaml``. kind: class name of the samples; names: field -> ending of the
    member, or an ending with keys inside it (``json[caption]``)."""

    kind: str
    names: Mapping[str, str]


@dataclass
class Found:
    """One sample of a tar. record: as in other files, or the reason why there is none. key: common name of its
    members."""

    key: str
    record: dict[str, Any] | None
    broken: str = ""
    members: dict[str, Member] = field(default_factory=dict)


# --- WebDataset -------------------------------------------------------------------------------------------


def samples(path: Path, prompt: str | None, fields: Fields | None = None) -> Iterator[Found]:
    """The samples of a tar in order. Raises OSError when it cannot be opened."""
    seen: set[str] = set()
    broken = ""
    members = _members(path)
    for key, group in itertools.groupby(members, key=lambda one: one[0]):
        sample: dict[str, Member] = {}
        twice = ""
        for _, ending, member in group:
            if member is None:  # last entry: the rest of the tar cannot be read
                broken = ending
                break
            twice = twice or (ending if ending in sample else "")
            sample[ending] = member
        if broken and not sample:
            break
        if key in seen:
            yield Found(
                key, None, f"{key}: its members lie in two places of the tar; members of a sample are neighbours"
            )
        elif twice:
            yield Found(key, None, f"{key}: has two members {twice}")
        else:
            try:
                yield Found(key, _record(key, sample, prompt, fields), members=sample)
            except NoSampleError as error:
                yield Found(key, None, f"{key}: {error}", sample)
        seen.add(key)
    if broken:
        yield Found("", None, broken)


def _members(path: Path) -> Iterator[tuple[str, str, Member | None]]:
    """(key, ending, member) of each file in the tar; for a damaged tar, ("", reason, None) last."""
    size = path.stat().st_size
    end = 0
    try:
        with tarfile.open(path, "r:") as opened_tar:
            tar: Any = opened_tar  # its list of members has no declared type
            while (info := tar.next()) is not None:
                tar.members.clear()  # frees memory: tarfile keeps one object per member
                end = tar.offset
                folder, _, name = info.name.rpartition("/")
                base, dot, ending = name.partition(".")
                if not info.isfile() or not base or not dot or name.startswith("__"):
                    continue  # folders, links, hidden files; WebDataset's own metadata (__key__)
                if info.offset_data + info.size > size:
                    yield "", f"the tar ends within {info.name}: what follows is lost; copy it again", None
                    return
                member = Member(str(path), info.offset_data, info.size, info.name)
                yield f"{folder}/{base}" if folder else base, ending.lower(), member
            end = tar.offset
    except tarfile.TarError as error:
        yield "", f"no tar that can be read from byte {end:,} on ({error}): what follows is lost; copy it again", None
        return
    with open(path, "rb") as file:  # tarfile treats a damaged header as the end
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            yield "", f"damaged at byte {end:,} of {size:,}: what follows is lost; copy it again", None


def kind_of_ending(ending: str) -> str:
    """The kind of media of a member, by the last part of its ending; "": not media."""
    modality = of_suffix(f".{ending}")
    return "" if modality is None else modality.name


def _record(key: str, members: Mapping[str, Member], prompt: str | None, fields: Fields | None) -> dict[str, Any]:
    if fields is not None:
        return _energon(members, prompt, fields)
    media: dict[str, list[Member]] = {}
    for ending, member in members.items():
        if kind := kind_of_ending(ending):
            media.setdefault(kind, []).append(member)
    texts = [ending for ending in members if ending.rpartition(".")[2] == "json"]
    if len(texts) > 1 and "json" in texts:
        texts = ["json"]
    if len(texts) > 1:
        raise NoSampleError(f"has several texts ({', '.join(texts)}) and none is called json")
    # Unused members are recorded as ignored, without their values, which may be long.
    more: dict[str, None] = {f".{ending}": None for ending in members if not kind_of_ending(ending)}
    caption = None
    if texts:
        more.pop(f".{texts[0]}")
        record = _json(members[texts[0]])
        if isinstance(record, list):  # turns only, as in NeMo's LLaVA files
            roles = bool(record) and isinstance(record[0], dict) and "role" in record[0]
            record = {"messages" if roles else "conversations": record}
        if not isinstance(record, dict):
            raise NoSampleError("its json is neither an object nor a list of turns")
        if "messages" in record or "conversations" in record:
            return more | _with_members(record, media, members)
        word = next((word for word in WORDS if isinstance(record.get(word), str)), "")
        if not word and "txt" not in members:
            raise NoSampleError(
                f"its json has neither messages nor conversations nor a caption ({', '.join(WORDS)}), but "
                f"{sorted(record)}"
            )
        caption = record.get(word)
        more |= {f"json.{key}": None for key in record if key != word}
    if caption is None:
        if "txt" not in members:
            raise NoSampleError(f"has no json and no txt, but {', '.join(sorted(members)) or 'nothing'}")
        more.pop(".txt")
        caption = _text(members["txt"])
    return more | _caption(media, caption, prompt)


def _caption(media: Mapping[str, list[Member]], caption: str, prompt: str | None) -> dict[str, Any]:
    """A question with all media, answered by the caption. prompt: None: the question of the first one's modality."""
    items = [named(kind).item(str(member)) for kind, of_kind in media.items() for member in of_kind]
    if not items:
        raise NoSampleError("has a caption, and nothing that it is of")
    asked = prompt if prompt is not None else named(items[0]["type"]).question
    words = [{"type": "text", "text": asked}] if asked else []
    return {
        "messages": [{"role": "user", "content": [*items, *words]}, {"role": "assistant", "content": caption.strip()}]
    }


def _with_members(
    record: dict[str, Any], media: Mapping[str, list[Member]], members: Mapping[str, Member]
) -> dict[str, Any]:
    """A record with the members that it names as media; if it names none, all members in order."""
    made = dict(record)
    typed = _typed(made)
    for kind, of_kind in media.items():
        keys = [key for key in named(kind).keys if made.get(key) is not None]
        pointing = [item for item in typed if item["type"] == kind and item.get(kind) is not None]
        if keys:
            value = made[keys[0]]
            names = list(value) if isinstance(value, list) else [value]
            resolved = _resolved(names, of_kind, members, kind)
            made[keys[0]] = [_pointed(name, member) for name, member in zip(names, resolved, strict=True)]
        elif pointing:
            resolved = _resolved([item[kind] for item in pointing], of_kind, members, kind)
            for item, member in zip(pointing, resolved, strict=True):
                item[kind] = _pointed(item[kind], member)
        else:
            made[named(kind).keys[1]] = [str(member) for member in of_kind]
    return made


def _pointed(name: Any, member: Member) -> Any:
    """A file reference with its path replaced by the member."""
    if not isinstance(name, dict):
        return str(member)
    return {key: value for key, value in name.items() if key not in FILE_KEYS} | {"path": str(member)}


def _typed(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The typed items of a record's turns, copied so that they can be modified."""
    parts: list[dict[str, Any]] = []
    turns = record.get("messages")
    if isinstance(turns, list):
        record["messages"] = turns = [dict(turn) if isinstance(turn, dict) else turn for turn in turns]
        for turn in turns:
            if isinstance(turn, dict) and isinstance(turn.get("content"), list):
                turn["content"] = [dict(item) if isinstance(item, dict) else item for item in turn["content"]]
                parts += [item for item in turn["content"] if isinstance(item, dict) and "type" in item]
    return parts


def _resolved(names: list[Any], of_kind: list[Member], members: Mapping[str, Member], kind: str) -> list[Member]:
    """The members that `names` refer to, by name or ending. If none matches and the numbers are equal: all, in
    order."""
    by_name = {member.name: member for member in of_kind} | {os.path.basename(m.name): m for m in of_kind}
    by_name |= {ending: member for ending, member in members.items() if member in of_kind}
    texts = [name.get("path") if isinstance(name, dict) else name for name in names]
    members_named = [by_name.get(str(text).removeprefix(".")) for text in texts]
    whole = [member for member in members_named if member is not None]
    if len(whole) == len(names):
        return whole
    if not whole and len(names) == len(of_kind):  # file names from before packing
        return of_kind
    raise NoSampleError(f"names {len(names)} files of kind {kind}, and has {', '.join(m.name for m in of_kind)}")


def _text(member: Member) -> str:
    try:
        return read_head(str(member), -1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NoSampleError(f"{member.name} is no text in UTF-8 ({error.reason} at byte {error.start})") from None


def _json(member: Member) -> Any:
    text = _text(member)
    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise NoSampleError(f"{member.name} is no JSON: {error}") from None


# --- Energon ----------------------------------------------------------------------------------------------

_KNOWN = ("CaptioningSample", "VQASample", "MultiChoiceVQASample")


def energon_folder(path: Path) -> tuple[Path, str] | None:
    """(folder, part) if `path` is an Energon dataset (part "") or one of its parts: FOLDER/train, FOLDER/val."""
    if (path / META).is_dir():
        return path, ""
    if (path.parent / META).is_dir() and (path.is_dir() or not path.exists()):  # a folder may share a part's name
        return path.parent, path.name
    return None


def energon(path: Path) -> tuple[list[tuple[Path, frozenset[str]]], Fields | None]:
    """The tars of a part of an Energon dataset, each with the keys of its excluded samples, and its field mapping.
    Raises ChatFileError."""
    dataset_folder = energon_folder(path)
    assert dataset_folder is not None
    folder, part = dataset_folder
    settings, splits = _yaml(folder, "dataset"), _yaml(folder, "split")
    parts = splits.get("split_parts")
    if not isinstance(parts, dict):
        raise ChatFileError(f"{folder}/{META}/split.yaml: has no split_parts")
    if part not in parts:
        names = ", ".join(str(folder / name) for name in parts)
        what = f"has no part {part!r}" if part else "is an Energon dataset of several parts"
        raise ChatFileError(f"{folder}: {what}; name one of them: {names}")
    excluded = {one for name in splits.get("exclude") or () for one in braces(str(name))}
    tars = [folder / one for name in parts[part] or () for one in braces(str(name)) if one not in excluded]
    if not tars:
        raise ChatFileError(f"{folder}: its part {part!r} has no tar")
    missing = next((tar for tar in tars if not tar.is_file()), None)
    if missing is not None:
        raise ChatFileError(f"{missing}: no such file; {folder}/{META}/split.yaml names it")

    def keys(tar: Path) -> frozenset[str]:
        before = f"{tar.relative_to(folder)}/"
        return frozenset(name.removeprefix(before) for name in excluded if name.startswith(before))

    return [(tar, keys(tar)) for tar in tars], _fields(folder, settings)


def _yaml(folder: Path, name: str) -> dict[str, Any]:
    yaml = importlib.import_module("yaml")  # a dependency of transformers, without types

    path = next((p for p in (folder / META / f"{name}.yaml", folder / META / f"{name}.json") if p.is_file()), None)
    if path is None:
        raise ChatFileError(f"{folder}: has no {META}/{name}.yaml: write it with 'energon prepare {folder}'")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ChatFileError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ChatFileError(f"{path}: is no table of keys")
    return content


def _fields(folder: Path, settings: Mapping[str, Any]) -> Fields | None:
    """Field mapping in ``dataset.yaml``; None: the samples are self-describing, as in WebDataset."""
    where = f"{folder}/{META}/dataset.yaml"
    for key in ("sample_loader", "part_filter"):
        if settings.get(key):
            raise ChatFileError(
                f"{where}: {key} is code, which data files cannot bring here: give field_map instead, or write the "
                "samples with json members that have messages"
            )
    if settings.get("__class__") == "CrudeWebdataset":
        return None
    sample = settings.get("sample_type")
    kind = str(sample.get("__class__")) if isinstance(sample, dict) else ""
    names = settings.get("field_map")
    if kind not in _KNOWN or not isinstance(names, dict):
        raise ChatFileError(
            f"{where}: samples of type {kind or settings.get('__class__')!r} are not known; known are CrudeWebdataset "
            f"and, with a field_map, {', '.join(_KNOWN)}"
        )
    return Fields(kind, {str(key): str(value) for key, value in names.items()})


def _energon(members: Mapping[str, Member], prompt: str | None, fields: Fields) -> dict[str, Any]:
    """The record of a sample, by Energon's field mapping."""
    names = fields.names
    kind = IMAGE.name  # Energon's samples have one picture each
    image = next((members[place] for place in names.get(kind, "").lower().split(",") if place in members), None)
    if image is None:
        raise NoSampleError(f"has no member {names.get(kind)!r}, its {kind}, but {', '.join(sorted(members))}")
    if fields.kind == "CaptioningSample":
        return _caption({kind: [image]}, _text_field(members, names, "caption"), prompt)
    asked = _text_field(members, names, "context")
    if fields.kind == "VQASample":
        answers = _field(members, names, "answers")
        answer = answers[0] if isinstance(answers, list) and answers else answers
    else:
        choices, number = _field(members, names, "choices"), _field(members, names, "correct_choice_idx")
        if not isinstance(choices, list) or type(number) is not int or not 0 <= number < len(choices):
            raise NoSampleError(f"its correct_choice_idx {number!r} is none of its choices")
        asked = "\n".join([asked, *(f"{chr(65 + place)}. {choice}" for place, choice in enumerate(choices))])
        answer = f"{chr(65 + number)}. {choices[number]}"
    if not isinstance(answer, str):
        raise NoSampleError("its answers are no text")
    content = [IMAGE.item(str(image)), {"type": "text", "text": asked}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def _text_field(members: Mapping[str, Member], names: Mapping[str, str], name: str) -> str:
    value = _field(members, names, name)
    if not isinstance(value, str):
        raise NoSampleError(f"its {name} is no text")
    return value


def _field(members: Mapping[str, Member], names: Mapping[str, str], name: str) -> Any:
    """Value of a field: a member's text, or its JSON under the keys in brackets. Of several locations, the first
    that exists is used."""
    if name not in names:
        raise NoSampleError(f"dataset.yaml says no member for {name}")
    for place in names[name].split(","):
        ending, *keys = place.replace("]", "").split("[")
        member = members.get(ending.lower())
        if member is None:
            continue
        value: Any = _json(member) if ending.rpartition(".")[2] == "json" else _text(member)
        try:
            for key in keys:
                value = value[int(key) if isinstance(value, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            continue
        return value
    raise NoSampleError(f"has nothing under {names[name]!r}, its {name}; its members: {', '.join(sorted(members))}")


# --- names ------------------------------------------------------------------------------------------------


def braces(name: str) -> list[str]:
    """The names that ``shard-{000..015}.tar`` or ``{a,b}.tar`` expands to; a name without braces is unchanged."""
    start = name.find("{")
    end = name.find("}", start)
    if start < 0 or end < 0:
        return [name]
    inside = name[start + 1 : end]
    first, dots, last = inside.partition("..")
    if dots and first.isdigit() and last.isdigit():
        width = len(first) if first.startswith("0") or len(first) == len(last) else 0
        step = 1 if int(first) <= int(last) else -1
        middle = [f"{number:0{width}d}" for number in range(int(first), int(last) + step, step)]
    elif "," in inside:
        middle = inside.split(",")
    else:
        return [name]
    return [name[:start] + each + rest for each in middle for rest in braces(name[end + 1 :])]
