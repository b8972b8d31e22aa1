"""Agreement on one layout under torchrun: rank 0 finds or makes it and sends its text to the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from interlace.train import runfolder
from interlace.train.auto import layout_file
from interlace.train.auto.resolve import choose
from interlace.train.config.load import ConfigError, read_text
from interlace.train.config.sections import Config
from interlace.train.launch import launcher

if TYPE_CHECKING:
    from interlace.train.launch.startup import Startup

_WHAT = "choosing a layout (parallel.layout = 'auto')"


def agree(
    config: Config, startup: Startup, *, source: str, given: Path | None, resume: str | None
) -> tuple[Config, str]:
    """The settled config, equal on all ranks, and the text of its layout.toml. Collective (`startup.Startup`).

    The layout is that of the file `given`, else of the resumed run, else a choice by rank 0 for exactly the number of
    started ranks.
    Raises ConfigError on all ranks if there is no layout.
    """
    answers = ["", "", ""]
    if startup.rank == 0:
        try:
            answers = [*_layout(config, startup.world, source, given, resume), ""]
        except ConfigError as error:
            answers = ["", "", str(error)]
        except Exception as error:  # the other ranks must not wait for a failed rank 0
            startup.gather(_WHAT, ["", "", f"rank 0 could not choose a layout: {type(error).__name__}: {error}"])
            raise
    text, where, wrong = startup.gather(_WHAT, answers)[0]
    if wrong:
        raise ConfigError(wrong)
    resolved = layout_file.with_layout(config, text, where)
    if resolved.world_size() != startup.world:
        raise ConfigError(
            f"{where} is a layout for {resolved.world_size()} ranks, but {startup.world} were started: start that "
            "many, or remove the file (or omit --layout) to choose again"
        )
    return resolved, text


def _layout(config: Config, world: int, source: str, given: Path | None, resume: str | None) -> tuple[str, str]:
    """Text of the layout file, and its source."""
    if given is None and resume is not None:
        given = layout_file.of_run(runfolder.resolve(config, resume)[0])
    if given is not None:
        return read_text(given, "layout"), str(given)
    from interlace.train.data.feed import prepare

    def say(line: str) -> None:
        launcher.say(f"interlace: {line}")

    prepare(config, say, source=source)
    return choose(config, source=source, say=say, ranks=world)[0], source
