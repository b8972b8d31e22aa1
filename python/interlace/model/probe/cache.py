"""Cache of probe results: one probe per module structure and process, or per machine if a cache folder is set.

A file holds one result. Its name is a hash of all inputs of the result: the module's classes with their code, configs,
sizes and settings, the versions of the libraries, and this package's own files. Only results of library modules are
stored, because their code is part of the hash. Refusals and fallbacks to "alone" are not stored, so that their reason
is logged each time. Results caused by errors (inconclusive.py) are not stored either, because the error may not occur
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
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
from interlace._files import write_whole
from interlace.model.inputs.base import Item
from interlace.model.inputs.clips import ClipInputs
from interlace.model.inputs.images import ImageInputs
from interlace.model.inputs.patches import PatchInputs
from interlace.model.inputs.spectrograms import AudioInputs
from interlace.model.inputs.tiles import TileInputs
from interlace.model.probe.inconclusive import failures
from interlace.model.probe.separation import Packing
from interlace.model.probe.stand_in import signature
from interlace.model.rows import ALONE
from interlace.model.stages.slice import captures

T = TypeVar("T")
LIBRARIES = ("torch", "transformers", "interlace")
ROOTS = tuple(Path(str(inspect.getfile(each))).resolve().parent for each in (torch, transformers, interlace))
MOST = 1000  # number of files that are kept, the newest
KINDS = {kind.__name__: kind for kind in (AudioInputs, ClipInputs, ImageInputs, Item, Packing, PatchInputs, TileInputs)}
"""Types in results, besides plain values."""
LATE = 3600  # seconds after which a temporary file counts as abandoned

_answers: dict[Any, Any] = {}
_folder: Path | None = None


def use_cache_folder(folder: Path | None) -> None:
    """Set the folder for results, for reading and writing. None: results stay in this process."""
    global _folder
    _folder = folder


def remembered(what: str, module: nn.Module, extra: object, answer: Callable[[], T]) -> T:
    """Return answer(), or its cached result for a module of the same structure and config.

    extra: further inputs of the result. Its repr must be complete.
    """
    for part in module.modules():
        hooked = part._forward_pre_hooks or not all(map(captures, part._forward_hooks.values()))
        if hooked or "forward" in vars(part):
            return answer()
    config: Any = module.config
    config_text = config.to_json_string(use_diff=False)
    key = (what, type(module), config_text, signature(module), extra)
    if key not in _answers:
        file = None if _folder is None else _file(_folder, (what, config_text, repr(extra)), module)
        _answers[key] = answer() if file is None else _cached(file, answer)
    cached: T = _answers[key]
    return cached


def _cached(file: Path, answer: Callable[[], T]) -> T:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged: rewritten below
        made = decoded(json.loads(file.read_text(encoding="utf-8")))
        if _is_answer(made):
            return made
    with failures() as failed:
        result = answer()
    if not failed and not (isinstance(result, Packing) and result.name == ALONE):
        with contextlib.suppress(OSError, TypeError):  # an unwritable folder costs only time
            _write(file, json.dumps(encoded(result)))
    return result


def _is_answer(value: object) -> bool:
    """True if `value` is a valid result: a packing, a bool, a word, one of these per layer, or counts."""
    return isinstance(value, (Packing, bool, str, tuple)) or (
        isinstance(value, list) and bool(value) and all(isinstance(each, (bool, str)) for each in value)
    )


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)
    every = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for old in every[:-MOST]:
        old.unlink(missing_ok=True)
    for left in file.parent.glob("*.tmp"):  # left by a killed process
        if time.time() - left.stat().st_mtime > LATE:
            left.unlink(missing_ok=True)


def _file(folder: Path, key: tuple[str, ...], module: nn.Module) -> Path | None:
    """Path of a result file; None for a module with a part whose code is not, or may not be, a library's."""
    if any("dev" in version for version in (torch.__version__, transformers.__version__)):
        return None  # such a version stands for many builds
    digest = hashlib.sha256(repr((key, _versions())).encode())
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
    """Fingerprint of a class's code: its forward, and the files of the class and its bases.

    None if some of the code is outside the libraries, such as a replaced forward.
    """
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
    return None if None in stamps else (*stamps, _code_content(code), _code_content(outermost))


@cache
def _stamp(file: str) -> tuple[str, int, int] | None:
    """Name, size and time of a library file; None for other files."""
    path = Path(file).resolve()
    if not any(path.is_relative_to(root) for root in ROOTS) or not path.is_file():
        return None
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _code_content(code: CodeType) -> tuple[Any, ...]:
    """Content of a function and its nested functions: instructions, names and constants."""
    constants = [_code_content(each) if isinstance(each, CodeType) else _plain(each) for each in code.co_consts]
    return code.co_firstlineno, zlib.crc32(code.co_code), code.co_names, constants


def _plain(constant: object) -> str:
    """Text of a constant that is equal in every process: the order of sets varies."""
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _files(root: Path) -> list[Path]:
    """Code of the package. kernels is a symlink, which rglob does not follow in every version of Python."""
    folders = (root, root / "kernels")
    return sorted({path for folder in folders for pattern in ("*.py", "*.so") for path in folder.rglob(pattern)})


@cache
def _versions() -> tuple[Any, ...]:
    """Versions of the libraries; for this package its files, which change during development."""
    root = Path(interlace.__file__).resolve().parent
    files = _files(root)
    own = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return torch.__version__, transformers.__version__, zlib.crc32(repr(own).encode())


def spelled(value: object) -> str:
    """Text of a value that is equal in every process, unlike the repr of a set. Raises as `encoded`."""
    return json.dumps(encoded(value))


def encoded(value: Any) -> Any:
    """A result as JSON, with names for tuples, sets, dicts and objects. Raises TypeError for types not in KINDS."""
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
        raise TypeError(f"a probe result contains a {name}")
    fields = value._asdict() if isinstance(value, Item) else vars(value)
    return {name: [[key, encoded(one)] for key, one in fields.items()]}


def decoded(value: Any) -> Any:
    """Inverse of `encoded`. Raises KeyError and the like for other input."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    [(name, held)] = value.items()
    if name in ("tuple", "frozenset"):
        return {"tuple": tuple, "frozenset": frozenset}[name](decoded(one) for one in held)
    fields = {key: decoded(one) for key, one in held}
    return fields if name == "dict" else KINDS[name](**fields)
