"""Pipeline edges over a transport: selection of the transport, sends and receives in any order, lost peers.

Tests use shared memory: `cuda_ipc` has the same driver (see test_cuda_ipc for its streams).
"""

from __future__ import annotations

import os
import re
import signal
import time
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from interlace.comm.channels import process_group as channel_group
from interlace.comm.channels.base import Tag
from interlace.comm.channels.edges import TransportEdge
from interlace.comm.channels.process_group import DTYPES, GroupChannel
from interlace.comm.process.errors import CommError
from interlace.comm.transports import choose
from interlace.comm.transports.choose import PREFERENCE, edge_transports
from interlace.comm.transports.cuda_ipc import SLOTS
from interlace.comm.transports.shm import SLOT_BYTES
from tests.distributed.workers import shorten

BOTH = [(0, 1), (1, 0)]
RING = SLOTS * SLOT_BYTES // 4  # float32 numbers that fit into all slots of a sender


def tag(number: int, grad: bool = False) -> Tag:
    return Tag("a", 0, number, number, grad)


def channel(named: str = "shm", timeout: float = 20.0) -> GroupChannel:
    """A channel with an edge each way between two ranks. named: value of the environment variable."""
    with mock.patch.dict(os.environ, {"INTERLACE_TRANSPORT": named}):
        made = GroupChannel(["a"], timeout)
        made.add_edges(BOTH)
    return made


# ---------------------------------------------------------------------- successful transfers


def flood(rank: int) -> int:
    """Both ranks send more than the slots hold before either receives. Messages differ in shape and dtype."""
    here, peer = channel(), 1 - rank
    shapes: list[tuple[int, ...]] = [(3 * RING + 5,), (), (0, 3), (2, RING // 2), (1,), (7, 1, 5)]
    messages = [(shape, dtype) for shape in shapes for dtype in DTYPES]
    for _ in range(2):
        for number, (shape, dtype) in enumerate(messages):
            here.send((torch.ones(shape) * (number + 50 * rank)).to(dtype), peer, tag(number))
        for number, (shape, dtype) in enumerate(messages):
            got = here.receive(peer, tag(number))
            assert (got.shape, got.dtype) == (shape, dtype)
            assert torch.equal(got, (torch.ones(shape) * (number + 50 * peer)).to(dtype))
        here.finish()
    assert here.paths == {"pipeline edge": {"shm"}}
    here.close()
    return len(messages)


def test_sends_return_at_once_when_the_slots_are_full(pool: Any) -> None:
    assert pool.returned(2, flood) == [42, 42]


def let_go(rank: int) -> list[bool]:
    """Rank 0 sends two messages. Returns whether it still holds them before and after rank 1 has received them."""
    here = channel()
    if rank == 1:
        dist.barrier()
        for number in range(2):
            here.receive(0, tag(number))
        here.receive(0, tag(2))
        here.finish()
        return []
    arrays = [np.ones(3, np.float32) for _ in range(2)]
    alive = [weakref.ref(array) for array in arrays]
    for number in range(2):
        here.send(torch.from_numpy(arrays.pop(0)), 1, tag(number))
    before = [one() is not None for one in alive]
    dist.barrier()
    until = time.monotonic() + 60
    while not all(sent.is_taken() for sent in here._sends) and time.monotonic() < until:
        time.sleep(1e-3)
    here.send(torch.ones(()), 1, tag(2))
    after = [one() is not None for one in alive]
    here.finish()
    return before + after


def test_what_was_taken_is_let_go_at_the_next_send(pool: Any) -> None:
    assert pool.returned(2, let_go)[0] == [True, True, False, False]


# ---------------------------------------------------------------------- lost peers


def lose(rank: int, victim: str, how: str) -> str:
    """Rank 0 sends to rank 1. The victim is lost between the header of a message and its payload."""
    here = channel(timeout=60.0)
    dist.barrier()
    shorten(here, 2.0)

    def fail(*_: Any) -> Any:
        if how == "leaves":
            here.leave("it has no more data")
            while True:  # until it is killed
                time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)

    if (victim == "sender") == (rank == 0):
        edge = here._edges[0, 1]
        edge.send = edge.receive = fail  # type: ignore[method-assign]
    try:
        if rank == 0:
            here.send(torch.ones(2 * RING), 1, tag(0))
            here.finish()
        else:
            here.receive(0, tag(0))
    except CommError as error:
        return str(error)
    return "nobody was lost"


WHY = {
    "dies": r"(its process, \d+, ended|it died or closed the connection: .*)",
    "hangs": "no answer within 2 s: it hangs, or is slower than the timeout",
    "leaves": "it aborted: it has no more data",
}


@pytest.mark.parametrize("victim", ["sender", "receiver"])
@pytest.mark.parametrize("how", WHY)
def test_a_peer_lost_within_a_message_is_named(pool: Any, victim: str, how: str) -> None:
    lost = 0 if victim == "sender" else 1
    kind, output, seconds = pool.run(2, lose, victim, how, stopped=[lost])[1 - lost]
    what = "RECV" if victim == "sender" else "SEND"
    assert kind == "returned" and seconds < 50, (kind, output, seconds)
    assert re.fullmatch(rf"rank {1 - lost}, {what} a\[0\] chunk 0: lost rank {lost} \({WHY[how]}\)", output), output


# ---------------------------------------------------------------------- selection


def introductions(cards: Sequence[str], wanted: str = "auto", lacks: str = "", hosts: int = 1) -> list[dict[str, Any]]:
    """Introductions of ranks on GPUs, where everything works except a feature of the last rank."""
    cuda = ("cuda_ipc", "symm_mem", "nccl")
    can = {name: ["cuda" if name in cuda else "cpu", name not in ("nccl", "gloo"), ""] for name in PREFERENCE}
    said = [
        {"wanted": wanted, "device": "cuda", "host": str(rank % hosts), "card": card,
         "can": {name: list(each) for name, each in can.items()}}
        for rank, card in enumerate(cards)
    ]  # fmt: skip
    for name in lacks.split():
        said[-1]["can"][name][2] = f"no {name} here"
    return said


@pytest.mark.parametrize(
    ("wanted", "cards", "chosen"),
    [
        ("auto", "xy", ""),
        ("auto", "xx", "auto"),
        ("nccl", "xy", ""),
        ("cuda_ipc", "xy", "cuda_ipc"),
        ("symm_mem", "xx", "symm_mem"),
    ],
)
def test_nccl_carries_what_it_can_unless_another_is_named(wanted: str, cards: str, chosen: str) -> None:
    assert edge_transports(introductions(cards, wanted), BOTH, "nccl") == dict.fromkeys(BOTH, chosen)


def test_edges_between_hosts_fall_back_to_nccl() -> None:
    edges = [(0, 1), (0, 2)]
    assert edge_transports(introductions("yxz", "cuda_ipc", hosts=2), edges, "nccl") == {(0, 1): "", (0, 2): "cuda_ipc"}
    with pytest.raises(ValueError, match=r"transport 'shm' cannot carry .*: for cpu tensors"):
        edge_transports(introductions("yxz", "shm", hosts=2), edges, "nccl")


def test_only_ranks_on_one_gpu_leave_nccl_by_themselves() -> None:
    edges = [(0, 1), (1, 0), (1, 2)]
    assert edge_transports(introductions("xxy"), edges, "nccl") == {(0, 1): "auto", (1, 0): "auto", (1, 2): ""}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            introductions("yxx", "nccl"),
            "transport 'nccl' cannot carry .*1 to rank 2: ranks 1, 2 share a GPU, which NCCL",
        ),
        (
            introductions("yxz", "cuda_ipc", "cuda_ipc"),
            "transport 'cuda_ipc' .*1 to rank 2: no cuda_ipc here on rank 2",
        ),
        (introductions("yxz", "gloo"), "transport 'gloo' cannot carry the pipeline edge .*: for cpu tensors"),
        (
            introductions("yxx", "auto", "cuda_ipc symm_mem"),
            "no transport can carry the .*2: cuda_ipc: no cuda_ipc here",
        ),
        (
            introductions("yxx", "smoke"),
            "unknown transport 'smoke' .argument or INTERLACE_TRANSPORT.: use one of auto, ",
        ),
    ],
)
def test_an_edge_that_cannot_be_carried_is_refused_by_name(said: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edge_transports(said, [(1, 2)], "nccl")


def on_one_card(rank: int) -> list[str]:
    """Edges and sums of two ranks that report the same GPU."""
    with (
        mock.patch.object(choose, "_card", lambda device: "a card"),
        mock.patch.multiple(channel_group, EDGES={"cpu": "gloo"}, SUMS={"cpu": "gloo"}),
    ):
        here, said = channel("auto"), []
        here.add_groups([])
        for groups in ([[0, 1]], [[0], [1]]):
            try:
                here.add_groups(groups)
                said.append("nothing")
            except ValueError as error:
                said.append(str(error))
    edge = here._edges[0, 1]
    assert isinstance(edge, TransportEdge)
    numbers = here.start_all_gather(torch.tensor([1.0 + rank], dtype=torch.float64), "norms").wait()
    return [edge.transport.name, *said, str(numbers.tolist())]


def test_ranks_on_one_gpu_send_but_do_not_sum(pool: Any) -> None:
    refused = (
        "ranks 0, 1 share a GPU, which NCCL does not support: use one GPU per rank, or a layout without "
        "replicas, shards or weights that several stages share"
    )
    assert pool.returned(2, on_one_card) == [["shm", refused, "nothing", "[[1.0], [2.0]]"]] * 2


def differ(rank: int) -> str:
    with pytest.raises(ValueError) as error:
        channel(["shm", "auto"][rank])
    return str(error.value)


def test_ranks_that_name_different_transports_are_told(pool: Any) -> None:
    said = pool.returned(2, differ)
    assert said == ["the ranks request different transports: shm on rank 0, auto on rank 1: use the same on all"] * 2
