"""Cache folder: the one place on disk for downloads, probe results and measurements."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(cache: str | Path | None = None) -> Path:
    """``cache`` with ``~`` expanded; if it is empty, the project's cache folder (neither is created)."""
    if cache:
        return Path(cache).expanduser()
    if os.environ.get("INTERLACE_CACHE"):
        return Path(os.environ["INTERLACE_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "interlace"
