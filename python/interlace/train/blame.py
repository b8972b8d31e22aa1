"""Checks and messages that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from interlace.train.config.load import ConfigError

UNREADABLE = (ValueError, ImportError, OSError)
"""Errors of files of the user, or of the library that reads them."""


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Names an option and its path in the OSErrors of the block, which become ConfigErrors."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot write there: {error.strerror}") from None


def check_picture(option: str, path: Path) -> None:
    """Raises ConfigError for a path that does not name a PNG or SVG file."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"{option} {path}: name a file that ends in .png or .svg")


def check_at_least(least: int, options: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError for one of these options of the command line if it is given and less than `least`."""
    for name in names:
        if (value := getattr(options, name, None)) is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: at least {least}")
