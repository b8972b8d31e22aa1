"""Communication inside a lane uses the given transport, and no other communication does."""

from __future__ import annotations

import threading

import pytest

from interlace.comm.process.agreement import NO_ARGUMENTS
from interlace.comm.transports.base import Forwarding
from interlace.layout import Layout, ParallelSpec
from interlace.run import parallelize
from tests.run.parity import oracle
from tests.tiny import random_microbatches, tiny_mllm


class Counting(Forwarding):
    """Counts the batches of all instances, in the order of their creation: one per group and rank."""

    def __init__(self, inner, counts):
        super().__init__(inner)
        self.counts, self.lock = counts, threading.Lock()

    def copy_batch(self, outgoing, incoming, label, then=None, arguments=NO_ARGUMENTS):
        with self.lock:
            self.counts[self.rank] = self.counts.get(self.rank, 0) + 1
        return self.inner.copy_batch(outgoing, incoming, label, then, arguments)


@pytest.mark.parametrize("spec", [ParallelSpec(tp=2), ParallelSpec(cp=2)], ids=["tp", "cp"])
def test_lanes_of_one_process(spec):
    mllm = tiny_mllm(encoders=(), kv_heads=2)
    [batch] = random_microbatches(mllm, "text", count=1)
    loss, _ = oracle(mllm, [batch])
    parallel = parallelize(mllm, Layout.from_specs(mllm, {"language_model": spec}), transport="local", timeout=30)
    counts: dict[int, int] = {}
    parallel.connect_lanes(lambda transport: Counting(transport, counts))
    assert parallel.step([batch]).loss == pytest.approx(loss, rel=1e-5)
    assert set(counts) == {0, 1} and counts[0] == counts[1] > 0
    parallel.connect_lanes(lambda transport: transport)
    once = dict(counts)
    assert parallel.step([batch]).loss == pytest.approx(loss, rel=1e-5)
    assert counts == once
