"""Gathers and broadcasts of ranks: values by rank, and the name of a rank that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.train.errors import TrainingError
from interlace.train.launch import launcher
from interlace.train.launch.peers import Peers
from tests import forkserver

SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from interlace.train.launch.peers import Peers
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
peers = Peers(2.0, allowance=30.0)
assert peers.exchange("a test", 10.0 * peers.rank) == [0.0, 10.0, 20.0]
assert peers.together("a test", lambda: f"said by {peers.rank}") == ["said by 0", "said by 1", "said by 2"]
assert peers.on_first("a test", lambda: f"said by {peers.rank}") == "said by 0"
class Stopped(BaseException): pass
for kind, expected in ((OSError, RuntimeError), (Stopped, RuntimeError), (KeyError, KeyError)):
    def fail():
        if peers.rank == 1:
            raise kind("no room")
    try:
        peers.together("a test", fail, expected=expected if expected is KeyError else RuntimeError)
        raise SystemExit("nothing was raised")
    except (RuntimeError, KeyError) as error:
        assert type(error).__name__ == ("KeyError" if kind is KeyError else "TrainingError"), repr(error)
        assert "no room" in str(error) and (kind is KeyError or "a test: rank 1: " in str(error)), str(error)
if peers.rank == int(sys.argv[1]):
    time.sleep(1000)
start = time.monotonic()
try:
    peers.barrier("the last barrier")
except RuntimeError as error:
    print(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("lost", [0, 2])
def test_the_rank_that_does_not_answer_is_named(lost: int, tmp_path: Path) -> None:
    met = launcher.rendezvous(3)
    processes = [
        forkserver.start_script(SCRIPT, tmp_path / str(rank), {**met, "RANK": str(rank)}, [str(lost)])
        for rank in range(3)
    ]
    witness = 2 - lost
    try:
        processes[witness].join(600)
        output = (tmp_path / str(witness)).read_text()
        assert f"rank {witness}, the last barrier: lost rank {lost} (no answer within 2 s" in output, output
        assert 1.5 < float(output.split("TrainingError after ")[1].split()[0]) < 60, output  # it sleeps for longer
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_alone_and_other_errors() -> None:
    peers = Peers(1.0)
    assert (peers.rank, peers.world, peers.exchange("a test", 3.0)) == (0, 1, [3.0])
    assert peers.together("a test", lambda: "mine") == ["mine"] and peers.on_first("a test", lambda: 2) == 2
    with pytest.raises(TrainingError, match="a test: rank 0: ZeroDivisionError: "):
        peers.together("a test", lambda: 1 // 0)
    with pytest.raises(KeyboardInterrupt):

        def interrupted() -> None:
            raise KeyboardInterrupt

        peers.together("a test", interrupted)
    with pytest.raises(TrainingError, match="rank 0, reading: lost another rank"), peers.waiting("reading"):
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(NotADirectoryError), peers.waiting("reading"):
        (Path(__file__) / "x").stat()
