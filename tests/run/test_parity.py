"""One process is the oracle: every layout gives the loss and gradients of ``mllm(**batch)``."""

from __future__ import annotations

import itertools

import pytest

from interlace.plan import ParallelPlan, ParallelSpec
from interlace.run import parallelize
from tests.tiny import random_microbatches, tiny_mllm

FREEZING = {
    "nothing": (),
    "encoders": ("vision", "vision.projector", "audio", "audio.projector"),
    "encoders but projectors": ("vision", "audio"),
    "language model": ("language_model",),
    "encoders and language model": ("vision", "audio", "language_model"),
    "all but one encoder": ("vision", "vision.projector", "language_model", "audio.projector"),
}


def oracle(mllm, microbatches):
    """Loss and gradients in one process, each parameter under all of its names."""
    samples = [sample for group in microbatches for sample in group]
    mllm.zero_grad()
    output = mllm(**mllm.collate(samples))
    if output.loss.requires_grad:  # not so if only encoders train and no sample has their modality
        output.loss.backward()
    return float(output.loss.detach()), {
        name: None if p.grad is None else p.grad.clone() for name, p in mllm.named_parameters(remove_duplicate=False)
    }


def assert_same_gradient(name, found, expected):
    if expected is None:
        assert found is None, f"{name} has a gradient in the pipeline but none in one process"
        return
    assert found is not None, f"{name} has no gradient in the pipeline"
    error = (found - expected).norm() / expected.norm().clamp_min(1e-12)
    scale = expected.norm()
    assert error <= 1e-5 or (found - expected).norm() <= 1e-9, f"{name}: relative error {error:.2e} (norm {scale:.2e})"


def make_plan(mllm, placement, ranks):
    if placement == "replicated":
        pp = {"language_model": ranks}
    elif ranks == 3 and placement == "colocated":
        pp = {"language_model": 1, "vision": 2, "audio": 2}
    else:
        pp = {"language_model": 1}
    specs = {name: ParallelSpec(pp=pp.get(name, 1)) for name in mllm.modules_order()}
    return ParallelPlan.from_specs(mllm, specs, placement=placement, ranks=ranks)


CASES = list(
    itertools.product(
        ("colocated", "parallel", "replicated"),
        FREEZING,
        ("all", "no_image", "text"),
        (False, True),  # activation checkpointing
        (False, True),  # tied embeddings
        (1, 2, 3),
    )
)


@pytest.mark.parametrize("placement", ("colocated", "parallel", "replicated"))
@pytest.mark.parametrize("freezing", FREEZING)
def test_every_layout_equals_one_process(placement, freezing):
    for _, _, kind, checkpointing, tied, ranks in (c for c in CASES if c[:2] == (placement, freezing)):
        mllm = tiny_mllm(tied=tied, layers=3)
        for path in FREEZING[freezing]:
            mllm.freeze(path)
        mllm.train()
        microbatches = random_microbatches(mllm, kind)
        loss, gradients = oracle(mllm, microbatches)
        mllm.zero_grad()
        parallel = parallelize(mllm, make_plan(mllm, placement, ranks), checkpointing=checkpointing)
        result = parallel.step(microbatches)
        where = f"{placement}, {freezing} frozen, {kind}, checkpointing={checkpointing}, tied={tied}, {ranks} ranks"
        assert abs(result.loss - loss) <= 1e-5 * abs(loss), where
        seen = set()
        for name, parameter in parallel.named_parameters():
            seen.add(name)
            try:
                assert_same_gradient(name, parameter.grad, gradients[name])
            except AssertionError as error:
                raise AssertionError(f"{where}: {error}") from None
        missing = {name for name, _ in mllm.named_parameters()} - seen
        assert not missing, f"{where}: no rank holds {sorted(missing)[:3]}"
