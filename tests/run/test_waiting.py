"""Waits for a GPU: none in a stage's forward or backward, one in a step.

No GPU is needed. Inside stages all tensors count as GPU tensors. Operations that read a result, or that need a
data-dependent shape, are refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from interlace.layout import Layout, ParallelSpec
from interlace.model import MultimodalModel, StageModule
from interlace.model.inputs.places import KEY, media_in, targets_in
from interlace.run import parallelize
from interlace.run.errors import PipelineError
from interlace.run.execute.device import ON_THE_HOST
from interlace.run.tables.batch import collated
from tests.tiny import PLACEHOLDERS, VOCAB, random_microbatches, tiny_mllm

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2", "item")


class NoWaiting(TorchDispatchMode):
    """host: storages in host memory."""

    def __init__(self, host: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.host = host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        bools = [
            x for x in (args[1] if name in ("index", "index_put", "index_put_") else ())
            if x is not None and x.dtype is torch.bool
        ]  # fmt: skip
        if (name in WAITS and args[0].untyped_storage().data_ptr() not in self.host) or bools:
            raise AssertionError(f"{func} waits for a GPU")
        return func(*args, **(kwargs or {}))


class Watched:
    """Refuses operations that wait, while `on`, inside of stages and of their backwards; records which stages ran."""

    def __init__(self) -> None:
        self.on, self.ran = True, list[str]()

    def within(self, host: tuple[int, ...] = ()) -> AbstractContextManager[Any]:
        return NoWaiting(host) if self.on else nullcontext()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watch, forward, backward = Watched(), StageModule.forward, torch.autograd.backward

    def run(self: StageModule, *args: Any, **kwargs: Any) -> Any:
        with watch.within(tuple(args[0][key].untyped_storage().data_ptr() for key in ON_THE_HOST & args[0].keys())):
            made = forward(self, *args, **kwargs)
        watch.ran.append(self.name)
        return made

    def back(*args: Any, **kwargs: Any) -> None:
        with watch.within():
            backward(*args, **kwargs)
        watch.ran.append("backward")

    monkeypatch.setattr(StageModule, "forward", run)
    monkeypatch.setattr(torch.autograd, "backward", back)
    return watch


def gemma() -> MultimodalModel:
    """Layers with a window of 4 tokens, and logits that are capped after the head."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=4, attn_implementation="interlace", pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=5.0,
    )  # fmt: skip
    encoders = tiny_mllm().encoders
    return MultimodalModel(
        {name: encoders[name] for name in encoders}, Gemma3ForCausalLM(config), placeholders=PLACEHOLDERS
    )


@pytest.mark.parametrize("make", [tiny_mllm, gemma])
def test_no_microbatch_waits_for_a_gpu(make: Any, watched: Watched) -> None:
    torch.manual_seed(0)
    mllm = make()
    specs = {name: ParallelSpec() for name in mllm.modules_order()}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs, ranks=1), transport="local")
    if make is gemma:  # the first forward finds the windows of its layers; later plans include them
        watched.on = False
        parallel.evaluate(random_microbatches(mllm, "all", count=1))
        assert {limits.back for limits in mllm.language_settings.limits} == {4}
        watched.on = True
        watched.ran.clear()
    parallel.step(random_microbatches(mllm, "all", count=3))
    assert watched.ran.count("language_model") == 3 and watched.ran.count("backward") == 9


def test_what_waits_is_noticed(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.run.tables.batch.KEY", "elsewhere")  # as if the host had no copy
    mllm = tiny_mllm()
    specs = {name: ParallelSpec() for name in mllm.modules_order()}
    parallel = parallelize(mllm, Layout.from_specs(mllm, specs, ranks=1), transport="local")
    with pytest.raises(PipelineError, match=r"nonzero\.default waits for a GPU"):
        parallel.step(random_microbatches(mllm, "all", count=2))


def test_places_of_other_ids_and_labels_are_not_believed() -> None:
    mllm = tiny_mllm()
    [samples] = random_microbatches(mllm, "all", count=1)
    inputs = collated(mllm, "language_model", samples, torch.device("cpu"), decode=True)
    token = PLACEHOLDERS["vision"]
    result = media_in(inputs, "vision", token)
    assert result is inputs[KEY].media["vision"]
    targets = targets_in(inputs)
    assert targets is not None and torch.equal(inputs["labels"][0][targets], inputs["labels"][inputs["labels"] != -100])
    other = torch.full_like(inputs["input_ids"], token)
    assert len(media_in({**inputs, "input_ids": other}, "vision", token)) == other.numel()
    assert targets_in({**inputs, "labels": other}) is None
