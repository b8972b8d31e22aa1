"""Parity of representative pipelines with one process."""

from __future__ import annotations

import os

import pytest

from interlace.run import parallelize
from tests.run.parity import FREEZING, assert_same_gradient, make_layout, oracle
from tests.tiny import random_microbatches, tiny_mllm

# placement, freezing, batch, checkpointing, tied
REPRESENTATIVE = [
    ("parallel", "nothing", "all", "none", True),
    ("parallel", "encoders but projectors", "no_image", "full", False),
    ("colocated", "nothing", "no_image", "full", True),
    ("colocated", "encoders and language model", "all", "none", False),
    ("replicated", "nothing", "all", "selective", True),
    ("replicated", "all but one encoder", "no_image", "none", False),
    ("parallel", "language model", "text", "none", False),
    ("colocated", "encoders", "text", "none", True),
]


def parity(rank: int, world: int, cases: list[tuple]) -> int:
    """Compares this rank's loss and gradients with one process for each case; returns the number compared."""
    compared = 0
    for placement, freezing, kind, checkpointing, tied in cases:
        mllm = tiny_mllm(tied=tied, layers=3)
        for path in FREEZING[freezing]:
            mllm.freeze(path)
        mllm.train()
        microbatches = random_microbatches(mllm, kind)
        loss, gradients = oracle(mllm, microbatches)
        mllm.zero_grad()
        layout = make_layout(mllm, placement, world)
        parallel = parallelize(mllm, layout, transport="distributed", checkpointing=checkpointing, timeout=30)
        result = parallel.step(microbatches)
        where = (placement, freezing, kind, checkpointing, tied, rank)
        assert abs(result.loss - loss) <= 1e-5 * abs(loss), where
        for name, parameter in parallel.named_parameters():
            assert_same_gradient(f"{where} {name}", parameter.grad, gradients[name])
            compared += 1
        tied_names = {name for names in mllm.tied_parameters() for name in names[1:]}
        total = sum(
            float(g.double().pow(2).sum()) for n, g in gradients.items() if g is not None and n not in tied_names
        )
        assert parallel.clip_grad_norm_(1e9) == pytest.approx(total**0.5, rel=1e-5), where
        assert parallel.channel is not None
        assert parallel.channel.paths.get("pipeline edge", set()) <= {os.environ.get("INTERLACE_TRANSPORT", "gloo")}
    return compared
