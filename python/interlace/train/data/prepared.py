"""``data.prepare``: writes the chats of a config."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from interlace.train.config.load import blaming
from interlace.train.config.sections import Config


def write_chats(config: Config, say: Callable[[str], None], *, source: str = "config") -> None:
    """Makes the folder of ``data.prepare``, unless it exists with the settings of ``data.options``. Raises ConfigError.

    A folder of digits is replaced by stamps, with the same settings, once stamps are available.
    """
    from interlace.data.builtin import stamps_folder
    from interlace.data.builtin.stamps import Settings

    data = config.data
    folder = Path(data.train[0]).parent
    with blaming(f"{source}: [data] prepare", (ValueError, TypeError, ImportError, OSError)):
        made = stamps_folder.look(folder)
        settings = Settings(**data.options) if data.options or made is None else made.settings
        if made is None or made.source != data.prepare or made.settings.table() != settings.table():
            with data_log(say):
                made = stamps_folder.make(folder, settings, source=data.prepare or "", cache=data.cache)
    if made.source != data.prepare:
        say(made.words)


def say_on_stderr(line: str) -> None:
    """Prints a line of progress."""
    print(f"interlace: {line}", file=sys.stderr, flush=True)


@contextmanager
def data_log(say: Callable[[str], None]) -> Iterator[None]:
    """Passes log messages of the data package, including warnings, to `say` inside the context."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    log, handler = logging.getLogger("interlace.data"), Handler(logging.INFO)
    level = log.level
    log.addHandler(handler)
    log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
