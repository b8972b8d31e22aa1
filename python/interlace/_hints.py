"""Names that users write: hints for misspelt ones, and objects by import path."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from interlace._text import one_line


def nearest(name: str, valid: Iterable[str]) -> str:
    """``did you mean 'steps'?`` or, if no name is close, the list of valid names."""
    names = sorted(valid)
    return close(name, names) or "valid: " + ", ".join(names)


def close(name: str, valid: Iterable[str]) -> str:
    """``did you mean 'steps'?``, or "" if no name is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1)
    return f"did you mean {matches[0]!r}?" if matches else ""


def imported(path: str, where: str) -> Any:
    """The object at "package.module:name". Raises ValueError, which begins with `where`, if it does not exist."""
    module, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except Exception as error:  # user code may raise anything
        text = one_line(error, None)
        raise ValueError(
            f"{where} = {path!r}: cannot import {module}: {text}; it must be installed, or its folder in PYTHONPATH"
        ) from None
    for part in name.split("."):
        if not hasattr(target, part):
            public = [each for each in dir(target) if not each.startswith("_")] or ["nothing"]
            raise ValueError(f"{where} = {path!r}: {module} has no {name!r}; {nearest(part, public)}")
        target = getattr(target, part)
    return target
