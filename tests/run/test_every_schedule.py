"""Every schedule on every layout of test_virtual_stages.py, with and without deferral, with any modules frozen: loss
and gradients equal those of one process.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from interlace.layout import Layout
from interlace.run import parallelize
from interlace.schedule import GENERATORS
from tests.run.parity import assert_same_gradient, oracle
from tests.run.virtual_stages import LAYOUTS, made
from tests.tiny import random_sample

FREEZING = {"nothing": (), "an encoder": ("vision",), "encoders": ("vision", "audio"), "all but projectors": None}
CHECKPOINTING = ("none", "full", "selective")
PAIRS = list(itertools.product(GENERATORS, LAYOUTS))
QUICK = PAIRS[::13]  # each schedule once, each on another layout


def check_case(number: int, schedule: str, name: str) -> int:
    """number: selects the frozen, deferred and recomputed parts. Returns the number of deferred samples."""
    mllm, layout = made(name)
    chosen = list(FREEZING.values())[number // 2 % 4]
    for path in ("vision", "audio", "language_model") if chosen is None else chosen:
        mllm.freeze(path)
    mllm.train()
    generator = torch.Generator().manual_seed(4 + number % 4)
    samples = [random_sample(mllm, generator, images=i % 4, clips=i % 2, text=3 + 9 * (i % 5)) for i in range(12)]
    loss, gradients = oracle(mllm, [samples])
    mllm.zero_grad()
    assign = "as_printed" if deferrable(layout) and number % 2 else "tokens"
    checkpointing = CHECKPOINTING[number % 3]
    parallel = parallelize(mllm, layout, schedule=schedule, assign=assign, checkpointing=checkpointing, timeout=30)
    result = parallel.step(samples, microbatches=3)
    where = f"{schedule} on {name}, {assign}, checkpointing={checkpointing}, frozen: {chosen}"
    assert abs(result.loss - loss) <= 1e-5 * abs(loss), where
    for parameter, gradient in parallel.full_gradients().items():
        try:
            assert_same_gradient(parameter, gradient, gradients[parameter])
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None
    assert result.table is not None
    return len(result.table.deferred)


def deferrable(layout: Layout) -> bool:
    """Encoders of a "shared" layout run all samples of a step before the first consumer."""
    return layout.placement != "shared"


def test_a_case_of_every_schedule():
    deferred = [check_case(number, *pair) for number, pair in enumerate(QUICK)]
    assert {schedule for schedule, _ in QUICK} == set(GENERATORS) and any(deferred)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", GENERATORS)
def test_every_schedule_on_every_layout(schedule):
    first = list(GENERATORS).index(schedule)
    mine = enumerate(layout for name, layout in PAIRS if name == schedule)
    # Over the schedules, every layout is covered with and without deferral, and with all frozen sets.
    deferred = [check_case(number + first, schedule, layout) for number, layout in mine]
    assert sum(map(bool, deferred)) >= 3
