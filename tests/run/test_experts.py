"""Experts in tensor-parallel lanes: whole on every rank, on its own rows or on all rows. The oracle is one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from interlace.estimate import traced
from interlace.estimate.traced import activations_of
from interlace.layout import Layout, ParallelSpec
from interlace.model import IGNORE, MultimodalModel
from interlace.plan.memory import Load
from interlace.run import parallelize
from tests.attention.hf_models import FIVE
from tests.model import zoo
from tests.run.parity import oracle
from tests.run.tensor_parallel import LLM, assert_gradient, norm_of

SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": zoo.VOCAB}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {"qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig), "mixtral": (MixtralForCausalLM, MixtralConfig)}

pytestmark = pytest.mark.skipif(not FIVE, reason="the experts of transformers 4.57 are modules, which a plan refuses")


def model(family: str) -> MultimodalModel:
    make, config = FAMILIES[family]
    return zoo.build(None, None, lambda: make(config(**{**zoo.COMMON, **SIZES, **EXPERTS, "num_hidden_layers": 2})))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("sequence_parallel", "shard", "frozen"),
    [(True, "none", False), (False, "none", False), (False, "full", False), (True, "optimizer", True)],
)
def test_experts_equal_one_process(family: str, sequence_parallel: bool, shard: Any, frozen: bool) -> None:
    """With tp = 2 and two replicas. Sharded where ranks apply them to all rows, or where they are frozen."""
    mllm = model(family)
    generator = torch.Generator().manual_seed(0)
    batch = [[zoo.sample(mllm, generator, 7)], [zoo.sample(mllm, generator, n) for n in (5, 6)]]
    if frozen:
        for name, _ in list(mllm.named_modules()):
            if name.endswith((".mlp", ".block_sparse_moe")):
                mllm.freeze(name)
    loss, gradients = oracle(mllm, batch)
    mllm.zero_grad()
    layout = Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2, dp=2, shard=shard)})
    parallel = parallelize(mllm, layout, timeout=30, sequence_parallel=sequence_parallel)
    assert parallel.step(batch).loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_gradient(name, parameter.grad, gradients[name], norm_of(gradients, mllm))
    assert parallel.clip_grad_norm_(1e9) == pytest.approx(norm_of(gradients, mllm), rel=1e-6)
    kept = {name for sharded in parallel._ranks[0].sharded.values() for name in sharded.weights}
    experts = {name for name, _ in mllm.named_parameters() if ".experts." in name}
    assert experts and (experts & kept == (experts if shard == "full" else set()))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_experts_keep_in_fp32_is_found_on_shapes_alone(family: str) -> None:
    """Equal to what autograd keeps in a real forward of all samples, except for rounding of small tensors."""
    mllm = model(family).train()
    generator = torch.Generator().manual_seed(0)
    samples = [zoo.sample(mllm, generator, n) for n in (40, 24)]
    stage = mllm.slice(LLM, 0, len(mllm.layer_list(LLM)), copy=True)
    weights = {each.untyped_storage().data_ptr() for each in (*stage.parameters(), *stage.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        loss = stage(mllm.collate_module(LLM, samples) | {"features": {}})
    assert loss.requires_grad
    real = sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
    result = activations_of(model(family).to("meta").train(), Layout.from_specs(mllm, {LLM: ParallelSpec()}))[LLM]
    load = Load(sum(map(len, samples)), sum(int((sample.labels != IGNORE).sum()) for sample in samples))
    assert result.of_stage(0, 2, load) == pytest.approx(real, rel=0.05)
    with FakeTensorMode():  # the replacement of PyTorch's own rule, which supports only bfloat16
        like = torch.empty(10, 24, dtype=torch.bfloat16), torch.empty(4, 24, 16, dtype=torch.bfloat16)
        offs = torch.empty(4, dtype=torch.int32)
        expected = torch._grouped_mm(*like, offs=offs), torch._grouped_mm(like[0].t(), like[0], offs=offs)
    with traced._Shapes():
        like = torch.empty(10, 24, dtype=torch.float16), torch.empty(4, 24, 16, dtype=torch.float16)
        offs = torch.empty(4, dtype=torch.int32)
        made = torch._grouped_mm(*like, offs=offs), torch._grouped_mm(like[0].t(), like[0], offs=offs)
    assert [(each.shape, each.stride()) for each in made] == [(each.shape, each.stride()) for each in expected]


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_shard_that_leaves_trained_experts_whole_is_refused(shard: Any) -> None:
    mllm = model("qwen3_moe")
    layout = Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2, dp=2, shard=shard)})
    with pytest.raises(ValueError, match=f"shard = '{shard}'.*experts.*stay unsharded.*set sequence_parallel to false"):
        parallelize(mllm, layout)
    alone = Layout.from_specs(mllm, {LLM: ParallelSpec(tp=2, shard=shard)})  # no other rank in the lane
    parallelize(mllm, alone)
