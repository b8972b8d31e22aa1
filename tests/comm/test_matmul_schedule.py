"""Overlap as a property of the schedule: order of issued operations, on traces and with transfers held back on purpose.

Two kinds of proof. Under random delays the recorded order must hold, and results must be exact. And a transfer that is
held back until a product has begun must not block that product: a schedule without overlap would deadlock.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from interlace.comm import all_gather_matmul, matmul_reduce_scatter, run_local, traced
from interlace.comm.overlap import matmul
from interlace.comm.overlap import tiles as overlap
from tests.comm.products import column, row

HELD = 30.0  # seconds until a batch held back in vain is an error


def run(operation, case, chunks, layout, before=None):
    """[(forward trace, backward trace, results)] of all ranks."""

    def rank(group):
        r = group.rank
        with traced(group) as forward:
            if operation == "gather":
                x = case.x[r].detach().requires_grad_()
                weights = [w.detach().requires_grad_() for w in case.weights[r]]
                gathered, products = all_gather_matmul(x, weights, num_chunks=chunks, layout=layout)
                outputs, leaves = [gathered, *products], [x, *weights]
                grads = [case.d_gathered[r], *case.d_products[r]]
            else:
                leaves = [case.x[r].detach().requires_grad_(), case.weights[r].detach().requires_grad_()]
                outputs = [matmul_reduce_scatter(*leaves, num_chunks=chunks, layout=layout)]
                grads = [case.rows(case.d_y, r)]
        with traced(group) as backward:
            result = torch.autograd.grad(outputs, leaves, grads)
        return forward, backward, [t.detach() for t in (*outputs, *result)]

    return run_local(case.world, rank, before=before, timeout=3 * HELD)


def expected(operation, case):
    """Expected results of `run`, exact, for a case of small integers."""
    if operation == "gather":
        gathered, products, d_x, d_weights = case.oracle()
        return [[gathered, *products[r], d_x[r], *d_weights[r]] for r in range(case.world)]
    y, d_x, d_weights = case.oracle()
    return [[case.rows(y, r), d_x[r], d_weights[r]] for r in range(case.world)]


def make(operation, world, seed=0):
    if operation == "gather":
        return column(world, 17, 6, [5, 3], leading=(2,), dtype=torch.float64, whole=True, seed=seed)
    return row(world, 17, 6, 5, leading=(2,), dtype=torch.float64, whole=True, seed=seed)


def is_exact(operation, case, results):
    return all(
        torch.equal(have, want)
        for (_, _, got), wanted in zip(results, expected(operation, case))
        for have, want in zip(got, wanted, strict=True)
    )


def one(trace, kind, ending):
    result = [event for event in trace.of(kind) if event.label.endswith(ending)]
    assert len(result) == 1, (kind, ending, [span.label for span in trace.spans])
    return result[0]


def chunks_of(trace, kind, chunks):
    return [one(trace, kind, f", chunk {i} of {chunks}") for i in range(chunks)]


def check_gather(trace, chunks):
    issues, copies, products = (chunks_of(trace, kind, chunks) for kind in ("issue", "copy", "compute"))
    own = one(trace, "compute", "own rows")
    assert max(issues[0].start, issues[1].start) <= own.start <= own.finish <= products[0].start
    for i in range(chunks):
        assert copies[i].finish <= products[i].start
        if i + 1 < chunks:
            assert issues[i + 1].start <= products[i].start, f"gather {i + 1} was issued after product {i} began"


def check_scatter(trace, chunks, last):
    issues, products = (chunks_of(trace, kind, chunks) for kind in ("issue", "compute"))
    for i in range(chunks):
        following = products[i + 1] if i + 1 < chunks else one(trace, "compute", last)
        assert products[i].finish <= issues[i].start <= following.start, f"transfer {i} was not under way in time"


def check_buffers(trace, count):
    """Every buffer is written, then read, then written again, with nothing in between. Returns the number of reuses."""
    by_buffer: dict[str, list] = {}
    for kind in ("write", "read"):
        for event in trace.of(kind):
            label, chunk = event.label.rsplit(", chunk ", 1)
            by_buffer.setdefault(label, []).append((int(chunk), kind == "read", event))
    for uses in by_buffer.values():
        uses.sort(key=lambda use: use[:2])
        chunks = [chunk for chunk, _, _ in uses]
        assert chunks[::2] == chunks[1::2] and [read for _, read, _ in uses] == [False, True] * (len(uses) // 2)
        for (_, _, earlier), (_, _, later) in pairwise(uses):
            assert earlier.finish <= later.start, f"{later} before {earlier} was over"
    assert len(by_buffer) <= count
    return sum(len(uses) // 2 - 1 for uses in by_buffer.values())


def check_schedule(operation, result, chunks, layout):
    """Raises if the order of one rank's events does not overlap."""
    forward, backward, _ = result
    gather, scatter = (forward, backward) if operation == "gather" else (backward, forward)
    check_gather(gather, chunks)
    check_scatter(scatter, chunks, "own rows" if scatter is forward else "weight gradient")
    assert check_buffers(scatter, 2) == max(0, chunks - 2)
    assert check_buffers(gather, 3) == (max(0, chunks - 3) if layout == "remap" else 0)


@pytest.mark.parametrize(
    ("operation", "layout"),
    [
        ("gather", "direct"),
        ("scatter", "remap"),
        pytest.param("gather", "remap", marks=pytest.mark.slow),
        pytest.param("scatter", "direct", marks=pytest.mark.slow),
    ],
)
def test_order_and_results_under_random_delays(operation, layout, monkeypatch):
    delays = random.Random(0)

    def before(rank, what):
        if delays.random() < 0.3:
            time.sleep(delays.random() * 2e-3)

    multiply = overlap.multiply

    def slow(*args):
        if delays.random() < 0.2:
            time.sleep(delays.random() * 2e-3)
        multiply(*args)

    monkeypatch.setattr(overlap, "multiply", slow)
    for seed in range(50):
        delays.seed(seed)
        world, chunks = delays.choice([2, 3, 4]), delays.randint(2, 6)
        case = make(operation, world, seed)
        results = run(operation, case, chunks, layout, before)
        assert is_exact(operation, case, results), f"seed {seed}"
        for result in results:
            check_schedule(operation, result, chunks, layout)


class Started:
    """Started products of each rank, and transfers that wait for them."""

    def __init__(self, monkeypatch, needed):
        self.needed = needed  # ending of the label of the product that batch n must not precede
        self.events: dict[tuple[int, str], threading.Event] = {}
        self.lock = threading.Lock()
        self.batches: dict[int, int] = {}
        for module in (overlap, matmul):
            monkeypatch.setattr(module, "computing", self.computing)

    def event(self, rank, ending):
        with self.lock:
            return self.events.setdefault((rank, ending), threading.Event())

    @contextmanager
    def computing(self, transport, label):
        # "backward of all_gather_matmul, chunk 0 of 2" -> "backward, chunk 0 of 2"
        step = label.split(", ")[-1] if not label.endswith("remap") else label
        self.event(transport.rank, ("backward, " if label.startswith("backward") else "") + step).set()
        yield

    def before(self, rank, what):
        if what == "post":
            batch = self.batches[rank] = self.batches.get(rank, -1) + 1
            assert self.event(rank, self.needed[batch]).wait(HELD), f"batch {batch} kept {self.needed[batch]} waiting"


def held_back(operation, chunks):
    """Products that must have begun before each batch of forward and backward is released."""
    gather = ["own rows", *(f"chunk {i} of {chunks}" for i in range(chunks - 1))]
    scatter = [f"chunk {i} of {chunks}" for i in range(1, chunks)]
    if operation == "gather":
        return [*gather, *(f"backward, {step}" for step in [*scatter, "weight gradient"])]
    return [*scatter, "own rows", *(f"backward, {step}" for step in gather)]


@pytest.mark.parametrize("layout", ["direct", "remap"])
@pytest.mark.parametrize("operation", ["gather", "scatter"])
@pytest.mark.parametrize("chunks", [2, 5])
def test_no_product_waits_for_the_next_transfer(operation, layout, chunks, monkeypatch):
    """Batch n moves only after the product that hides it has begun, on every rank: all of it is hidden."""
    case = make(operation, 3)
    started = Started(monkeypatch, held_back(operation, chunks))
    results = run(operation, case, chunks, layout, started.before)
    assert started.batches == {rank: 2 * chunks - 1 for rank in range(3)}
    assert is_exact(operation, case, results)


def test_last_remap_of_backward_overlaps_the_weight_gradient(monkeypatch):
    chunks, world = 4, 2
    began = {rank: threading.Event() for rank in range(world)}
    waited: list[bool] = []
    place = overlap.SideStream.run
    jobs: dict[overlap.SideStream, int] = {}
    lanes = {}
    of, weight_gradient = overlap.SideStream.of, matmul.weight_gradient

    def remember(transport):
        lanes[of(transport)] = transport.rank
        return of(transport)

    def held(lane, function):
        jobs[lane] = jobs.get(lane, 0) + 1
        last = jobs[lane] == 2 * chunks  # rows and products of every chunk are placed

        def run_held():
            if last:
                waited.append(began[lanes[lane]].wait(HELD))
            function()

        return place(lane, run_held)

    ranks = threading.local()

    def computes(grad, rows):
        began[ranks.rank].set()
        return weight_gradient(grad, rows)

    monkeypatch.setattr(overlap.SideStream, "of", staticmethod(remember))
    monkeypatch.setattr(overlap.SideStream, "run", held)
    monkeypatch.setattr(matmul, "weight_gradient", computes)
    case = make("scatter", world)

    def rank(group):
        ranks.rank = group.rank
        x, weight = case.x[group.rank].detach().requires_grad_(), case.weights[group.rank].detach().requires_grad_()
        y = matmul_reduce_scatter(x, weight, num_chunks=chunks, layout="remap")
        return torch.autograd.grad(y, [x, weight], case.rows(case.d_y, group.rank))

    results = run_local(world, rank, timeout=3 * HELD)
    assert waited == [True] * world
    _, d_x, d_weights = case.oracle()
    for r, result in enumerate(results):
        assert torch.equal(result[0], d_x[r]) and torch.equal(result[1], d_weights[r])


# ---------------------------------------------------------------------- checks of these tests


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_a_buffer_rewritten_too_early_is_noticed(operation, monkeypatch):
    """The same run with slow consumers: correct with the buffer order kept, wrong results and a wrong trace
    without it."""
    place, pause = overlap.SideStream.run, 0.02

    def slowly(lane, function):
        return place(lane, lambda: (time.sleep(pause), function()))

    monkeypatch.setattr(overlap.SideStream, "run", slowly)

    def before(rank, what):
        if what == "take" and operation == "scatter":
            time.sleep(pause)

    case = make(operation, 2)
    results = run(operation, case, 6, "remap", before)
    assert is_exact(operation, case, results)
    for result in results:
        check_schedule(operation, result, 6, "remap")

    class Hasty(overlap.BufferRing):
        """Waits for the readers of a buffer only at the end."""

        def take(self, i):
            self.late = [*getattr(self, "late", []), *self._in_use.values()]
            self._in_use.clear()
            return super().take(i)

        def finish(self):
            super().finish()
            for _, consumed in self.late:
                consumed()

    monkeypatch.setattr(overlap, "BufferRing", Hasty)
    # The write to a buffer has to come before the slow consumer: on a busy machine it may also be slow.
    for pause in (0.02, 0.1, 0.5, 2.0):  # noqa: B007 (read by `slowly` and `before`)
        results = run(operation, case, 6, "remap", before)
        if not is_exact(operation, case, results):
            break
    assert not is_exact(operation, case, results)
    with pytest.raises(AssertionError):
        check_schedule(operation, results[0], 6, "remap")


def test_a_schedule_without_overlap_is_noticed(monkeypatch):
    """With a transport that completes every batch before it returns, held-back transfers block everything."""
    started = Started(monkeypatch, held_back("scatter", 3))

    def rank(group):
        queued = group.copy_batch

        def copy_batch(*args):
            ticket = queued(*args)
            ticket.wait()
            return ticket

        group.copy_batch = copy_batch
        return matmul_reduce_scatter(torch.ones(12, 2), torch.ones(2, 2), num_chunks=3)

    monkeypatch.setattr("tests.comm.test_matmul_schedule.HELD", 0.5)
    with pytest.raises(Exception, match="kept chunk 1 of 3 waiting"):
        run_local(2, rank, before=started.before, timeout=5)
