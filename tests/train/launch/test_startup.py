"""Before the first step: a slow rank is waited for, a silent rank is named, and all waits are short."""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from interlace.train.errors import TrainingError
from interlace.train.launch import launcher, startup
from interlace.train.launch.startup import Startup, meeting_place
from tests import forkserver

SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist
from interlace.train.launch.startup import Startup
rank, lost = int(os.environ["RANK"]), int(sys.argv[1])
startup = Startup(rank, 3, 2.0)
assert dist.get_world_size() == 3
if rank == 1:
    time.sleep(5)  # longer than the timeout, but alive
assert startup.gather("a slow start", [rank]) == [[0], [1], [2]]
if rank == lost:
    time.sleep(1.5)  # the others have heard of the round before
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    startup.gather("fetching the data", rank)
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
os._exit(0)
"""


def _start(script: str, world: int, folder: Path, *arguments: str, ranks: range) -> list[BaseProcess]:
    met = launcher.rendezvous(world)
    return [
        forkserver.start_script(script, folder / str(rank), {**met, "RANK": str(rank)}, arguments) for rank in ranks
    ]


def _said(process: BaseProcess, output: Path) -> str:
    process.join(600)
    assert process.exitcode is not None
    return output.read_text()


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_slow_rank_is_waited_for_and_a_hung_one_is_named(lost: int, tmp_path: Path) -> None:
    processes = _start(SCRIPT, 3, tmp_path, str(lost), ranks=range(3))
    try:
        said = {rank: _said(processes[rank], tmp_path / str(rank)) for rank in range(3) if rank != lost}
        # Rank 0 holds the store: when it stops, torch itself may wait forever, and the timer ends the others.
        words = "no answer within 2 s" if lost == 0 else "lost rank 2 (no sign of life for 2 s)"
        for rank, text in said.items():
            assert "fetching the data" in text and words in text, (rank, text)
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_rank_that_never_comes_is_missed_within_the_timeout(tmp_path: Path) -> None:
    body = "import os\nfrom interlace.train.launch.startup import Startup\n"
    body += "try: Startup(int(os.environ['RANK']), 2, 2.0)\n"
    body += "except RuntimeError as error: print(error, flush=True)\nos._exit(0)"
    for rank in range(2):
        (process,) = _start(body, 2, tmp_path, ranks=range(rank, rank + 1))
        said = _said(process, tmp_path / str(rank))
        assert f"rank {rank}, meeting the other 1 ranks: " in said and "raise parallel.timeout" in said, said


def test_alone_there_is_nobody_to_wait_for() -> None:
    alone = Startup(0, 1, 0.01)
    assert alone.gather("a test", "x") == ["x"]
    with alone.bounded("a test"):
        time.sleep(0.02)
    alone.close()


@pytest.mark.parametrize("alone", ["", "make memory"])
def test_what_a_rank_does_alone_is_named_among_the_reasons(alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout, or an error of torch, inside a block with both collectives and local work."""
    one = Startup(0, 1, 0.05)
    one.rank, one.world = 1, 2
    ended, said = threading.Event(), []
    monkeypatch.setattr(startup, "SLACK_SECONDS", 0.0)
    monkeypatch.setattr(launcher, "report_error", lambda error, **_: said.append(str(error)))
    monkeypatch.setattr("os._exit", lambda code: ended.set())
    with one.bounded("making groups", alone):
        assert ended.wait(60)
    late = "rank 1, making groups: no answer within 0.05 s (parallel.timeout)"
    assert said == [late + (", or this rank took longer to make memory" if alone else "")]
    one.timeout = 60.0
    with pytest.raises(TrainingError) as failed, one.bounded("making groups", alone):
        raise RuntimeError("can't allocate memory")
    own = ", or this rank could not make memory" if alone else ""
    assert str(failed.value).startswith(
        f"rank 1, making groups: not all ranks joined within 60 s{own} (can't allocate memory)"
    )


def test_ranks_of_one_machine_listen_to_that_machine_alone(tmp_path: Path) -> None:
    """The store, and the ports that gloo opens for its connections."""
    body = """
import os, time
from interlace import comm
from interlace.train.launch.startup import Startup
from tests.sockets import LOOPBACK, listens_on
rank = int(os.environ["RANK"])
startup = Startup(rank, 2, 60.0)
with comm.connect(transport="gloo") as group:
    group.barrier()
    addresses = {address for address, _ in listens_on()}
    startup.gather("looking at sockets", sorted(addresses))
    startup.store.add("left", 1)
    while rank == 0 and startup.store.add("left", 0) < 2:  # the store ends with rank 0
        time.sleep(0.01)
assert addresses == {LOOPBACK}, addresses
os._exit(0)
"""
    root = str(Path(__file__).parents[3])
    environment = {"PYTHONPATH": os.pathsep.join([root, *sys.path])}
    lines: list[str] = []
    command = [sys.executable, "-c", body]
    ranks = launcher.RankProcesses(command, 2, folder=tmp_path, timeout=60.0, environment=environment)
    code = ranks.run(say=lines.append)
    assert code == 0, (lines, (tmp_path / "logs" / "rank-0.log").read_text())


@pytest.mark.parametrize(
    ("address", "port", "local", "says"),
    [
        ("", "29500", "2", "MASTER_ADDR is '' and MASTER_PORT is '29500': set them to an address of rank 0"),
        ("127.0.0.1", "", "2", "MASTER_PORT is '': set them to"),
        ("127.0.0.1", "66000", "2", "MASTER_PORT is '66000': set them to"),
        ("127.0.0.1", "29500", "1", "1 ranks are on other machines, but MASTER_ADDR = 127.0.0.1 is a loopback"),
        ("192.0.2.1", "29500", "2", "cannot listen on 192.0.2.1 port 29500 .*: MASTER_ADDR must be an address of the"),
        ("no.such.name.invalid", "29500", "2", "MASTER_ADDR must be an address of the machine of rank 0"),
    ],
)
def test_where_the_ranks_cannot_meet(
    monkeypatch: pytest.MonkeyPatch, address: str, port: str, local: str, says: str
) -> None:
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(TrainingError, match=rf"rank 0: .*{says}"):
        meeting_place(0, 2, 2.0)
