"""Layers timed one by one: the calls, and the results for a given clock."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.costs.fitted import LinkModel
from interlace.costs.links import Link
from interlace.estimate import profiling
from interlace.estimate.profiling import ProfileOptions, profile_costs
from interlace.model import Sample
from interlace.run.tables.sizes import chunk_sizes, size_of
from interlace.schedule import StepTable
from tests.tiny import random_sample, tiny_mllm

LLM = "language_model"
COLLATE = 0.25


def drawn(mllm: Any, count: int, seed: int = 0) -> list[Sample]:
    """Samples with an image, or a clip, or both, or two images."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [(1, 1), (1, 0), (0, 1), (2, 0)]
    with_vision, with_audio = "vision" in mllm.encoders, "audio" in mllm.encoders
    return [
        random_sample(mllm, generator, images=a * with_vision, clips=b * with_audio, text=4 + i % 5)
        for i, (a, b) in ((i, kinds[i % 4]) for i in range(count))
    ]


class Clock:
    """Replacement of `time_layer`: a slice of n layers takes exactly the time defined here.

    Forward: 3 s + n (2 s + 0.5 s per row); backward: 5 s + n times (1 s for inputs, 4 s for weights) per row. To
    collate a chunk takes `COLLATE` seconds. All else takes no time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.rows = 0.0
        self.real = profiling.time_layer
        slices = profiling._Module._parts

        def parts(module: Any, each: Any, run: Any, value: Any, place: int) -> Any:
            self.layers, self.rows = each.stop - each.start, module.sizes[place].rows
            return slices(module, each, run, value, place)

        monkeypatch.setattr(profiling._Module, "_parts", parts)
        monkeypatch.setattr(profiling, "time_layer", self)
        collated, self.now = profiling.collated, 0.0

        def collate(*args: Any, **more: Any) -> Any:
            self.now += COLLATE
            return collated(*args, **more)

        monkeypatch.setattr(profiling, "collated", collate)
        monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def __call__(self, run: Any, hidden: Any, inputs: Any, weights: Any, *args: Any, **more: Any) -> Any:
        self.calls["forward"] += 1
        self.calls["backward"] += bool(inputs or weights)
        _, backward, output = self.real(run, hidden, inputs, weights, *args, **more)
        n, rows = self.layers, self.rows
        if inputs or weights:
            backward = 5.0 + n * rows * (bool(inputs) * 1.0 + bool(weights) * 4.0)
        return 3.0 + n * (2.0 + 0.5 * rows), backward, output


def test_a_layer_and_what_a_stage_spends_once_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    mllm = tiny_mllm(layers=5)
    costs = profile_costs(mllm, drawn(mllm, 12), budget=0.0)
    for name in mllm.modules_order():
        assert costs.modules[name].layers == ("first", "like 1", "like 1", "like 1", "last")
        size = size_of(mllm, name, drawn(mllm, 7, seed=5))
        result = costs.of(name, size)
        assert result.times.forward == pytest.approx([2 + 0.5 * size.rows] * 5)
        assert result.times.weight_grad[1:] == pytest.approx([4 * size.rows] * 4)
        assert result.times.input_grad[1:] == pytest.approx([size.rows] * 4)
        assert costs.modules[name].collate.seconds(size) == pytest.approx(COLLATE)
        assert costs.beside(name, size) == pytest.approx((3.0 + COLLATE, 5.0))
    assert costs.of("vision", size).times.weight_only[0] == pytest.approx(4 * size.rows)
    assert costs.of(LLM, size).times.input_grad[0] == pytest.approx(size.rows)  # features are trained


@pytest.mark.parametrize("layers", [1, 2])
def test_modules_of_few_layers(monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    Clock(monkeypatch)
    mllm = tiny_mllm(layers=layers, encoders=())
    costs = profile_costs(mllm, drawn(mllm, 8), budget=0.0)
    size = size_of(mllm, LLM, drawn(mllm, 5, seed=3))
    result, (once, _) = costs.of(LLM, size), costs.beside(LLM, size)
    # One layer does not show the overhead of a stage: it counts as part of the layer's time.
    assert result.times.forward.sum() + once - COLLATE == pytest.approx(3.0 + layers * (2 + 0.5 * size.rows))
    assert (once - COLLATE == pytest.approx(3.0)) == (layers > 1)


@pytest.mark.slow
def test_it_keeps_within_its_budget_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 layers of a module at most 4 slices at 5 sizes, twice: once to warm up. More layers need no more calls."""
    clock = Clock(monkeypatch)
    mllm = tiny_mllm(layers=7)
    profile_costs(mllm, drawn(mllm, 12), budget=0.0)
    most = 2 * 3 * 4 * 5  # rounds, modules, slices, sizes
    assert clock.calls["forward"] <= 2 * most
    monkeypatch.setattr(profiling, "ROUNDS", 2)
    before = clock.calls["forward"]
    profile_costs(mllm, drawn(mllm, 12), budget=1e9)
    assert clock.calls["forward"] - before == before // 2 * 3


@pytest.mark.slow
def test_only_what_is_trained_goes_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    mllm = tiny_mllm(layers=3)
    for name in ("vision", "vision.projector", "audio", "audio.projector"):
        mllm.freeze(name)
    mllm.freeze(LLM)
    costs = profile_costs(mllm, drawn(mllm, 6), budget=0.0)
    assert clock.calls["forward"] and not clock.calls["backward"]
    assert not any(costs.modules[name].trainable[0] for name in mllm.modules_order())
    mllm.unfreeze("vision.projector")
    costs = profile_costs(mllm, drawn(mllm, 6), budget=0.0)
    size = size_of(mllm, LLM, drawn(mllm, 3, seed=2))
    result = costs.of(LLM, size)
    assert result.times.input_grad == pytest.approx([size.rows] * 3) and not result.times.weight_grad.any()
    vision = costs.of("vision", size)
    assert vision.trainable.tolist() == [False, False, True]


def test_profiling_keeps_weights_and_rng_state_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    mllm = tiny_mllm(layers=2)
    before = {name: p.detach().clone() for name, p in mllm.named_parameters()}
    state = torch.get_rng_state()
    text = [plain()]
    costs = profile_costs(mllm, text, budget=0.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in mllm.named_parameters())
    assert not costs.of("vision", size_of(mllm, "vision", drawn(mllm, 4))).times.forward.any()
    size = size_of(mllm, LLM, text)
    assert costs.of(LLM, size).times.forward.sum() == pytest.approx(2 * (2 + 0.5 * size.rows))
    with pytest.raises(ValueError, match="no samples to profile: "):
        profile_costs(mllm, [])


def plain() -> Sample:
    ids = torch.arange(2, 12)
    return Sample.from_unshifted(ids, ids.clone())


def test_meta_model_is_timed_and_its_traffic_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    with torch.device("meta"):
        mllm = tiny_mllm(layers=5, heads=2, kv_heads=2, encoders=())
    samples = drawn(mllm, 6)
    costs = profile_costs(mllm, samples, ProfileOptions(tps={LLM: (2,)}), budget=0.0)
    assert all(p.is_meta for p in mllm.parameters())
    size = size_of(mllm, LLM, samples)
    assert costs.of(LLM, size, tp=2).times.forward.sum() > 0.0
    fits = costs.modules[LLM]
    # Rows are sharded: attention and the block after it each gather them and scatter their sums. Each time the other
    # rank is sent half of the rows, 16 numbers of 4 bytes. At the end of the stage, this rank's half is sent again. The
    # embedding's sum is both a scatter and a gather.
    half, kinds = 16 * 4 / 2, fits.kinds[2]
    assert kinds["like 1"].traffic.forward_bytes == pytest.approx(4 * half, rel=0.05)
    assert kinds["like 1"].traffic.backward_bytes >= 4 * half * 0.95
    assert kinds["first"].traffic.forward_bytes == pytest.approx(6 * half, rel=0.05)
    assert fits.traffic[2].forward_bytes == pytest.approx(half, rel=0.05)
    assert fits.key_bytes == 2 * 16 * 4  # float32
    traffic = kinds["like 1"].traffic
    link = Link(LinkModel(1.0, 0.0))
    slow = costs.of(LLM, size, tp=2, link=link).times.forward[1] - costs.of(LLM, size, tp=2).times.forward[1]
    assert slow == pytest.approx(traffic.forward_messages)


def test_sizes_of_chunks_are_what_layers_compute() -> None:
    mllm = tiny_mllm()
    samples = drawn(mllm, 9, seed=4)
    table = StepTable.aligned([], [frozenset({LLM})] * len(samples))
    for size, sample in zip(chunk_sizes(mllm, table, samples), samples, strict=True):
        length = len(sample.input_ids)
        assert (size.rows, size.pairs) == (length, length**2)  # one block of less than 128
        assert size.targets == int((sample.labels != -100).sum())
    together = size_of(mllm, LLM, samples)
    assert together.rows == sum(len(sample.input_ids) for sample in samples)
    images = [item for sample in samples for item in sample.media.get("vision", ())]
    patches = sum((item.shape[1] // 4) * (item.shape[2] // 4) for item in images)
    assert size_of(mllm, "vision", samples).rows == patches
    assert size_of(mllm, "vision", [plain()]).rows == 0
