"""Answers of trials: those of modules of one structure are found once in a process, and once on a machine where a
folder is named for them.

A file holds one answer, and its name is a hash of everything that the answer follows from: the module's classes with
their code, configs, sizes and settings, the versions of the libraries, and this package's own files. It is kept of
modules of the libraries alone, whose code is hashed, too. Refusals and what gave way to "alone" are not kept: they say
why, each time. Nor is what followed from a failure (untried.py), which may not come again.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch
import transformers
from torch import nn

import interlace
from interlace.model.audio import AudioInputs
from interlace.model.clips import ClipInputs
from interlace.model.feed import Item
from interlace.model.images import ImageInputs
from interlace.model.patches import PatchInputs
from interlace.model.rows import ALONE
from interlace.model.slice import captures
from interlace.model.standin import signature
from interlace.model.tiles import TileInputs
from interlace.model.trial import Packing
from interlace.model.untried import failures

T = TypeVar("T")
LIBRARIES = ("torch", "transformers", "interlace")
ROOTS = tuple(Path(str(inspect.getfile(each))).resolve().parent for each in (torch, transformers, interlace))
MOST = 1000  # files that are kept, the newest
KINDS = {kind.__name__: kind for kind in (AudioInputs, ClipInputs, ImageInputs, Item, Packing, PatchInputs, TileInputs)}
"""What answers are made of, beside plain values."""
LATE = 3600  # seconds after which a file that is still being written has lost its writer

_answers: dict[Any, Any] = {}
_folder: Path | None = None


def keep_in(folder: Path | None) -> None:
    """Keep answers in this folder from now on, and take them from there; None: in this process alone."""
    global _folder
    _folder = folder


def remembered(what: str, module: nn.Module, extra: Any, answer: Callable[[], T]) -> T:
    """answer(), or what it was for a module of the same structure and config.

    extra: what the answer depends on beside them, whose repr says all of it.
    """
    for part in module.modules():
        hooked = part._forward_pre_hooks or not all(map(captures, part._forward_hooks.values()))
        if hooked or "forward" in vars(part):
            return answer()
    config: Any = module.config
    told = config.to_json_string(use_diff=False)
    key = (what, type(module), told, signature(module), extra)
    if key not in _answers:
        file = None if _folder is None else _file(_folder, (what, told, repr(extra)), module)
        _answers[key] = answer() if file is None else _kept(file, answer)
    found: T = _answers[key]
    return found


def _kept(file: Path, answer: Callable[[], Any]) -> Any:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # missing, or damaged: it is written anew
        made = decoded(json.loads(file.read_text(encoding="utf-8")))
        if _is_answer(made):
            return made
    with failures() as failed:
        found = answer()
    if not failed and not (isinstance(found, Packing) and found.name == ALONE):
        with contextlib.suppress(OSError, TypeError):  # a folder that cannot be written costs time, no more
            _write(file, json.dumps(encoded(found)))
    return found


def _is_answer(found: Any) -> bool:
    """Whether a trial may answer so: a packing, yes or no (or in a word), one of these per layer, or counts."""
    return isinstance(found, (Packing, bool, str, tuple)) or (
        isinstance(found, list) and bool(found) and all(isinstance(each, (bool, str)) for each in found)
    )


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as made:
            made.write(text)
        os.replace(name, file)
        every = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in every[:-MOST]:
            old.unlink(missing_ok=True)
        for left in file.parent.glob("*.tmp"):  # of a process that was killed
            if time.time() - left.stat().st_mtime > LATE:
                left.unlink(missing_ok=True)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _file(folder: Path, told: tuple[str, ...], module: nn.Module) -> Path | None:
    """Where an answer is kept; None for a module with a part whose code is not a library's, or nobody can tell."""
    if any("dev" in version for version in (torch.__version__, transformers.__version__)):
        return None  # such a version stands for many
    digest = hashlib.sha256(repr((told, _versions())).encode())
    sources: dict[type[nn.Module], tuple[Any, ...] | None] = {}
    for name, part in module.named_modules():
        kind = type(part)
        if kind.__module__.partition(".")[0] not in LIBRARIES:
            return None
        where = sources[kind] if kind in sources else sources.setdefault(kind, _source(kind))
        if where is None:
            return None
        digest.update(repr((name, kind.__module__, kind.__qualname__, where)).encode())
    for _, kind, _, plain, shapes, own, hooks in signature(module):
        if own:
            return None
        names = [getattr(hook, "co_name", "") for hook in hooks]
        digest.update(repr((kind.__qualname__, plain, shapes, names)).encode())
    return folder / f"{digest.hexdigest()[:32]}.json"


def _source(kind: type[nn.Module]) -> tuple[Any, ...] | None:
    """What tells the code of a class: that of its forward, and the files of it and of all that it is made from. None
    where some of it lies outside of the libraries, as a forward does that was put in its place."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    outermost = getattr(kind.forward, "__code__", None)
    if code is None or outermost is None:
        return None
    files = {code.co_filename, outermost.co_filename}
    for each in kind.__mro__:
        if issubclass(each, nn.Module):
            try:
                files.add(inspect.getfile(each))
            except (OSError, TypeError):
                return None
    stamps = [_stamp(file) for file in sorted(files)]
    return None if None in stamps else (*stamps, _said(code), _said(outermost))


@cache
def _stamp(file: str) -> tuple[str, int, int] | None:
    """Name, size and time of a file of a library; None of another."""
    path = Path(file).resolve()
    if not any(path.is_relative_to(root) for root in ROOTS) or not path.is_file():
        return None
    found = path.stat()
    return str(path), found.st_size, found.st_mtime_ns


def _said(code: CodeType) -> tuple[Any, ...]:
    """All that a function does, with those inside it: its instructions, and the names and constants in them."""
    constants = [_said(each) if isinstance(each, CodeType) else _plain(each) for each in code.co_consts]
    return code.co_firstlineno, zlib.crc32(code.co_code), code.co_names, constants


def _plain(constant: Any) -> str:
    """The same words for the same constant in every process: sets come in any order."""
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


@cache
def _versions() -> tuple[Any, ...]:
    """Of the libraries; of this package its files, which change where it is worked on."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(path for pattern in ("*.py", "*.so") for path in root.rglob(pattern))
    own = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return torch.__version__, transformers.__version__, zlib.crc32(repr(own).encode())


def spelled(value: Any) -> str:
    """The same text for the same value in every process, which the repr of a set is not. Raises as `encoded`."""
    return json.dumps(encoded(value))


def encoded(value: Any) -> Any:
    """An answer as JSON: tuples, sets, dicts and objects named. Raises TypeError for what KINDS has not."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encoded(one) for one in value]
    name = type(value).__name__
    if type(value) is tuple:
        return {"tuple": [encoded(one) for one in value]}
    if isinstance(value, frozenset):
        return {"frozenset": sorted(value)}
    if isinstance(value, dict):
        return {"dict": [[key, encoded(one)] for key, one in value.items()]}
    if KINDS.get(name) is not type(value):
        raise TypeError(f"an answer holds a {name}")
    fields = value._asdict() if isinstance(value, Item) else vars(value)
    return {name: [[key, encoded(one)] for key, one in fields.items()]}


def decoded(value: Any) -> Any:
    """What `encoded` made it of. Raises KeyError and the like for anything else."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    [(name, held)] = value.items()
    if name in ("tuple", "frozenset"):
        return {"tuple": tuple, "frozenset": frozenset}[name](decoded(one) for one in held)
    fields = {key: decoded(one) for key, one in held}
    return fields if name == "dict" else KINDS[name](**fields)
