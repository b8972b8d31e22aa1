"""Streams between processes: the numbers of one process, and an error that names a dead reader."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from interlace.data import IterableStream, StreamLoader, StreamOptions
from interlace.layout import Layout, ParallelSpec
from interlace.model import Sample
from interlace.model.naming import LANGUAGE_MODEL
from interlace.run import parallelize
from tests.distributed.workers import run_ranks
from tests.run.parity import assert_same_gradient, oracle
from tests.run.streamed import Counted, names_of
from tests.tiny import tiny_mllm

P = ParallelSpec
KINDS = ((1, 1), (0, 0), (2, 0), (0, 1))


def placed(timeout: float = 60.0):
    mllm = tiny_mllm(layers=2, kv_heads=2)
    mllm.train()
    specs = {"vision": P(dp=3), "audio": P(dp=3), LANGUAGE_MODEL: P(cp=3)}
    layout = Layout.from_specs(mllm, specs, placement="shared")
    return mllm, parallelize(mllm, layout, transport="distributed", timeout=timeout)


def same_as_one_process(rank: int) -> tuple[int, list[str]]:
    mllm, parallel = placed()
    data = Counted(mllm, (5, 2, 6, 3), kinds=KINDS)
    moved, names = 0, []
    with StreamLoader(data.stream, parallel, 5, options=StreamOptions(microbatches=2, timeout=60), buffer=2) as loader:
        for step in range(3):
            batch = next(loader)
            loss, gradients = oracle(mllm, [data.samples(names_of(batch))])
            parallel.zero_grad()
            result = parallel.step(batch.given, 2, place=(batch.epoch, batch.position, step))
            assert abs(result.loss - loss) <= 1e-5 * abs(loss)
            for name, gradient in parallel.full_gradients().items():
                assert_same_gradient(name, gradient, gradients[name])
            moved += batch.moved
            names += names_of(batch)
    return moved, names


@pytest.mark.slow
def test_three_processes_give_the_numbers_of_one() -> None:
    result = run_ranks(3, same_as_one_process)
    assert [kind for kind, _ in result] == ["returned"] * 3, result
    assert result[0] == result[1] == result[2] and result[0][1][0] > 0


def dies(rank: int) -> str:
    _, parallel = placed(timeout=8.0)

    def source():
        for i in range(50):
            if rank == 1 and i == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            yield Sample(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4]), {}, str(i))

    begun = time.monotonic()
    with StreamLoader(IterableStream([source] * 3), parallel, 6, options=StreamOptions(timeout=8)) as loader:
        for _ in range(5):
            try:
                batch = next(loader)
                parallel.step(batch.given)
            except Exception as error:
                return f"{time.monotonic() - begun:.0f} {error}"
    return "nothing"


@pytest.mark.slow
def test_a_reader_that_dies_is_named() -> None:
    first, second, third = run_ranks(3, dies, timeout=90.0, grace=60.0)
    assert second == ("died", -signal.SIGKILL)
    for kind, text in (first, third):
        assert kind == "returned" and "rank 1" in text, (first, third)
