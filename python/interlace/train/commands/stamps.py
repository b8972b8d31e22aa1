"""``interlace data stamps``: a folder of chats about pictures and speech, in the form of a user's own data."""

from __future__ import annotations

import argparse
import sys

from interlace.train.config.load import ConfigError
from interlace.train.data.feed import data_log


def stamps(options: argparse.Namespace) -> int:
    """Writes the folder, or keeps it if it was made from the same sources with the same options."""
    from interlace.data.builtin import stamps_folder
    from interlace.data.builtin.stamps import Settings

    given = {name: getattr(options, name) for name in ("records", "seed", "languages")}
    given["languages"] = None if options.languages is None else tuple(options.languages)
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
        with data_log(lambda line: print(line, file=sys.stderr)):
            made = stamps_folder.make(options.folder, settings, cache=options.cache)
    except (ValueError, ImportError, OSError) as error:
        raise ConfigError(f"{options.folder}: {error}".removeprefix(f"{options.folder}: {options.folder}")) from None
    print(f"{options.folder}: {made.words}")
    return 0
