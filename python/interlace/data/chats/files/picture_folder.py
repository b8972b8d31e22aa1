"""Folder of pictures to chats: the answer to a picture is the name of its sub-folder, or the text file beside it.

    pictures/cat/1.jpg, pictures/sea_lion/2.png           -> "cat", "sea lion"
    pictures/1.jpg with pictures/1.txt                    -> the text in 1.txt

A picture that is unreadable or has no answer is left out and listed by name. If any picture has a text beside it, all
need one: the sub-folders of captioned pictures ("train", "part-2") rarely describe their contents.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from interlace.data.chats.files.records import ChatFileError
from interlace.data.chats.files.shapes import tags
from interlace.modalities import IMAGE
from interlace.modalities.errors import BrokenSampleError

CAPTION = ".txt"
MOST_BYTES = 1 << 20  # of a caption


@dataclass(frozen=True)
class Answered:
    """A picture with its answer. digest: of its bytes."""

    path: Path
    answer: str
    digest: str


@dataclass
class Found:
    """Contents of a folder. captions: True if answers are texts beside pictures; left_out: (file, reason); others:
    number of files that are neither pictures nor their texts."""

    captions: bool = False
    pictures: list[Answered] = field(default_factory=list)
    left_out: list[tuple[Path, str]] = field(default_factory=list)
    others: int = 0


def look_through(folder: Path) -> Found:
    """The pictures in `folder` and below it, sorted by name, each decoded once; hidden files are skipped.
    Raises ChatFileError for a folder that cannot be read or has no pictures."""
    if not folder.is_dir():
        raise ChatFileError(f"{folder}: {'a file, not a folder' if folder.exists() else 'no such folder'}")
    files, again = _files(folder)
    paths = [path for path in files if path.suffix.lower() in IMAGE.suffixes]
    if not paths:
        known = ", ".join(IMAGE.suffixes)
        raise ChatFileError(f"{folder}: has no pictures in it or its sub-folders; known are {known}")
    texts = {path.with_suffix(""): path for path in files if path.suffix.lower() == CAPTION}
    captioned = [path for path in paths if path.with_suffix("") in texts]
    stems = {path.with_suffix("") for path in paths}
    result = Found(captions=bool(captioned), left_out=again)
    result.others = sum(p.suffix.lower() not in IMAGE.suffixes and p.with_suffix("") not in stems for p in files)

    def answered(path: Path) -> Answered | str:
        return _answered(path, folder, result.captions, texts.get(path.with_suffix("")))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "interlace-look") as pool:
        for path, one in zip(paths, pool.map(answered, paths), strict=True):
            if isinstance(one, Answered):
                result.pictures.append(one)
            else:
                result.left_out.append((path, one))
    _leave_out_contradictions(result)
    return result


def _leave_out_contradictions(result: Found) -> None:
    """Leaves out equal pictures with different answers: the right one is unknown."""
    first: dict[str, Answered] = {}
    other: dict[str, Answered] = {}
    for one in result.pictures:
        if first.setdefault(one.digest, one).answer != one.answer:
            other.setdefault(one.digest, one)
    for one in result.pictures:
        if one.digest in other:
            twin = other[one.digest] if one.answer == first[one.digest].answer else first[one.digest]
            result.left_out.append((one.path, f"is the same picture as {twin.path}, which has another answer"))
    result.pictures = [one for one in result.pictures if one.digest not in other]


def _files(folder: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The files, including those behind linked folders, and (folder, reason) of links to a folder already linked."""

    def refused(error: OSError) -> None:
        raise ChatFileError(f"{error.filename}: cannot be read: {error.strerror}") from None

    root = folder.resolve()
    linked: dict[Path, Path] = {}  # link targets; each is entered once, which ends cycles

    def entered(path: Path) -> bool:
        if not path.is_symlink():
            return True
        real = path.resolve()
        if real == root or real in root.parents:
            return False
        if real.is_relative_to(root) and not any(part.startswith(".") for part in real.relative_to(root).parts):
            return False  # found without the link
        return linked.setdefault(real, path) == path

    files: list[Path] = []
    again: list[tuple[Path, str]] = []
    for place, folders, names in os.walk(folder, onerror=refused, followlinks=True):
        seen = [name for name in sorted(folders) if not name.startswith(".")]
        folders[:] = [name for name in seen if entered(Path(place, name))]
        for path in (Path(place, name) for name in seen if name not in folders):
            if (first := linked.get(path.resolve())) is not None:
                again.append((path, f"links to the same folder as {first}, whose pictures are taken"))
        files += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(files), again


def _answered(path: Path, folder: Path, captions: bool, text: Path | None) -> Answered | str:
    """The picture with its answer, or the reason to leave it out."""
    try:
        str(path).encode()
        answer = _caption(path, text) if captions else _folder_name(path, folder)
        IMAGE.probe(str(path), decode=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except BrokenSampleError as error:
        return str(error).removeprefix(f"{path}: ")
    except UnicodeEncodeError:
        return "its name is no text in UTF-8: rename it"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if tag := tags().search(answer):
        return f"its answer has {tag[0]} in it, which stands for a file"
    return Answered(path, answer, digest)


def _caption(path: Path, file: Path | None) -> str:
    if file is None:
        raise BrokenSampleError("empty", f"has no {path.stem}{CAPTION} beside it, as other pictures have")
    try:
        data = file.read_bytes()
        if len(data) > MOST_BYTES:
            raise BrokenSampleError("content", f"{file.name} beside it has {len(data):,} bytes: no caption")
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise BrokenSampleError("encoding", f"{file.name} beside it is no text in UTF-8 ({error.reason})") from None
    if not text:
        raise BrokenSampleError("empty", f"{file.name} beside it is empty")
    return text


def _folder_name(path: Path, folder: Path) -> str:
    if path.parent == folder:
        raise BrokenSampleError("empty", f"lies in no sub-folder that says what it is, and has no {CAPTION} beside it")
    name = path.parent.name.replace("_", " ").strip()
    if not name:
        raise BrokenSampleError("empty", f"the name of its folder, {path.parent.name!r}, says nothing")
    return name


def held_out(pictures: Sequence[Answered], share: float, *, by_answer: bool) -> list[bool]:
    """One flag per picture: True for validation. The share is `share` of all, or, with `by_answer`, per answer.

    The choice uses the pictures' bytes: equal pictures are in the same split, whatever their paths.
    """
    first = {one.digest: one.answer for one in reversed(pictures)}
    of_answer: dict[str, list[str]] = {}
    for digest, answer in first.items():
        of_answer.setdefault(answer if by_answer else "", []).append(digest)
    kept = {each for digests in of_answer.values() for each in sorted(digests)[: round(share * len(digests))]}
    return [one.digest in kept for one in pictures]


def lines(pictures: Sequence[Answered], question: str, place: Path) -> str:
    """JSON lines, one record each, for a file in the folder `place`. Paths below it are relative, others absolute."""
    made = []
    for one in pictures:
        path = one.path.absolute()
        name = (path.relative_to(place) if path.is_relative_to(place) else path).as_posix()
        name = f"./{name}" if ":" in name.partition("/")[0] else name  # not inline data
        turns = [{"role": "user", "content": f"{IMAGE.tag}{question}"}, {"role": "assistant", "content": one.answer}]
        made.append(json.dumps({"messages": turns, IMAGE.keys[1]: [name]}, ensure_ascii=False) + "\n")
    return "".join(made)
