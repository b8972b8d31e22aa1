"""torch.export of HuggingFace models: programs that make masks from their inputs, or a refusal; fake tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from interlace.attention import AttentionPlan
from interlace.attention.hf import NAME, carrier, use_plan
from interlace.masks import BitfieldMask
from tests.attention.hf_models import llama, make, random, text_ids
from tests.attention.hf_pairs import pair


@pytest.fixture(autouse=True)
def no_fallbacks():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="interlace:")
        yield


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask=None):
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits


class Features(Logits):
    def forward(self, pixels):
        return self.model(pixels).last_hidden_state


def padded(lengths, width):
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize(
    ("name", "strict"),
    [
        *(("llama", False), ("mistral", False)),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("llama", "mistral")),
    ],
)
def test_a_program_makes_its_masks_from_its_inputs(name, strict):
    """Inputs of any size, also of more than one block."""
    model, eager = pair(name)
    rows, length = (torch.export.Dim(name, min=2, max=limit) for name, limit in (("rows", 8), ("length", 300)))
    sizes = ({0: rows, 1: length},) * 2
    example = (text_ids(3, 8), padded([8, 5, 2], 8))
    program = torch.export.export(Logits(model), example, dynamic_shapes=sizes, strict=strict)
    assert sum("bitfield_attention" in str(node.target) for node in program.graph.nodes) == 2
    for lengths, width in (([8, 5, 2], 8), ([3, 11], 11), ([150, 200, 1, 7], 200)):
        ids, seen = text_ids(len(lengths), width), padded(lengths, width)
        result, wanted = program.module()(ids, seen), Logits(eager)(ids, seen)
        torch.testing.assert_close(result[seen.bool()], wanted[seen.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_a_plan_would_be_a_constant_of_the_program(strict):
    model = make("llama")
    model.set_attn_implementation(NAME)
    ids, plan = text_ids(1, 6), AttentionPlan.build(BitfieldMask.causal(1, 6))
    refused = pytest.raises(Exception, match="would make the plan a constant of the program: export the model without")
    with refused:
        torch.export.export(Logits(model), (ids, carrier(plan)), strict=strict)
    torch._dynamo.reset()
    with use_plan(plan), refused:
        torch.export.export(Logits(model), (ids,), strict=strict)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traces_are_refused():
    refused = pytest.raises(ValueError, match=r"torch\.jit\.trace would make the plan a constant.*use torch\.export")
    model = make("llama")
    model.set_attn_implementation(NAME)
    with refused:
        torch.jit.trace(Logits(model), (text_ids(1, 6),), check_trace=False)
    tower = make("siglip")
    tower.set_attn_implementation(NAME)
    with use_plan(AttentionPlan.build(BitfieldMask.full(1, 16))), refused:
        torch.jit.trace(Features(tower), random(1, 3, 16, 16), check_trace=False)


def test_shapes_among_fake_tensors():
    with FakeTensorMode():
        model = llama(attn_implementation=NAME)
        out = model(torch.ones(2, 8, dtype=torch.int64), attention_mask=torch.ones(2, 8), use_cache=False)
        assert out.logits.shape == (2, 8, 64)
        mask = BitfieldMask(torch.ones(1, 8, dtype=torch.int64))
        assert AttentionPlan.build(mask).q_len == 8
