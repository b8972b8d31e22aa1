"""What ranks tell each other: values by rank, and the name of the one that does not answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.train import launch
from interlace.train.peers import Peers, TrainingError

SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from interlace.train.peers import Peers
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
peers = Peers(2.0, allowance=30.0)
assert peers.exchange("a test", 10.0 * peers.rank) == [0.0, 10.0, 20.0]
words = [f"said by {peers.rank}"]
peers.broadcast("a test", words)
assert words == ["said by 0"]
if peers.rank == int(sys.argv[1]):
    time.sleep(30)
start = time.monotonic()
try:
    peers.barrier("the last barrier")
except RuntimeError as error:
    print(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("lost", [0, 2])
def test_the_rank_that_does_not_answer_is_named(lost: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **launch.rendezvous(3)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(lost)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    witness = 2 - lost
    try:
        said = processes[witness].communicate(timeout=90)[0]
        assert f"rank {witness}, the last barrier: lost rank {lost} (no answer within 2.0 s" in said, said
        assert 1.5 < float(said.split("TrainingError after ")[1].split()[0]) < 10, said
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_alone_and_other_errors() -> None:
    peers = Peers(1.0)
    assert (peers.rank, peers.world, peers.exchange("a test", 3.0)) == (0, 1, [3.0])
    words = ["mine"]
    peers.broadcast("a test", words)
    assert words == ["mine"]
    with pytest.raises(TrainingError, match="rank 0, reading: lost another rank"), peers.waiting("reading"):
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(NotADirectoryError), peers.waiting("reading"):
        (Path(__file__) / "x").stat()
