"""Memory of forwards from some layers of each kind: equal to the byte to a run of all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from interlace.estimate import identical_layers as alike
from interlace.estimate import traced
from interlace.estimate.identical_layers import Alike, NotAlike, Storage
from interlace.estimate.traced import activations_of
from interlace.layout import Layout, ParallelSpec
from interlace.model import Checkpointing, MultimodalModel
from tests.attention.hf_models import FIVE
from tests.model import zoo

LLM = "language_model"
SIZES = {**zoo.COMMON, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
SIZES |= {"vocab_size": zoo.VOCAB}


def llama(layers: int = 9, **changes: Any) -> nn.Module:
    return zoo.llama(num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, **changes)


def gemma3() -> nn.Module:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 5
    config = {**SIZES, "num_hidden_layers": 15, "layer_types": kinds, "sliding_window": 6}
    return Gemma3ForCausalLM(Gemma3TextConfig(**config))


def mixed_experts() -> nn.Module:
    """A dense layer, then experts, with a dense layer in their middle."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0, 6]}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **experts, "num_hidden_layers": 12}))


@dataclass
class Case:
    language: Callable[[], nn.Module] = llama
    freeze: tuple[str, ...] = ()
    specs: dict[str, ParallelSpec] = field(default_factory=dict)
    encoders: bool = False
    checkpointing: Checkpointing = "none"
    sequence_parallel: bool = True
    autocast: torch.dtype | None = None
    split: bool = False

    def found(self) -> dict[str, Any]:
        with torch.device("meta"):
            parts = (lambda: zoo.siglip(num_hidden_layers=8), lambda: zoo.whisper(encoder_layers=8))
            mllm: MultimodalModel = zoo.build(*(parts if self.encoders else (None, None)), self.language)
        for path in self.freeze:
            mllm.freeze(path)
        mllm.train()
        specs = {name: self.specs.get(name, ParallelSpec()) for name in mllm.modules_order()}
        options = {"checkpointing": self.checkpointing, "sequence_parallel": self.sequence_parallel}
        layout = Layout.from_specs(mllm, specs)
        return activations_of(mllm, layout, **options, autocast=self.autocast, split=self.split)


ROOT = "language_model.model.layers"
CASES = {
    "alike": Case(),
    "two kinds, windows": Case(gemma3),
    "two kinds, halves": Case(gemma3, split=True),
    "experts and dense": Case(mixed_experts),
    "encoders, halves": Case(encoders=True, split=True),
    "frozen encoder": Case(encoders=True, freeze=("vision",), checkpointing="full"),
    "frozen in part": Case(
        lambda: llama(16), freeze=(f"{ROOT}.0", f"{ROOT}.1", f"{ROOT}.2", f"{ROOT}.3", f"{ROOT}.6.mlp")
    ),
    "frozen in part, halves": Case(freeze=tuple(f"{ROOT}.{i}.self_attn" for i in range(9)), split=True),
    "recomputed": Case(gemma3, checkpointing="full"),
    "selective": Case(checkpointing="selective"),
    "lanes": Case(specs={LLM: ParallelSpec(tp=2)}),
    "lanes, recomputed, halves": Case(specs={LLM: ParallelSpec(tp=2)}, checkpointing="full", split=True),
    "lanes, whole rows": Case(specs={LLM: ParallelSpec(tp=2)}, sequence_parallel=False),
    "tokens dealt": Case(encoders=True, specs={"vision": ParallelSpec(cp=2), LLM: ParallelSpec(cp=2)}),
    "16 bits": Case(autocast=torch.bfloat16),
}


FAST = ("alike",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
def test_as_from_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "experts and dense" and not FIVE:
        pytest.skip("experts of transformers 4.57 are modules")
    measured: list[Alike] = []
    filled = Alike.filled
    monkeypatch.setattr(Alike, "filled", lambda self, found: (measured.append(self), filled(self, found))[1])
    result = CASES[name].found()
    assert measured and all(each.skipped for each in measured)
    monkeypatch.setattr(traced, "Alike", Everything)
    assert result == CASES[name].found()


class Everything(Alike):
    """Runs all layers."""

    @classmethod
    def of(cls, mllm: Any, name: str) -> Alike:
        return Alike.none(len(mllm.layer_list(name)))


def kinds(text: str) -> list[Any]:
    """Lower-case letters are kinds of frozen layers, upper-case ones of trained layers."""
    return [(letter.lower(), (letter.isupper(),)) for letter in text]


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("AAAAAAAA", {0, 1, 2, 5, 6, 7}),
        ("AB", {0, 1}),
        ("A", {0}),
        ("aaaaaaAAAAAA", {0, 1, 4, 5, 6, 7, 8, 9, 10, 11}),  # no gradient enters 6, one enters 7
        ("AAAAAAAABAAAAAAAA", {0, 1, 2, 6, 7, 8, 9, 10, 13, 14, 15, 16}),
    ],
)
def test_first_and_last_of_each_kind_are_run(text: str, run: set[int]) -> None:
    result = Alike(kinds(text))
    ran = set(range(len(text))) - result.skipped
    assert ran <= run
    for layer in result.skipped:
        like = result.like[layer]
        assert {like, like - 1} <= ran and text[like - 1 : like + 1] == text[layer - 1 : layer + 1]


def kept(size: int, *layers: int, home: int = -1, edge: int = -1) -> Storage:
    made = Storage(size, home=home)
    made.layers, made.edge = set(layers), edge
    return made


def given(**changes: Storage) -> list[Storage]:
    """Nine identical layers, of which 3, 4 and 5 are not run."""
    ran = (0, 1, 2, 6, 7, 8)
    enters = [kept(4, *({i - 1, i} & {*ran}), home=i - 1, edge=i) for i in range(1, 9)]
    return [*enters, *(kept(8, i, home=i) for i in ran), kept(16, *ran), *changes.values()]


def test_what_is_copied_by_hand() -> None:
    result = Alike(kinds("AAAAAAAAA")).filled(given())
    seen = sorted((each.bytes, sorted(each.layers), each.edge) for each in result)
    expected = [(4, [i - 1, i], i) for i in range(1, 9)] + [(8, [i], -1) for i in range(9)]
    assert seen == sorted([*expected, (16, list(range(9)), -1)])


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (kept(3, 2, 7, home=2), r"layers \[2, 7\] keep tensors made by layer 2"),
        (kept(3, 7, home=7), "layers 2 and 7 have the same structure but keep different bytes"),
        (kept(3, 7), "layers 2 and 7 have the same structure but keep different bytes"),
        (kept(3, 2, edge=2), "layers 2 and 7 have the same structure"),
        (kept(3, 3, edge=4), "the inputs of layers 4 and 2 differ"),
    ],
)
def test_what_does_not_follow_is_run_whole(more: Storage, why: str) -> None:
    with pytest.raises(NotAlike, match=why):
        Alike(kinds("AAAAAAAAA")).filled(given(more=more))


def test_layers_that_give_more_than_a_hidden_state_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refused(self: Alike, layers: Any) -> None:
        asked.append(bool(self.skipped))
        if self.skipped:
            raise NotAlike("for once")

    monkeypatch.setattr(alike.Alike, "leave_out", refused)
    assert len(CASES["alike"].found()[LLM].edges) == 10
    assert asked[0] and not any(asked[1:])
