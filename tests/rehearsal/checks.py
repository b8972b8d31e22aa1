"""The rehearsal device itself: "name" -> whether it does as a GPU does; in a process where it has started."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import torch
from torch import Tensor, nn

from interlace.attention import bitfield_attention
from interlace.masks import BitfieldMask
from interlace.run.execute.gradients import totals
from tests import rehearsal

HERE = rehearsal.NAME


def checks() -> dict[str, bool]:
    return {check.__name__: check() for check in CHECKS}


def refused(function: Callable[[], object], words: str) -> bool:
    try:
        function()
    except (RuntimeError, TypeError, ValueError) as error:
        return words in str(error)
    return False


def noticed(function: Callable[[], object]) -> list[str]:
    with rehearsal.record() as seen:
        function()
    return [f"{kind} {what}" for kind, what, _ in seen]


def devices_do_not_mix() -> bool:
    x, y = torch.ones(2, 3, device=HERE), torch.ones(2, 3)
    other = torch.ones(2, 3, device=f"{HERE}:1")
    mixed = [
        lambda: x + y, lambda: x @ y.T, lambda: torch.cat([x, y]), lambda: x + other, lambda: y.add_(x),
        lambda: nn.functional.embedding(torch.zeros(2, dtype=torch.long), x), lambda: y.view(-1)[0].add_(x[0, 0]),
        lambda: torch.addmm(x[:, :2], y, y.T), lambda: nn.functional.linear(y, x),
        lambda: bitfield_attention(*[torch.ones(1, 1, 4, 8, device=HERE)] * 3, BitfieldMask.causal(1, 4)),
    ]  # fmt: skip
    alone = torch.equal((x + torch.tensor(1.0)).cpu(), y + 1)  # a number of the host goes along
    return alone and all(refused(each, "device") or refused(each, " is on ") for each in mixed)


def numpy_refuses_it() -> bool:
    return refused(lambda: torch.ones(2, device=HERE).numpy(), "can't convert rehearsal:0")


def reads_are_noticed() -> bool:
    x = torch.arange(6.0, device=HERE)
    reads = [
        x[0].item, x.tolist, x.cpu, x.nonzero, x.unique, lambda: bool(x[1] > 0), lambda: x[x > 2],
        lambda: torch.equal(x, x), lambda: x.masked_select(x > 2), lambda: x.long().repeat_interleave(x.long()),
        lambda: x.__setitem__(x > 2, 0.0), lambda: torch.empty(6).copy_(x),
    ]  # fmt: skip
    return all(any(each.startswith("read") for each in noticed(read)) for read in reads)


def copies_that_wait_are_noticed() -> bool:
    host = torch.ones(4)
    pinned = host.pin_memory()
    there = pinned.to(HERE, non_blocking=True)
    return (
        [each.split()[0] for each in noticed(lambda: host.to(HERE))] == ["upload"]
        and [each.split()[0] for each in noticed(lambda: host.to(HERE, non_blocking=True))] == ["upload"]
        and noticed(lambda: host.pin_memory().to(HERE, non_blocking=True)) == []
        and noticed(lambda: pinned.copy_(there, non_blocking=True)) == []
        and noticed(lambda: there.sum() * 2) == []
    )


def streams_and_events_are_noticed() -> bool:
    def work() -> None:
        stream = torch.Stream(HERE)
        with stream:
            done = stream.record_event()
        torch.accelerator.current_stream().wait_event(done)
        done.synchronize()
        torch.accelerator.synchronize()

    return noticed(work) == ["stream Stream", "event Event", "wait Event.synchronize", "wait synchronize"]


def places_are_lines_of_the_package() -> bool:
    with rehearsal.record() as seen:
        totals([torch.ones((), device=HERE)])
    return seen[-1][2].startswith("run/execute/gradients.py:") and seen[-1][2].endswith(":totals")


def a_backward_is_that_of_the_cpu() -> bool:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Conv1d(3, 4, 2), nn.GELU(), nn.LayerNorm(5), nn.Flatten(), nn.Linear(20, 2))
    there = copy.deepcopy(here).to(HERE)
    x = torch.randn(2, 3, 6)

    def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
        model(x).softmax(-1).log().square().sum().backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    return all(map(torch.allclose, gradients(here, x), gradients(there, x.to(HERE))))


def tensors_keep_their_memory() -> bool:
    x = torch.zeros(2, 3, device=HERE)
    x.view(-1)[4:].fill_(1.0)
    x.T[0, 0] = 2.0
    parameter = nn.Parameter(torch.zeros(2, 3, device=HERE))
    parameter.data = x
    out = torch.empty(0, device=HERE)
    torch.add(x, 1, out=out)
    stored = io.BytesIO()
    torch.save(x, stored)
    stored.seek(0)
    right = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    result = [parameter.detach(), out - 1, torch.load(stored), copy.deepcopy(parameter.detach())]
    return all(each.device == x.device and torch.equal(each.cpu(), right) for each in result)


def its_generator_is_its_own() -> bool:
    torch.manual_seed(3)
    state = torch.get_device_module(HERE).get_rng_state()
    host = torch.get_rng_state()
    first = torch.rand(3, device=HERE)
    torch.get_device_module(HERE).set_rng_state(state)
    return torch.equal(first, torch.rand(3, device=HERE)) and torch.equal(host, torch.get_rng_state())


def memory_is_counted() -> bool:
    before = torch.accelerator.memory_allocated()
    x = torch.empty(1000, device=HERE)
    y = x + 1
    held = torch.accelerator.memory_allocated() - before
    del x, y
    return held == 8000 and torch.accelerator.memory_allocated() == before


CHECKS = (
    devices_do_not_mix, numpy_refuses_it, reads_are_noticed, copies_that_wait_are_noticed,
    streams_and_events_are_noticed, places_are_lines_of_the_package, a_backward_is_that_of_the_cpu,
    tensors_keep_their_memory, its_generator_is_its_own, memory_is_counted,
)  # fmt: skip
