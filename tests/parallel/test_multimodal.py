"""A whole multimodal model on a packed batch, its encoders and language model sharded by their ready plans."""

from __future__ import annotations

import copy

import pytest
import torch

from interlace.comm import run_local
from interlace.parallel import plan_for, tensor_parallel
from tests.model.zoo import build, gradients, qwen2, sample, samples
from tests.parallel.tensor import assert_close, assert_same_gradients


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence of the language model", "whole rows"])
def test_every_rank_has_the_loss_and_its_share_of_the_gradients(sequence_parallel):
    mllm = build(language=qwen2)
    batch = mllm.collate([*samples(mllm), sample(mllm, torch.Generator().manual_seed(3), 6)])
    assert batch["input_ids"].shape == (1, 70)
    loss = mllm(**batch).loss
    loss.backward()
    want = gradients(mllm)
    mllm.zero_grad()

    def rank(group):
        mine = copy.deepcopy(mllm)
        if sequence_parallel:  # the encoders' packed lengths are odd
            tensor_parallel(mine.language_model, group=group)
        else:
            plan = {**plan_for(mine), "encoders.*.projector": "replicate"}
            tensor_parallel(mine, plan, group, sequence_parallel=False)
        loss = mine(**batch).loss
        loss.backward()
        return loss.detach(), gradients(mine)

    results = run_local(2, rank)
    for result, _ in results:
        assert_close(result, loss.detach())
    assert_same_gradients(want, [grads for _, grads in results])


def test_projectors_are_not_replicated_silently():
    mllm = build()
    with pytest.raises(
        ValueError, match=r"no pattern of the plan matches 'encoders.vision.projector.up', .* add for example"
    ):
        tensor_parallel(mllm, plan_for(mllm))
