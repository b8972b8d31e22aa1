"""Selection of a transport: identical on all ranks, with reported reasons. Also the transports that groups keep."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from interlace.comm import CommError, all_gather_into_tensor, all_reduce, connect, disconnect, resolve, run_local
from interlace.comm.process.rendezvous import Rendezvous
from interlace.comm.transports import Capabilities, capabilities, choose, shm
from interlace.comm.transports.choose import _connected
from interlace.comm.transports.queued import QueueTransport
from interlace.comm.transports.shm import ShmTransport
from tests.comm.jobs import TIMEOUT, grown, used


def choice(rank: int, changes: dict[str, Any], arguments: dict[str, Any]) -> tuple[str, list[str]]:
    """The name of the chosen transport or the error, and the log. `changes` emulate a different machine on some
    ranks."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    listener = Listener()
    logging.getLogger(choose.__name__).addHandler(listener)
    logging.getLogger(choose.__name__).setLevel(logging.INFO)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, by_rank in changes.items():
                if rank not in by_rank:
                    continue
                if name == "host":
                    patch.setattr(choose, "_host", partial(str, by_rank[rank]))
                elif name == "environment":
                    patch.setenv("INTERLACE_TRANSPORT", by_rank[rank])
                else:
                    _break(patch, name, by_rank[rank])
            mine = {name: value[rank] if isinstance(value, list) else value for name, value in arguments.items()}
            with connect(timeout=TIMEOUT, **mine) as group:
                all_gather_into_tensor(torch.empty(group.world), torch.ones(1), group)
                return group.name, lines
    except (ValueError, CommError) as error:
        return f"{type(error).__name__}: {error}", lines
    finally:
        logging.getLogger(choose.__name__).removeHandler(listener)


def _break(patch: pytest.MonkeyPatch, name: str, why: str) -> None:
    """Makes a transport unavailable in this process, with a reason."""
    transport = choose._class_of(name)
    result = transport.capabilities()
    broken = type(result)(**{**vars(result), "missing": why})
    patch.setattr(transport, "capabilities", classmethod(lambda cls: broken))


def choices(
    pool: Any, world: int, changes: dict[str, Any] | None = None, **arguments: Any
) -> list[tuple[str, list[str]]]:
    return pool.returned(world, choice, changes or {}, arguments)


def test_ranks_of_one_host_use_shm_and_rank_0_logs_it_once(pool: Any) -> None:
    first, *others = choices(pool, 3)
    assert first == ("shm", ["3 ranks on cpu: transport shm (the first of the preferred)"])
    assert others == [("shm", [])] * 2


def test_what_one_rank_cannot_run_nobody_takes(pool: Any) -> None:
    (name, said), *others = choices(pool, 3, {"shm": {1: "broken here", 2: "broken here"}})
    assert name == "gloo" and [name for name, _ in others] == ["gloo"] * 2
    assert said == ["3 ranks on cpu: transport gloo (not shm: broken here on ranks 1, 2)"]


def test_ranks_of_several_hosts_do_not_share_memory(pool: Any) -> None:
    (name, said), *_ = choices(pool, 2, {"host": {1: "elsewhere"}})
    assert name == "gloo"
    assert said == ["2 ranks on cpu: transport gloo (not shm: the ranks are on 2 hosts or in several containers)"]


def test_transport_argument_overrides_the_environment(pool: Any) -> None:
    everywhere = {"environment": {0: "gloo", 1: "gloo"}}
    assert [name for name, _ in choices(pool, 2, everywhere)] == ["gloo"] * 2
    assert [name for name, _ in choices(pool, 2, everywhere, transport="shm")] == ["shm"] * 2


def test_ranks_that_differ_are_told_who_says_what(pool: Any) -> None:
    def expected(subject: str, requests: str) -> str:
        return f"ValueError: the ranks request different {subject}: {requests}: use the same on all"

    for name, _ in choices(pool, 3, {"environment": {1: "gloo"}}):
        assert name == expected("transports", "auto on ranks 0, 2, gloo on rank 1")
    for name, _ in choices(pool, 2, transport=["shm", "gloo"]):
        assert name == expected("transports", "shm on rank 0, gloo on rank 1")
    for name, _ in choices(pool, 2, device=["cpu", "meta"]):
        assert name == expected("devices", "cpu on rank 0, meta on rank 1")


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"shm": {1: "broken here"}}, {"transport": "shm"}, "transport 'shm' cannot run: broken here on rank 1"),
        ({}, {"transport": "nccl"}, "transport 'nccl' cannot run: for cuda tensors"),
        (
            {},
            {"transport": "smoke"},
            "unknown transport 'smoke' .argument or INTERLACE_TRANSPORT.: use one of auto, cuda_ipc,",
        ),
        ({}, {"device": "meta"}, "no transport for 2 ranks on meta: .*shm: for cpu tensors"),
        ({}, {"timeout": 0.0}, "timeout must be a positive number"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(pool: Any, changes: Any, arguments: Any, message: str) -> None:
    arguments = {"timeout": TIMEOUT, **arguments}
    for text in pool.returned(2, refusal, changes, arguments):
        assert re.match(message, text), text


def refusal(rank: int, changes: dict[str, Any], arguments: dict[str, Any]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name, by_rank in changes.items():
            if rank in by_rank:
                _break(patch, name, by_rank[rank])
        with pytest.raises(ValueError) as error:
            connect(**arguments)
        return str(error.value)


def absent(rank: int) -> str:
    """Rank 1 never connects; the group stays usable."""
    said = ""
    if rank == 0:
        with pytest.raises(CommError) as error:
            connect(timeout=0.5)
        said = str(error.value)
    dist.barrier()
    return said


def test_a_rank_that_does_not_connect_is_named(pool: Any) -> None:
    said, _ = pool.returned(2, absent)
    assert said.startswith("rank 0, choosing a transport: no message from rank 1 within 0.5 s"), said


def dies(rank: int, transport: str, words: int, timeout: float) -> tuple[str, int, dict[str, tuple[int, int]]]:
    """Rank 1 is killed before it sends its `words`-th message. Returns the errors of the others, and the number of
    messages.
    """
    exchange, said = Rendezvous.exchange, 0

    def counted(*arguments: Any) -> Any:
        nonlocal said
        said += 1
        if rank == 1 and said == words:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rendezvous, "exchange", counted)
        before = used()
        with pytest.raises(CommError) as error:
            connect(transport=transport, timeout=timeout)
        return str(error.value), said, grown(before)


@pytest.mark.parametrize(
    ("transport", "words", "step"),
    [
        pytest.param("auto", 1, "choosing a transport", marks=pytest.mark.slow),
        pytest.param("auto", 2, "connecting by shared memory", marks=pytest.mark.slow),
        pytest.param("auto", 4, "connecting by shared memory", marks=pytest.mark.slow),
        ("gloo", 2, "connecting by gloo"),
        pytest.param("gloo", 3, "connecting by gloo", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_while_all_connect_is_missed_once(pool: Any, transport: str, words: int, step: str) -> None:
    """One timeout, not one per remaining transport; and nothing is left of the attempt."""
    outcomes = pool.run(3, dies, transport, words, 4.0)
    for rank in (0, 2):
        assert outcomes[rank].kind == "returned", outcomes[rank]
        text, said, left = outcomes[rank].value
        assert re.match(f"rank {rank}, {step}: no message from rank 1 within 4 s", text), text
        assert said == words and not left, (said, left)  # each word is a wait: no further wait after the failed one


def odd(rank: int) -> str:
    def broken(*arguments: Any) -> None:
        raise AttributeError("no such thing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShmTransport, "capabilities", classmethod(lambda cls: Capabilities("shm", "cpu")))
        if rank == 1:
            patch.setattr(shm.Segment, "__init__", broken)
        with pytest.raises(CommError) as error:
            connect(transport="shm", timeout=TIMEOUT)
    return str(error.value)


def test_whatever_one_rank_raises_while_connecting_all_are_told(pool: Any) -> None:
    for rank, text in enumerate(pool.returned(2, odd)):
        assert text == f"rank {rank}, connecting by shared memory: rank 1: AttributeError: no such thing"


# ---------------------------------------------------------------------- groups


def kept(rank: int) -> None:
    """resolve connects once per group and device, until disconnect or the end of the group."""
    first = resolve(None)
    assert resolve(None) is first and resolve(dist.group.WORLD) is first and first.name == "shm"
    mesh = DeviceMesh("cpu", list(range(3)))
    output = torch.empty(3)
    all_gather_into_tensor(output, torch.full((1,), float(rank)), mesh)
    assert output.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="2 dimensions"):
        resolve(DeviceMesh("cpu", [[0, 1, 2]]))
    with pytest.raises(TypeError, match="got str"):
        resolve("the others")

    # Rank 2 is in no other group, rank 1 in two: only members connect.
    pairs = [dist.new_group([0, 1]), dist.new_group([1])]
    if rank < 2:
        x = torch.full((1,), float(rank + 1))
        all_reduce(x, group=pairs[0])
        assert x.item() == 3 and resolve(pairs[0]) is not first
    else:
        with pytest.raises(ValueError, match="not a member"):
            resolve(pairs[0])
    if rank == 1:
        all_reduce(x, group=pairs[1])
        assert x.item() == 3 and resolve(pairs[1]).name == "local"
        group = weakref.ref(resolve(pairs[1]))
        dist.destroy_process_group(pairs.pop())
        gc.collect()
        assert group() is None  # removed with its process group

    patient = dist.new_group([0, 1, 2], timeout=timedelta(seconds=77))
    assert resolve(patient).timeout == 77 and first.timeout == 120  # same as in the pool's group
    disconnect(patient)

    # A failure is kept until all disconnect.
    with pytest.raises(CommError):
        all_gather_into_tensor(torch.empty(3 * (rank + 1)), torch.empty(rank + 1), None)
    with pytest.raises(CommError, match="failed before"):
        all_reduce(torch.ones(1))
    assert resolve(None) is first
    disconnect()
    x = torch.ones(1)
    all_reduce(x)
    assert x.item() == 3 and resolve(None) is not first
    disconnect()
    assert dist.group.WORLD not in _connected


def test_groups_keep_their_transports(pool: Any) -> None:
    pool.returned(3, kept)


def again(rank: int, rounds: int) -> list[float]:
    """Repeatedly created and destroyed groups of the same ranks."""
    result = []
    for n in range(rounds):
        group = dist.new_group([0, 1])
        x = torch.full((1,), float(n + rank))
        all_reduce(x, group=group)
        result.append(x.item())
        disconnect(group)
        dist.destroy_process_group(group)
    return result


def test_a_group_made_anew_is_connected_anew(pool: Any) -> None:
    assert pool.returned(2, again, 3) == [[1.0, 3.0, 5.0]] * 2


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    disconnect()


def test_one_process_alone_needs_nobody(alone: None) -> None:
    x = torch.ones(3)
    all_reduce(x)
    assert x.tolist() == [1, 1, 1] and resolve(None) is resolve(None) and resolve(None).name == "local"
    with connect(transport="gloo") as group:
        assert (group.name, group.world) == ("local", 1)
        group.barrier()
    with pytest.raises(ValueError, match="use one of"):
        connect(transport="smoke")
    first = resolve(None)
    disconnect()
    assert resolve(None) is not first


def test_inside_virtual_ranks_none_means_this_rank() -> None:
    def rank(group: QueueTransport) -> bool:
        x = torch.full((1,), float(group.rank))
        all_reduce(x)
        return x.item() == 3 and resolve(None) is group

    assert run_local(3, rank) == [True] * 3


def test_every_transport_says_what_it_can_do_here() -> None:
    result = capabilities()
    assert list(result) == ["local", "cuda_ipc", "symm_mem", "nccl", "shm", "gloo"]
    assert all(name == each.name for name, each in result.items())
    assert not result["local"].missing and not result["gloo"].missing and result["shm"].one_host
    if not torch.cuda.is_available():
        assert all(each.missing for each in result.values() if each.device == "cuda")
