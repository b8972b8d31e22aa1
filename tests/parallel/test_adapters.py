"""LoRA in models sharded over two ranks: outputs, gradients and state equal those of peft's own unsharded layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from interlace.comm import run_local
from interlace.parallel import ColumnParallelLinear, RowParallelLinear, plan_for, tensor_parallel
from tests.attention.hf_models import random
from tests.parallel.families import HIDDEN, randomize
from tests.parallel.families_cases import EVEN, LANGUAGE, VISION, assert_same, ids, language
from tests.parallel.tensor import SEQUENCE, assert_close, family

peft = pytest.importorskip("peft")

FAST = ("glm4", "qwen2_5_vl")  # gate and up-projection in one layer, queries, keys and values in one


@pytest.fixture
def double():
    """Softmax over scores of random weights is steep: in fp32 gradients of some queries are mostly rounding errors."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def adapted(model, targets, **options):
    """The model with nonzero adapters of rank 3, in unchanged evaluation or training mode."""
    training = model.training
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, **options), model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 * parameter.shape[-1] ** -0.5
    return model.train(training)


def linear_layers(model):
    """All of its nn.Linear except the head."""
    result = [name for name, part in model.named_modules() if type(part) is nn.Linear]
    return [name for name in result if name != "lm_head"]


def some_slow(names):
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


@SEQUENCE
@pytest.mark.parametrize("name", some_slow(LANGUAGE))
def test_language_models(name, sequence_parallel):
    model, given = language(name), ids()
    adapted(model, linear_layers(model))
    assert_same(model, lambda model: model(given, use_cache=False), sequence_parallel=sequence_parallel)


@SEQUENCE
@pytest.mark.parametrize("name", some_slow(VISION))
def test_encoders(name, sequence_parallel, double):
    make, call = VISION[name]
    torch.manual_seed(0)
    model = randomize(make()).eval()
    model.set_attn_implementation("eager")
    adapted(model, linear_layers(model))
    assert_same(model, call, sequence_parallel=sequence_parallel and name in EVEN)


@SEQUENCE
def test_a_column_and_a_row_layer_without_anything_around(sequence_parallel):
    """By a user-defined plan; the bias of a row layer counts once, and the adapter's scale too."""
    torch.manual_seed(0)
    whole = adapted(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), ["0", "2"])
    x, upstream = random(2, 6, 6), random(2, 6, 6, seed=1)
    whole[2].base_layer.bias.data.fill_(5.0)
    (whole(x) * upstream).sum().backward()
    y, want = whole(x).detach(), {name: parameter.grad for name, parameter in whole.named_parameters()}
    whole.zero_grad()

    def rank(group):
        plan = {"0": "column", "2": "row"}
        mine = tensor_parallel(copy.deepcopy(whole), plan, group, sequence_parallel=sequence_parallel)
        rows = slice(3 * group.rank, 3 * group.rank + 3) if sequence_parallel else slice(None)
        out = mine(x[:, rows])
        (out * upstream[:, rows]).sum().backward()
        assert_close(out.detach(), y[:, rows])
        column, row = mine[0], mine[2]
        assert type(column.lora_A["default"]) is nn.Linear and type(row.lora_B["default"]) is nn.Linear
        cut = [column.lora_B["default"], row.lora_A["default"]]
        assert [type(part) for part in cut] == [ColumnParallelLinear, RowParallelLinear]
        assert all(part.weight.numel() == 3 * 8 // 2 for part in cut)
        for name, parameter in mine.named_parameters():
            owner = mine.get_submodule(name.rpartition(".")[0])
            if want[name] is None:
                assert parameter.grad is None, name
            else:
                assert_close(parameter.grad, owner.piece("weight", want[name]) if owner in cut else want[name], name)

    run_local(2, rank)


@SEQUENCE
def test_a_head_that_is_cut_by_its_words(sequence_parallel):
    model, given = language("glm4"), ids()
    adapted(model, ["lm_head"])
    plan = plan_for(model) | {"lm_head": "vocabulary"}
    assert_same(model, lambda model: model(given, use_cache=False), plan=plan, sequence_parallel=sequence_parallel)


def test_what_cannot_be_cut_is_refused():
    model, _ = family("llama")
    adapted(model, ["q_proj"], use_dora=True)
    with pytest.raises(
        ValueError, match=r"layers.0.self_attn.q_proj has an adapter other than plain LoRA of a linear layer"
    ):
        run_local(2, lambda group: tensor_parallel(model, plan_for(model), group))
    model, _ = family("llama")
    adapted(model, ["q_proj"])
    plan = plan_for(model) | {"model.layers.*.self_attn": "gather_narrow"}
    with pytest.raises(ValueError, match=r"q_proj has an adapter, but gets only a part of the features: leave"):
        run_local(2, lambda group: tensor_parallel(model, plan, group))
    assert HIDDEN % 2 == 0 and not any("lora_A" in name for name in plan)  # plans use the layer names without adapters
