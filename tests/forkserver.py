"""Fork server of test processes with preloaded imports, so that a process starts in milliseconds.

A spawned process imports torch and transformers again, which takes four seconds of a core.
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
    """The only context of a test run. The server starts with the first process.

    A module whose import fails in the server is imported by the process itself.
    """
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


def start_script(
    script: str, output: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()
) -> BaseProcess:
    """Starts a process that runs a program text, like `python -c`, and writes its output to a file."""
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
