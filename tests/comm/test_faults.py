"""A rank that dies, stops, sleeps, fails or differs during any operation: every other rank gets an error in time.

Each trial connects anew and breaks one rank at one step of one operation. The others repeat the operation until it
raises: a rank that is killed after its last contribution is noticed only by the next operation.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from typing import Any, NamedTuple

import pytest
import torch

from interlace.attention import AttentionPlan
from interlace.balance import distribute_tokens
from interlace.comm import (
    CommError,
    Transport,
    all_gather_into_tensor,
    all_gather_matmul,
    all_reduce,
    all_to_all_single,
    connect,
    context_parallel_attention,
    matmul_reduce_scatter,
    reduce_scatter_tensor,
)
from interlace.masks import BitfieldMask
from tests.comm.jobs import TIMEOUT, grown, used
from tests.sampling import sample

STEPS = {"shm": ["post", "stage", "take", "taken"], "gloo": ["post", "take", "taken"]}
SHORT = 3.0  # maximum seconds of a wait without a report from the peer
SLACK = 20.0  # additional seconds for a busy machine
LENGTH = 300_000  # elements: more pieces than a rank has slots
WORLD = 3


class Trial(NamedTuple):
    """fault: "kill", "stop", "sleep", "raise" (in the transport), "leave" (without a report), "shape".

    step: the step of its transport at which the victim breaks, at the count-th time since the operation began.
    """

    transport: str
    operation: str
    fault: str
    step: str
    count: int
    victim: int


def gather(group: Transport, length: int) -> None:
    all_gather_into_tensor(torch.empty(WORLD * length), torch.ones(length), group)


def scatter(group: Transport, length: int) -> None:
    reduce_scatter_tensor(torch.empty(length), torch.ones(WORLD * length), group=group)


def reduce(group: Transport, length: int) -> None:
    all_reduce(torch.ones(length), group=group)


def exchange(group: Transport, length: int) -> None:
    all_to_all_single(torch.empty(WORLD * length), torch.ones(WORLD * length), group=group)


def backward(group: Transport, length: int) -> None:
    x = torch.ones(length, requires_grad=True)
    output = torch.empty(WORLD * length)
    breaks, group.before = group.before, lambda rank, step: None
    all_gather_into_tensor(output, x, group)
    group.before = breaks  # in the backward pass, not before
    output.sum().backward()


def barrier(group: Transport, length: int) -> None:
    group.before(group.rank, "barrier")
    group.barrier()


def products(group: Transport, length: int) -> None:
    x, weight = torch.ones(length, 1, requires_grad=True), torch.ones(2, 1)
    _, (y,) = all_gather_matmul(x, [weight], group=group, num_chunks=3, layout="remap")
    y = matmul_reduce_scatter(y, torch.ones(1, 2), group=group, num_chunks=2)
    y.sum().backward()


def attention(group: Transport, length: int) -> None:
    mask, heads = BitfieldMask.causal(1, 16 * WORLD), 2 + length % 2  # the differing rank has one head too many
    blocks = AttentionPlan.build(mask, block=16).row_blocks()
    shards = distribute_tokens(blocks, WORLD, block=16, lengths=mask.length)
    q, k, v = (torch.ones(1, heads, 16, 64, requires_grad=True) for _ in range(3))
    context_parallel_attention(q, k, v, mask, shards, group=group, heads_per_chunk=1).sum().backward()


# Names in an error.
OPERATIONS = {
    "gather": (gather, "all_gather_into_tensor"),
    "scatter": (scatter, "reduce_scatter_tensor"),
    "reduce": (reduce, "all_reduce"),
    "exchange": (exchange, "all_to_all_single"),
    "backward": (backward, "all_gather"),
    "barrier": (barrier, "wait|signal|barrier"),
    "products": (products, "all_gather_matmul|matmul_reduce_scatter"),
    "attention": (attention, "context_parallel_attention"),
}


def run_trial(rank: int, trial: Trial) -> dict[str, Any]:
    """Error of this rank, duration of the operation that raised it, and leftovers of the transport."""
    operation, victim = OPERATIONS[trial.operation][0], rank == trial.victim
    before = used()
    group = connect(transport=trial.transport, timeout=TIMEOUT)
    try:
        for each, _ in OPERATIONS.values():
            each(group, 1000)
        group.barrier()
        told_at_once = trial.fault not in ("stop", "sleep")
        group.timeout = TIMEOUT if told_at_once else SHORT
        if victim:
            group.before = _breaks(trial)
        length = LENGTH + 1 if victim and trial.fault == "shape" else LENGTH
        text, start = "was told nothing", time.monotonic()
        try:
            for _ in range(0 if victim and trial.fault == "leave" else 10):
                start = time.monotonic()
                operation(group, length)
        except CommError as error:
            text = str(error)
        seconds = time.monotonic() - start
    finally:
        group.close()
    del group
    return {"text": text, "seconds": seconds, "grown": grown(before)}


def _breaks(trial: Trial) -> Any:
    counts = itertools.count()

    def at(rank: int, step: str) -> None:
        if step != trial.step or next(counts) != trial.count:
            return
        if trial.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trial.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif trial.fault == "sleep":
            time.sleep(2 * SHORT)
        elif trial.fault == "raise":
            raise ZeroDivisionError("in the middle")

    return at


def check(pool: Any, trial: Trial) -> None:
    stopped = [trial.victim] if trial.fault == "stop" else []
    outcomes = pool.run(WORLD, run_trial, trial, timeout=3 * TIMEOUT, stopped=stopped)
    lines = []
    for rank, outcome in enumerate(outcomes):
        if rank == trial.victim and trial.fault in ("kill", "stop"):
            assert (outcome.kind, outcome.value) == ("died", -signal.SIGKILL) or stopped, outcome
            continue
        assert outcome.kind == "returned", (trial, rank, outcome)
        text = outcome.value["text"]
        assert not outcome.value["grown"], (trial, rank, outcome.value)
        if rank == trial.victim and trial.fault == "leave":
            continue
        limit = SLACK + (SHORT if trial.fault in ("stop", "sleep") else 0)
        assert outcome.value["seconds"] < limit < TIMEOUT, (trial, rank, outcome.value)
        assert re.match(rf"rank {rank}\b", text), (trial, rank, text)
        assert re.search(OPERATIONS[trial.operation][1], text), (trial, rank, text)
        if rank == trial.victim and trial.fault == "raise":
            assert "ZeroDivisionError: in the middle" in text, (trial, rank, text)
            continue
        assert [n for n in range(WORLD) if n != rank and _names(text, n)], (trial, rank, text)
        if rank != trial.victim:
            lines.append(text)
    # Over gloo a rank may first see that an informed rank left: at least one rank reports the cause.
    named = [text for text in lines if _names(text, trial.victim)]
    assert len(named) == len(lines) if trial.transport == "shm" else named, (trial, lines)


def _names(text: str, rank: int) -> bool:
    return re.search(rf"\branks? (\d+, )*{rank}\b", text) is not None


def trials() -> list[Trial]:
    """Every fault at every step of every operation, by each rank in turn, early and late in the operation."""
    result = []
    victims, counts = itertools.cycle(range(WORLD)), itertools.cycle((0, 1, 3))
    for transport, operation in itertools.product(STEPS, OPERATIONS):
        steps = STEPS[transport] if operation != "barrier" else ["barrier"]
        kills = ["kill"] if operation in ("products", "attention") else ["kill"] * 3
        for fault, step in itertools.product((*kills, "stop", "raise"), steps):
            many = step == "stage" or (step == "take" and transport == "shm")  # one for each piece
            if (fault, step) != ("raise", "barrier"):  # an exception of the caller is no fault of the transport
                result.append(Trial(transport, operation, fault, step, next(counts) if many else 0, next(victims)))
        result.append(Trial(transport, operation, "sleep", steps[0], 0, next(victims)))
        result.append(Trial(transport, operation, "leave", "", 0, next(victims)))
        if operation != "barrier":
            result.append(Trial(transport, operation, "shape", "", 0, next(victims)))
    return result


FEW = [
    Trial("shm", "gather", "kill", "stage", 1, 0),
    Trial("shm", "exchange", "kill", "taken", 0, 2),
    Trial("shm", "reduce", "stop", "stage", 0, 2),
    Trial("shm", "exchange", "shape", "", 0, 1),
    Trial("shm", "attention", "kill", "take", 3, 0),
    Trial("gloo", "reduce", "raise", "post", 0, 1),
    Trial("gloo", "scatter", "sleep", "post", 0, 2),
]


@pytest.mark.parametrize(
    "trial",
    [pytest.param(trial, marks=[pytest.mark.slow] * (trial.operation == "exchange")) for trial in FEW],
    ids=lambda trial: "-".join(map(str, trial)),
)
def test_every_rank_is_told_that_one_broke(pool: Any, trial: Trial) -> None:
    check(pool, trial)


@pytest.mark.slow
def test_every_rank_is_told_whatever_breaks(pool: Any) -> None:
    for trial in sample(trials(), 20):
        check(pool, trial)


def test_there_are_two_hundred_trials_and_nothing_is_left_out() -> None:
    every = trials()
    assert len(every) >= 200
    for transport, steps in STEPS.items():
        mine = [trial for trial in every if trial.transport == transport]
        assert {trial.operation for trial in mine} == set(OPERATIONS)
        for operation in set(OPERATIONS) - {"barrier"}:
            killed = {trial.step for trial in mine if (trial.operation, trial.fault) == (operation, "kill")}
            assert killed == set(steps)


def test_a_killed_pool_member_is_replaced(pool: Any) -> None:
    first = pool.run(2, _pid)
    check(pool, Trial("shm", "gather", "kill", "post", 0, 0))
    second = pool.run(2, _pid)
    assert first[0].value != second[0].value and first[1].value == second[1].value


def _pid(rank: int) -> int:
    return os.getpid()
