"""Where test processes are forked from: a server that has imported what they need, so that one starts in milliseconds.

A process that is spawned imports torch and transformers anew: four seconds of a core each.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.trials import share_trials

PRELOADED = ["torch", "torch.distributed", "pytest", "hypothesis", "tests.tiny", "tests.comm.jobs", "interlace.run"]


def context() -> ForkServerContext:
    """The one context of a test run. The server starts with the first process, and a module that imports wrongly in it
    is imported by the process itself."""
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


def start_script(
    script: str, output: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()
) -> BaseProcess:
    """A process that runs the text of a program, as `python -c` would, and writes what it says to a file."""
    process = context().Process(target=_run, args=(script, output, {**os.environ, **environment}, list(arguments)))
    process.start()
    return process


def _run(script: str, output: Path, environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = ["-c", *arguments]
    share_trials()
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
