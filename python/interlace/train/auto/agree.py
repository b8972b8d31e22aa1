"""Ranks of torchrun take one plan: rank 0 finds or makes it and hands its text to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from interlace.train import runfolder
from interlace.train.auto import planlock
from interlace.train.auto.settle import check_ranks, choose
from interlace.train.config import ConfigError
from interlace.train.launch import launcher
from interlace.train.schema import Config

_WHAT = "choosing a layout (parallel.plan = 'auto')"


def agree(config: Config, startup: Any, *, source: str, lock: Path | None, resume: str | None) -> tuple[Config, str]:
    """The settled config, the same on all ranks, and the text of its plan.lock. Collective (`startup.Startup`).

    The plan is `lock`, else that of the run that is gone on with, else what rank 0 chooses for exactly so many ranks as
    were started. Raises ConfigError on all ranks where there is none.
    """
    said = ["", "", ""]
    if startup.rank == 0:
        try:
            said = [*_plan(config, startup.world, source, lock, resume), ""]
        except ConfigError as error:
            said = ["", "", str(error)]
        except Exception as error:  # the others are not to wait for a rank that is gone
            startup.gather(_WHAT, ["", "", f"rank 0 could not choose a layout: {type(error).__name__}: {error}"])
            raise
    text, where, wrong = startup.gather(_WHAT, said)[0]
    if wrong:
        raise ConfigError(wrong)
    settled = planlock.locked(config, text, where)
    check_ranks(settled, startup.world, where)
    return settled, text


def _plan(config: Config, world: int, source: str, lock: Path | None, resume: str | None) -> tuple[str, str]:
    """The text of the plan, and where it is from."""
    if lock is None and resume is not None:
        own = runfolder.resolve(config, resume)[0] / planlock.NAME
        lock = own if own.exists() else None
    if lock is not None:
        return planlock.read(lock), str(lock)
    from interlace.train.feed import prepare

    def say(line: str) -> None:
        launcher.say(f"interlace: {line}")

    prepare(config, say, source=source)
    return choose(config, source=source, say=say, ranks=world)[0], source
