"""Frozen weights in bf16: half the bytes, the same bf16 run."""

from __future__ import annotations

import pytest
import torch

from interlace.layout import Layout, ParallelSpec
from interlace.model.lora import add_lora
from interlace.run import parallelize
from interlace.train.config.load import ConfigError
from interlace.train.models.frozen import narrow_frozen
from tests.tiny import random_microbatches, tiny_mllm
from tests.train.one_process import toy_config


@pytest.mark.parametrize("tied", [False, True])
def test_a_bf16_run_is_the_same_with_its_frozen_weights_in_bf16(tied: bool) -> None:
    result = []
    for narrow in (False, True):
        mllm = tiny_mllm(encoders=("vision",), tied=tied)
        mllm.freeze("vision")
        torch.manual_seed(1)
        add_lora(mllm, rank=2)
        if narrow:
            before = {name: parameter.dtype for name, parameter in mllm.named_parameters()}
            assert (
                narrow_frozen(mllm)
                == sum(
                    type(part) in (torch.nn.Linear, torch.nn.Conv2d) and not part.weight.requires_grad
                    for part in mllm.modules()
                )
                - tied
            )
            after = {name: parameter for name, parameter in mllm.named_parameters()}
            assert all(after[name].dtype is before[name] for name in after if after[name].requires_grad)
            assert all(
                p.dtype is torch.float32 for n, p in after.items() if p.dim() < 2 or ("embed" in n and p.dim() == 2)
            )
        specs = {name: ParallelSpec() for name in mllm.modules_order()}
        layout = Layout.from_specs(mllm, specs, ranks=1)
        parallel = parallelize(mllm, layout, transport="local", autocast=torch.bfloat16)
        loss = float(parallel.step(random_microbatches(mllm, "all", count=2)))
        result.append((loss, {n: p.grad for n, p in mllm.named_parameters() if p.grad is not None}))
    (loss, gradients), (again, others) = result
    assert loss == again and gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=0, atol=0)


def test_products_in_fp32_have_no_use_for_rounded_weights() -> None:
    with pytest.raises(ConfigError, match="frozen_dtype = 'bf16' is for precision = 'bf16', but precision is 'fp32'"):
        toy_config('train.frozen_dtype="bf16"')
    assert toy_config('train.frozen_dtype="bf16"', 'train.precision="bf16"').train.frozen_dtype == "bf16"
