"""``interlace data stamps`` and ``interlace data digits``: folders of chats, in the form of a user's own data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlace.train.config.load import ConfigError
from interlace.train.data.prepared import data_log


def stamps(options: argparse.Namespace) -> int:
    """Writes a folder of the stamps, or keeps it if it was made from the same sources with the same options."""
    languages = None if options.languages is None else tuple(options.languages)
    return _write(options, "stamps", {"languages": languages}, options.cache)


def digits(options: argparse.Namespace) -> int:
    """Writes a folder of the digits, or keeps it if it was made with the same options."""
    return _write(options, "digits", {}, None)


def _write(options: argparse.Namespace, source: str, more: Mapping[str, Any], cache: Path | None) -> int:
    from interlace.data.builtin import stamps_folder
    from interlace.data.builtin.stamps import Settings

    given = {"records": options.records, "seed": options.seed, **more}
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
        with data_log(lambda line: print(line, file=sys.stderr)):
            made = stamps_folder.make(options.folder, settings, source=source, cache=cache)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"{options.folder}: {error}".removeprefix(f"{options.folder}: {options.folder}")) from None
    print(f"{options.folder}: {made.words}")
    return 0
