"""``interlace data stamps``: a folder of chats about pictures and speech, such as one's own data would be."""

from __future__ import annotations

import argparse
import sys

from interlace.train.config import ConfigError
from interlace.train.feed import data_log


def stamps(options: argparse.Namespace) -> int:
    """Writes the folder, or leaves it as it is where it was made of the same with the same options."""
    from interlace.data import stamps_folder
    from interlace.data.stamps import Settings

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
