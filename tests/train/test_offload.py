"""AdamW with its state in host memory: bitwise equal to AdamW, in bounded buffers, saved and loaded as usual."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.train import offload, rank
from interlace.train.checkpoint import checkpoints as ck
from interlace.train.checkpoint.identity import identity_of
from interlace.train.config.load import ConfigError
from interlace.train.models.tuning import Rates
from interlace.train.offload import OffloadedAdamW, check_device
from interlace.train.optim import Optimizer
from tests.train.build import _config

SHAPES = st.lists(st.sampled_from([(3,), (), (0, 4), (17, 5), (64, 3), (7, 2, 3)]), min_size=1, max_size=8)


def parameters(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def groups(of: list[nn.Parameter], cut: int) -> list[dict[str, Any]]:
    parts = [(of[:cut], 1e-2, 0.1), (of[cut:], 3e-3, 0.0)]
    return [{"params": part, "lr": lr, "weight_decay": decay} for part, lr, decay in parts if part]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SHAPES, st.integers(0, 8), st.sampled_from([1, 64, 300, 1 << 20]), st.data())
def test_a_step_is_that_of_adamw(shapes: list[tuple[int, ...]], cut: int, bucket: int, data: st.DataObject) -> None:
    """Any groups, buckets and dtypes; parameters without a gradient in some steps; changing rates."""
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])) for _ in shapes]
    mine, theirs = parameters(shapes, dtypes), parameters(shapes, dtypes)
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
    ours = OffloadedAdamW(groups(mine, cut), bucket_bytes=bucket, **options)
    adamw = torch.optim.AdamW(groups(theirs, cut), fused=True, **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        for a, b in zip(mine, theirs, strict=True):
            gradient = torch.randn(a.shape, generator=generator).to(a.dtype) if data.draw(st.booleans()) else None
            a.grad, b.grad = gradient, None if gradient is None else gradient.clone()
        given_gradients = [None if p.grad is None else p.grad.clone() for p in mine]
        for one in (*ours.param_groups, *adamw.param_groups):
            one["lr"] = one["lr"] * (0.5 + step)
        ours.step()
        adamw.step()
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b)
            assert given_gradients[place] is None or torch.equal(a.grad, given_gradients[place])
            if adamw.state[b]:
                assert all(torch.equal(ours.state[a][key], value) for key, value in adamw.state[b].items())
            else:
                assert not ours.state[a]


class Stream(TorchDispatchMode):
    """Delays copies that are not waited for as long as possible, in order: like a GPU that is far behind."""

    def __init__(self) -> None:
        super().__init__()
        self.due: list[Callable[[], object]] = []
        self.copying = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and (*args, False)[2] and not self.copying:
            self.due.append(lambda: function(*args))
            return args[0]
        return function(*args, **(kwargs or {}))

    def moment(self, device: torch.device) -> Any:
        told = len(self.due)

        @torch.no_grad()
        def synchronize() -> None:
            self.copying = True
            for i in range(told):
                self.due[i]()
                self.due[i] = int  # done
            self.copying = False

        return SimpleNamespace(synchronize=synchronize)


@pytest.mark.parametrize("bucket", [1, 300, 1 << 20])
def test_a_device_that_is_far_behind_gets_the_same(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data is read before it has arrived, and no buffer is refilled before its data has left."""
    shapes = [(17, 5), (3,), (64, 3), (7, 2), (9, 9), (1,)]
    mine, theirs = (parameters(shapes, [torch.float32] * len(shapes)) for _ in range(2))
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
    ours = OffloadedAdamW(groups(mine, 4), bucket_bytes=bucket, **options)
    adamw = torch.optim.AdamW(groups(theirs, 4), fused=True, **options)
    stream = Stream()
    monkeypatch.setattr(offload, "_moment", stream.moment)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):  # without waiting in between
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        with stream:
            ours.step()
            ours.zero_grad()
        adamw.step()
    assert not all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    stream.moment(torch.device("cpu")).synchronize()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_weights_changed_in_between_are_those_that_are_updated() -> None:
    """Also if the change is not tracked, as with `.data`."""
    mine, theirs = (parameters([(9, 4)], [torch.float32]) for _ in range(2))
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
    ours = OffloadedAdamW(groups(mine, 1), **options)
    adamw = torch.optim.AdamW(groups(theirs, 1), fused=True, **options)
    for number in range(3):
        for p in (*mine, *theirs):
            p.grad = torch.full((9, 4), 0.1 * number)
            p.data.fill_(float(number))
        ours.step()
        adamw.step()
        assert torch.equal(mine[0], theirs[0])


def test_buffers_are_as_large_as_a_bucket_and_used_in_turn() -> None:
    given_parameters = parameters([(16, 16)] * 10 + [(64, 16)], [torch.float32] * 11)
    ours = OffloadedAdamW(groups(given_parameters, 11), betas=(0.9, 0.95), eps=1e-8, bucket_bytes=2048)
    fetched: list[tuple[int, int]] = []
    fetch = ours._fetch

    def watch(group: dict[str, Any], members: list[nn.Parameter], place: int) -> Any:
        staged = fetch(group, members, place)
        fetched.append((len(members), staged.weights[0].untyped_storage().data_ptr()))
        ends = [t.data_ptr() + t.nbytes for t in (*staged.weights, *staged.gradients)]
        assert max(ends) <= fetched[-1][1] + staged.weights[0].untyped_storage().nbytes()
        return staged

    ours._fetch = watch  # type: ignore[method-assign]
    for p in given_parameters:
        p.grad = torch.ones_like(p)
    ours.step()
    assert [count for count, _ in fetched] == [2, 2, 2, 2, 2, 1]
    assert [place for _, place in fetched] == [fetched[0][1], fetched[1][1]] * 3 and fetched[0][1] != fetched[1][1]
    sizes = {buffer.nbytes for buffer in ours._buffers}
    assert sizes == {2 * (64 * 16 * 4 + 64 * 11)}
    pointers = [buffer.data_ptr() for buffer in ours._buffers]
    ours.step()
    assert [buffer.data_ptr() for buffer in ours._buffers] == pointers


def test_a_step_without_any_gradient_is_none() -> None:
    (parameter,) = parameters([(3,)], [torch.float32])
    before = parameter.detach().clone()
    ours = OffloadedAdamW([{"params": [parameter], "lr": 1.0}], betas=(0.9, 0.95), eps=1e-8)
    ours.step()
    assert torch.equal(parameter, before) and not ours.state[parameter]


def test_the_trainers_optimizer_saves_and_goes_on_with_either(tmp_path: Path) -> None:
    """A checkpoint of one is valid for the other, and the run resumes with the same bits."""

    def make(offloaded: bool) -> tuple[dict[str, nn.Parameter], Optimizer]:
        config = _config(f"train.offload_optimizer={str(offloaded).lower()}", "train.warmup_steps=0")
        names = ("language_model.model.norm.weight", "language_model.lm_head.weight", "language_model.frozen")
        made = dict(zip(names, parameters([(6,), (5, 6), (4,)], [torch.float32] * 3), strict=True))
        made[names[2]].requires_grad_(False)
        same = Rates("all", "adamw", config.train.lr, config.train.weight_decay)
        return made, Optimizer(made.items(), config, dict.fromkeys(names, same))

    def step(named: dict[str, nn.Parameter], optimizer: Optimizer, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for p in named.values():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step(number)
        assert all(p.grad is None for p in named.values())

    runs = {offloaded: make(offloaded) for offloaded in (False, True)}
    assert isinstance(runs[True][1].made["adamw"], OffloadedAdamW) and not isinstance(
        runs[False][1].made["adamw"], OffloadedAdamW
    )
    for number in (1, 2):
        for named, optimizer in runs.values():
            step(named, optimizer, number)
    whole: Any = SimpleNamespace(named_parameters=runs[True][0].items)
    identity = identity_of(whole, {})
    for offloaded, (named, optimizer) in runs.items():
        folder = ck.Checkpoints(tmp_path / str(offloaded), keep=1, identity=identity)
        folder.begin(2, named, optimizer.state(), {})
        folder.finish()
        other, goes_on = make(not offloaded)
        folder.load(folder.newest(), other, goes_on.state())
        step(other, goes_on, 3)
        runs[offloaded] = other, goes_on
    for (name, a), b in zip(runs[True][0].items(), runs[False][0].values(), strict=True):
        assert torch.equal(a, b), name
    states = [optimizer.state() for _, optimizer in runs.values()]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_ranks_on_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device("cuda")
    with pytest.raises(ConfigError, match=r"tiny.toml: .*needs a GPU, but the ranks compute on the CPU"):
        check_device("cpu", source="tiny.toml")
    config = _config("train.offload_optimizer=true", "parallel.ranks=1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # "auto" is then the CPU
    with pytest.raises(ConfigError, match=r"here: train.offload_optimizer = true needs a GPU.* omit the key"):
        rank.run(config, source="here")
