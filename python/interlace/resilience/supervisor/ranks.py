"""Processes of a node's ranks: their start, their end, and the reason for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from interlace.resilience.environment import ERROR

LAST_LINES = 3  # lines of a rank's log that are reported if it failed without an error file
MOST_WORDS = 400  # most characters of the reported log or error file
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def start(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts a rank, with its stderr in `log`. It dies with this process."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stderr=log,
        start_new_session=True,  # Ctrl-C reaches only the supervisor
        preexec_fn=_die_with(os.getpid()),
    )


def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills ranks, with the workers that they started, and waits for their end."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def exit_reason(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def last_output(page: Path, log: Path) -> str:
    """The error of a rank that has ended, from the file beside its progress page, else the end of its log."""
    with contextlib.suppress(OSError):
        words = Path(f"{page}{ERROR}").read_text(errors="replace")
        return f": {words[:MOST_WORDS]}"
    with contextlib.suppress(OSError):
        text = log.read_text(errors="replace")
        lines = [each.strip() for each in text.splitlines() if each.strip()]
        return "; its last output: " + " | ".join(lines[-LAST_LINES:])[:MOST_WORDS] if lines else ""
    return ""


def _die_with(parent: int) -> Callable[[], None] | None:
    """Function for a child to call before it runs, so that it dies with this process in any case (Linux)."""
    try:
        import ctypes

        control: Any = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None

    def prepare() -> None:
        control(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
