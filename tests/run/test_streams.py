"""Streams: items move from the rank that read them to the ranks that compute with them. Results equal one process."""

from __future__ import annotations

import pytest

from interlace.data import StreamLoader, StreamOptions
from interlace.layout import Layout, ParallelSpec
from interlace.model import Sample, SampleOutline
from interlace.run import parallelize
from tests.run.parity import assert_same_gradient, oracle
from tests.run.streamed import Counted, names_of
from tests.tiny import tiny_mllm

LLM = "language_model"
P = ParallelSpec
MIXED = ((1, 1), (0, 0), (2, 0), (0, 1), (1, 0))
CASES = {
    "one rank": ({"vision": P(), "audio": P(), LLM: P()}, "shared", MIXED),
    "shared": ({"vision": P(dp=2), "audio": P(dp=2), LLM: P(dp=2)}, "shared", MIXED),
    "shared, lanes": ({"vision": P(dp=4), "audio": P(dp=2, tp=2), LLM: P(tp=2, dp=2)}, "shared", MIXED),
    "unequal": ({"vision": P(dp=2), "audio": P(dp=1), LLM: P(dp=3)}, "parallel", MIXED),
    "context parallel": ({"vision": P(dp=2), "audio": P(), LLM: P(cp=2, pp=2)}, "parallel", MIXED),
    "tensor parallel": ({"vision": P(tp=2), "audio": P(), LLM: P(tp=2, dp=2)}, "parallel", MIXED),
    "colocated": ({"vision": P(pp=2), "audio": P(pp=2), LLM: P(dp=2)}, "colocated", MIXED),
    "replicated": ({"vision": P(), "audio": P(), LLM: P(pp=2)}, "replicated", MIXED),
    "no audio at all": ({"vision": P(dp=2), "audio": P(), LLM: P(dp=2)}, "parallel", ((1, 0), (0, 0))),
    "text alone": ({"vision": P(dp=2), "audio": P(), LLM: P(dp=2)}, "parallel", ((0, 0),)),
}


def made(specs, placement, kinds, *, shards=(5, 3, 7, 1), **options):
    mllm = tiny_mllm(layers=2, kv_heads=2)
    mllm.train()
    layout = Layout.from_specs(mllm, {name: specs[name] for name in mllm.modules_order()}, placement=placement)
    data = Counted(mllm, shards, kinds=kinds)
    return mllm, parallelize(mllm, layout, timeout=30, **options), data


FAST = ("unequal", "context parallel", "text alone")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in FAST else [pytest.mark.slow]) for c in CASES])
def test_streams_give_the_numbers_of_one_process(case: str) -> None:
    mllm, parallel, data = made(*CASES[case])
    with StreamLoader(data.stream, parallel, 6, options=StreamOptions(microbatches=2, timeout=30)) as loader:
        for step in range(3):
            batch = next(loader)
            whole = data.samples(names_of(batch))
            assert len(whole) == 6
            loss, gradients = oracle(mllm, [whole])
            mllm.zero_grad()
            result = parallel.step(batch.given, 2, place=(batch.epoch, batch.position, step))
            assert abs(result.loss - loss) <= 1e-5 * abs(loss), step
            for name, parameter in mllm.named_parameters():
                assert_same_gradient(name, parameter.grad, gradients[name])
            mllm.zero_grad()


@pytest.mark.parametrize("method", ["stratified", "entrain"])
def test_streams_work_with_assignment(method: str) -> None:
    specs = {"vision": P(dp=2), "audio": P(), LLM: P(dp=2)}
    mllm, parallel, data = made(specs, "parallel", MIXED, assign=method)
    with StreamLoader(data.stream, parallel, 8, options=StreamOptions(microbatches=2, timeout=30), buffer=4) as loader:
        batch = next(loader)
        loss, gradients = oracle(mllm, [data.samples(names_of(batch))])
        mllm.zero_grad()
        assert abs(parallel.step(batch.given, 2).loss - loss) <= 1e-5 * abs(loss)
        for name, parameter in mllm.named_parameters():
            assert_same_gradient(name, parameter.grad, gradients[name])


def test_ranks_without_tokens_cannot_compute_with_them() -> None:
    mllm, parallel, data = made({"vision": P(), "audio": P(), LLM: P()}, "parallel", MIXED)
    with StreamLoader(data.stream, parallel, 4, options=StreamOptions(timeout=30)) as loader:
        held = next(loader).given.of_rank
    assert {type(sample) for sample in held[2]} == {Sample}  # those of the language model
    assert {type(sample) for sample in held[0]} == {type(sample) for sample in held[1]} == {SampleOutline}
    with pytest.raises(RuntimeError, match="on another rank"):
        mllm.collate_module(LLM, held[0])
