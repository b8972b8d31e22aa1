"""An optimizer over the model whose ranks train copies does nothing, so it is refused; any other is let alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from interlace.plan import ParallelPlan, ParallelSpec
from interlace.run import parallelize
from tests.tiny import random_microbatches, tiny_mllm


def _parallel(**spec: int) -> tuple[Any, Any, list[Any]]:
    mllm = tiny_mllm(encoders=())
    plan = ParallelPlan.from_specs(mllm, {"language_model": ParallelSpec(**spec)})
    samples = [sample for group in random_microbatches(mllm, "text") for sample in group]
    return mllm, parallelize(mllm, plan, transport="local"), samples


@pytest.mark.parametrize("spec", [{"pp": 2}, {"dp": 2}], ids=str)
def test_an_optimizer_of_the_copied_model_is_refused_with_the_way_out(spec: dict[str, int]) -> None:
    mllm, parallel, samples = _parallel(**spec)
    for optimizer in (torch.optim.AdamW(mllm.parameters()), torch.optim.SGD(mllm.language_model.parameters(), lr=0.1)):
        parallel.step(samples)
        with pytest.raises(
            ValueError, match=r"no step trains.*parallel.named_parameters\(\).*parallel.copy_to\(mllm\)"
        ):
            optimizer.step()
    with pytest.raises(ValueError, match="no step trains"):  # one that makes the gradients itself
        torch.optim.LBFGS(mllm.parameters(), max_iter=2).step(lambda: parallel.step(samples))

    before = [parameter.detach().clone() for parameter in mllm.parameters()]
    right = torch.optim.AdamW([parameter for _, parameter in parallel.named_parameters()], lr=1e-2)
    first = float(parallel.step(samples))
    right.step()
    parallel.zero_grad()
    assert float(parallel.step(samples)) < first
    parallel.copy_to(mllm)
    assert any(not torch.equal(a, b) for a, b in zip(before, mllm.parameters(), strict=True))


def test_what_is_trained_may_be_stepped() -> None:
    """The model itself beside its copies (as the tests' oracle is), one rank in place, other models, a model alone."""
    mllm, parallel, samples = _parallel(pp=2)
    optimizer = torch.optim.AdamW(mllm.parameters())
    mllm(**mllm.collate(samples)).loss.backward()
    optimizer.step()
    idle = torch.nn.Linear(2, 2)  # a part that this batch did not use, with an optimizer of its own
    mllm.add_module("idle", idle)
    torch.optim.SGD(idle.parameters()).step()
    optimizer.zero_grad()
    mllm.requires_grad_(False)
    optimizer.step()  # all frozen: there is nothing to train
    mllm.requires_grad_(True)
    other = torch.nn.Linear(2, 2)
    torch.optim.AdamW(other.parameters()).step()
    del parallel
    gc.collect()
    optimizer.step()

    mllm, parallel, samples = _parallel()
    optimizer = torch.optim.AdamW(mllm.parameters())
    optimizer.step()
    parallel.step(samples)
    optimizer.step()
