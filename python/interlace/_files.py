"""Files: the cache folder, and atomic writes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder(cache: str | Path | None = None) -> Path:
    """``cache`` with ``~`` expanded; if it is empty, the project's cache folder (neither is created)."""
    if cache:
        return Path(cache).expanduser()
    if os.environ.get("INTERLACE_CACHE"):
        return Path(os.environ["INTERLACE_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "interlace"


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Atomic write: a draft beside ``path`` for the block to write, renamed to ``path`` if the block raises no error.

    Readers see the old file or the new one, never a part, even after a kill, which leaves a ``.NAME.*.tmp``. Processes
    and threads of one machine may write the same file. Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes ``text`` atomically, in UTF-8: see `draft_of`. Raises OSError."""
    with draft_of(path) as draft:
        draft.write_text(text, encoding="utf-8")
