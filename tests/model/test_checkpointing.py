"""Activation checkpointing: the same gradients, less memory, and no costly operation repeated if that was requested."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy
from transformers import (
    GPT2Config,
    GPT2Model,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    VoxtralRealtimeEncoderConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.voxtral_realtime.modeling_voxtral_realtime import VoxtralRealtimeEncoder

from interlace import AttentionPlan, BitfieldMask
from interlace.attention.hf import use_plan
from interlace.comm import run_local
from interlace.comm.transports.base import Forwarding, Ticket
from interlace.model import Media, ModalityModule, MultimodalModel, Sample, set_checkpointing
from interlace.model.checkpointing import KEPT, keeps
from interlace.parallel import plan_for, tensor_parallel
from tests.model import wholes, zoo

TOKENS, HIDDEN = 128, 64
MODES = ("none", "full", "selective")


class Watch(TorchDispatchMode):
    """Counts operations, and the live bytes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.count[function.name()] += 1
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())

    def costly(self) -> int:
        """Operations whose results "selective" keeps."""
        return sum(number for name, number in self.count.items() if name in KEPT)


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_attention_heads": 4, "num_hidden_layers": 2}
    return LlamaModel(LlamaConfig(vocab_size=8, num_key_value_heads=4, **{**sizes, **options})).train()


def siglip(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_attention_heads": 4, "num_hidden_layers": 2}
    return SiglipVisionModel(SiglipVisionConfig(image_size=16, patch_size=4, **{**sizes, **options})).train()


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(next(part for part in model.modules() if isinstance(part, nn.ModuleList)))


def forward(model: nn.Module, dtype: torch.dtype | None = None) -> torch.Tensor:
    torch.manual_seed(1)
    plan = AttentionPlan.build(BitfieldMask.causal(1, TOKENS))
    with use_plan(plan), nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        if isinstance(model, SiglipVisionModel):
            with use_plan(None):
                return model(pixel_values=torch.randn(TOKENS // 16, 3, 16, 16)).last_hidden_state
        return model(inputs_embeds=torch.randn(1, TOKENS, HIDDEN), use_cache=False).last_hidden_state


def gradients(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor | None]:
    forward(model, dtype).float().square().sum().backward()
    result = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return result


@pytest.mark.parametrize("attention", ["interlace", "sdpa", "eager"])
@pytest.mark.parametrize("make", [llama, siglip])
def test_selective_keeps_more_than_full_and_less_than_none(make: Callable[..., nn.Module], attention: str) -> None:
    kept, again = {}, {}
    for mode in MODES:
        model = make(attn_implementation=attention)
        set_checkpointing(layers_of(model), mode)
        with Watch() as watch:
            out = forward(model)
        kept[mode] = watch.bytes()
        with Watch() as watch:
            out.sum().backward()
        again[mode] = watch.costly()
    assert kept["full"] < 0.3 * kept["selective"] < 0.3 * 0.8 * kept["none"]
    assert again["selective"] == again["none"] < again["full"]
    if (make, attention) == (llama, "interlace"):  # as documented, except for tensors outside the layers
        row = TOKENS * HIDDEN * 4 * len(layers_of(model))
        result = {mode: kept[mode] / row for mode in MODES}
        assert result == pytest.approx({"none": 11 + 4 * 4, "full": 1, "selective": 7 + 2 * 4}, abs=2)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_gradients_are_the_same_bits(data: st.DataObject) -> None:
    """Dropout of every kind, frozen parts, autocast, attention of torch and of Interlace."""
    kind = data.draw(st.sampled_from(["llama", "siglip", "gpt2"]))
    drop = data.draw(st.sampled_from([0.0, 0.3]))
    attention = data.draw(st.sampled_from(["sdpa", "eager"] + ["interlace"] * (drop == 0.0)))
    if kind == "gpt2":
        torch.manual_seed(0)
        drops = {name: drop for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
        config = GPT2Config(n_embd=HIDDEN, n_head=4, n_layer=2, vocab_size=8, n_positions=TOKENS, **drops)
        config._attn_implementation = attention
        model: nn.Module = GPT2Model(config).train()
    else:
        make = {"llama": llama, "siglip": siglip}[kind]
        model = make(attn_implementation=attention, attention_dropout=drop)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(data.draw(st.booleans(), name))
    if not any(p.requires_grad for p in model.parameters()):
        next(model.parameters() if kind != "llama" else model.layers.parameters()).requires_grad_()
    dtype = data.draw(st.sampled_from([None, torch.bfloat16]))
    if not forward(model, dtype).requires_grad:  # an unused embedding
        return
    wanted = gradients(model, dtype)
    for mode in ("full", "selective"):
        set_checkpointing(layers_of(model), mode)
        result = gradients(copy.deepcopy(model), dtype)
        assert wanted.keys() == result.keys()
        for name, expected in wanted.items():
            if expected is None:
                assert result[name] is None, name
            else:
                torch.testing.assert_close(result[name], expected, rtol=0, atol=0, msg=f"{mode} {name}")


def granite() -> MultimodalModel:
    """A language model with experts. Its forward has no use_cache argument, but its decoder's has."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    config = GraniteMoeConfig(**zoo.COMMON, **experts, hidden_size=24, vocab_size=zoo.VOCAB)
    return zoo.build(None, None, language=lambda: GraniteMoeForCausalLM(config))


def text_alone(mllm: MultimodalModel) -> tuple[MultimodalModel, Callable[[], torch.Tensor]]:
    ids = [torch.arange(3, 3 + length) for length in (9, 5)]
    batch = mllm.collate([Sample(row, row.roll(-1)) for row in ids])
    return mllm, lambda: mllm(**batch).loss


def listener() -> tuple[ModalityModule, Callable[[], torch.Tensor]]:
    """An audio encoder that takes clips unpadded."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = VoxtralRealtimeEncoderConfig(**sizes, num_key_value_heads=2, head_dim=8, num_mel_bins=8)
    encoder = ModalityModule(VoxtralRealtimeEncoder(config), projector=nn.Identity())
    encoder.connect(encoder.feature_size)
    clips = [Media((8, frames), encoder.tokens((8, frames)), torch.randn(8, frames)) for frames in (32, 48)]
    inputs = encoder.collate(clips)
    return encoder, lambda: encoder(**inputs).square().sum()


@pytest.mark.parametrize(
    "make", [lambda: text_alone(granite()), lambda: text_alone(MultimodalModel.of_whole(wholes.qwen3_5())), listener]
)
def test_no_cache_is_kept(make: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]) -> None:
    """A recomputed layer would find its keys in a cache a second time."""
    torch.manual_seed(0)
    model, loss = make()
    result = {}
    for mode in MODES:
        layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
        set_checkpointing(layers, mode)
        model.zero_grad()
        loss().backward()
        result[mode] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for mode in ("full", "selective"):
        assert result[mode].keys() == result["none"].keys()
        assert all(torch.equal(result[mode][name], want) for name, want in result["none"].items())


class Counting(Forwarding):
    """Counts the batches of copies."""

    batches = 0

    def copy_batch(self, *args: Any, **more: Any) -> Ticket:
        self.batches += 1
        return self.inner.copy_batch(*args, **more)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_meet_no_more_often_than_without(sequence_parallel: bool) -> None:
    """And the parts of a sum are not kept beside the sum."""
    result: dict[str, list[Any]] = {}
    whole, x = llama(attn_implementation="interlace"), torch.randn(1, TOKENS, HIDDEN)
    for mode in MODES:

        def rank(inner: Any, mode: Any = mode) -> tuple[int, int, int, dict[str, Any], int]:
            model, group = copy.deepcopy(whole), Counting(inner)
            tensor_parallel(model, plan_for(model), group, sequence_parallel=sequence_parallel)
            set_checkpointing(layers_of(model), mode)
            with Watch() as watch, use_plan(AttentionPlan.build(BitfieldMask.causal(1, TOKENS))):
                out = model(inputs_embeds=x, use_cache=False).last_hidden_state
            kept = watch.bytes()
            with torch.autograd.set_multithreading_enabled(False), Watch() as watch:
                out.square().sum().backward()
            grads = {name: p.grad for name, p in model.named_parameters()}
            return kept, watch.count["interlace::collective"], watch.costly(), grads, group.batches

        result[mode] = run_local(2, rank)
    none, full, selective = (result[mode] for mode in MODES)
    row = TOKENS * HIDDEN * 4 * 2
    for i in range(2):
        assert full[i][0] < selective[i][0] < none[i][0]
        assert selective[i][1] == none[i][1] == 0 < full[i][1]
        assert selective[i][2] == none[i][2] < full[i][2]
        assert selective[i][4] == none[i][4] < full[i][4]
        if not sequence_parallel:
            # input, q, k, v and attention in halves, the two sums, gate and up in halves
            assert selective[i][0] / row == pytest.approx(1 + 4 / 2 + 2 + 2 * 4 / 2, abs=1.5)
        for name, expected in none[i][3].items():
            for other in (full, selective):
                assert expected is None or torch.equal(other[i][3][name], expected), name


def test_an_attention_that_drops_out_runs_again() -> None:
    """It draws random numbers: if it were skipped, all later dropout would differ in the recomputation."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    q = torch.zeros(1, 1, 1, 8)

    def kept(operation: Any, *args: Any, **kwargs: Any) -> bool:
        return keeps(None, operation, *args, **kwargs) is CheckpointPolicy.MUST_SAVE  # type: ignore[arg-type]

    assert kept(flash, q, q, q) and kept(flash, q, q, q, 0.0) and kept(flash, q, q, q, dropout_p=0.0)
    assert not kept(flash, q, q, q, 0.1) and not kept(flash, q, q, q, dropout_p=0.1)
    assert kept(efficient, q, q, q, None, True) and not kept(efficient, q, q, q, None, True, 0.1)
    assert kept(torch.ops.aten.mm.default, q, q) and not kept(torch.ops.aten.add.Tensor, q, q)


def test_what_is_kept_has_the_names_of_operations() -> None:
    """A misspelled name would be recomputed silently."""
    for name in KEPT:
        space, operation = name.split("::")
        assert hasattr(getattr(torch.ops, space), operation), name


@pytest.mark.parametrize("mode", [True, False, None, "some"])
def test_other_modes_are_refused(mode: Any) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r'must be "none", "full" or "selective", not '):
        set_checkpointing([layer], mode)
    with pytest.raises(ValueError, match=r'must be "none", "full" or "selective", not '):
        MultimodalModel.set_checkpointing(nn.Module(), mode)  # type: ignore[arg-type]
    assert "forward" not in layer.__dict__


@pytest.mark.parametrize("shape", [(2, 4), (3, 2, 4)])
@pytest.mark.parametrize("trained", [True, False])
def test_in_place_change_of_a_kept_result_is_an_error(shape: tuple[int, ...], trained: bool) -> None:
    """Also for torch.matmul, which gives products of more than two dimensions another version counter (Gemma 3n)."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return (torch.matmul(hidden_states, self.linear.weight).mul_(2.0).sigmoid() * self.scale).sigmoid()

    layer = Layer()
    layer.linear.weight.requires_grad_(trained)
    set_checkpointing([layer], "selective")
    with pytest.raises(ValueError, match=r'Layer modifies the result of a matrix product in place, .*: use "full"'):
        layer(torch.ones(shape, requires_grad=trained)).sum().backward()


@pytest.mark.slow
def test_compiled_layers() -> None:
    model = llama(attn_implementation="sdpa", num_hidden_layers=1)
    wanted = gradients(model)
    set_checkpointing(layers_of(model), "selective")
    layers_of(model)[0].compile(backend="aot_eager")
    for name, result in gradients(model).items():
        if (expected := wanted[name]) is not None:
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
