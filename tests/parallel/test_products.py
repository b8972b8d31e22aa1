"""Products that overlap with their sums over ranks: exact against whole tensors, and the issue order."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from interlace.comm import CommError, run_local, traced
from interlace.comm.collectives.rows import ONE_ROUND
from interlace.comm.overlap import tiles as overlap
from interlace.parallel import Ranks, products
from interlace.parallel.products import copied_products, sum_of_products

HELD = 10.0  # seconds that a transfer is held before the test fails


def small(generator, *shape):
    """Small integers, for which every product and sum is exact."""
    return torch.randint(-1, 2, shape, generator=generator).double()


def columns(world, leading, width, outs, chunks, trained, uses_rows, seed=0, before=None):
    """Compares `copied_products` with one process; returns each rank's trace of its backward pass."""
    generator = torch.Generator().manual_seed(seed)
    x = small(generator, *leading, width).requires_grad_(trained[0])
    weights = [[small(generator, n, width).requires_grad_(trained[1]) for n in outs] for _ in range(world)]
    due = [[small(generator, *leading, n) for n in outs] for _ in range(world)]
    due_rows = [small(generator, *leading, width) for _ in range(world)]
    wanted = [[linear(x, w) for w in mine] for mine in weights]
    total = sum((y * d).sum() for ys, ds in zip(wanted, due) for y, d in zip(ys, ds))
    if uses_rows:
        total = total + sum((x * d).sum() for d in due_rows)
    if any(trained):
        total.backward()

    def rank(group):
        r = group.rank
        mine = x.detach().requires_grad_(trained[0])
        cut = [w.detach().requires_grad_(trained[1]) for w in weights[r]]
        rows, result = copied_products(mine, cut, Ranks(group), chunks)
        assert torch.equal(rows, mine) and rows.requires_grad == trained[0]
        assert all(torch.equal(have, want) for have, want in zip(result, wanted[r], strict=True))
        loss = sum((y * d).sum() for y, d in zip(result, due[r]))
        if uses_rows:
            loss = loss + (rows * due_rows[r]).sum()
        with traced(group) as trace:
            if any(trained):
                loss.backward()
        for have, want in zip([mine, *cut], [x, *weights[r]], strict=True):
            assert (have.grad is None) == (want.grad is None)
            assert have.grad is None or torch.equal(have.grad, want.grad)
        return trace

    return run_local(world, rank, before=before, timeout=3 * HELD)


def rows_of(world, leading, width, outs, chunks, trained, seed=0, before=None):
    """Compares `sum_of_products` with one process; returns each rank's trace of its forward pass."""
    generator = torch.Generator().manual_seed(seed)
    x = [small(generator, *leading, width).requires_grad_(trained[0]) for _ in range(world)]
    weights = [small(generator, outs, width).requires_grad_(trained[1]) for _ in range(world)]
    due = small(generator, *leading, outs)
    wanted = sum(linear(one, w) for one, w in zip(x, weights))
    if any(trained):
        wanted.backward(due)

    def rank(group):
        r = group.rank
        mine, weight = x[r].detach().requires_grad_(trained[0]), weights[r].detach().requires_grad_(trained[1])
        with traced(group) as trace:
            y = sum_of_products(mine, weight, Ranks(group), chunks)
        assert torch.equal(y, wanted)
        if any(trained):
            y.backward(due)
        for have, want in ((mine, x[r]), (weight, weights[r])):
            assert (have.grad is None) == (want.grad is None)
            assert have.grad is None or torch.equal(have.grad, want.grad)
        return trace

    return run_local(world, rank, before=before, timeout=3 * HELD)


CASES = {
    "world": st.integers(1, 4),
    "leading": st.lists(st.integers(1, 7), max_size=3).map(tuple),
    "width": st.integers(1, 6),
    "chunks": st.one_of(st.just("auto"), st.integers(1, 6)),
    "trained": st.tuples(st.booleans(), st.booleans()),
    "seed": st.integers(0, 99),
}


@settings(max_examples=40, deadline=None)
@given(**CASES, outs=st.lists(st.integers(1, 5), min_size=1, max_size=3), uses_rows=st.booleans())
def test_copied_products_are_those_of_one_process(**case):
    columns(**case)


@settings(max_examples=40, deadline=None)
@given(**CASES, outs=st.integers(1, 5))
def test_sums_of_products_are_those_of_one_process(**case):
    rows_of(**case)


def test_sums_of_many_bytes_take_two_rounds():
    wide = ONE_ROUND // 8  # float64, of one row
    [trace, *_] = rows_of(2, (6,), 2, wide, 2, (True, True))
    assert [event.label.rpartition(", ")[2] for event in trace.of("issue")] == ["reduce", "gather"] * 2
    [trace, *_] = columns(2, (6,), wide, [2], 2, (True, True), False)
    assert [event.label.rpartition(", ")[2] for event in trace.of("issue")] == ["reduce", "gather"] * 2


@pytest.mark.parametrize("operation", ["columns", "rows"])
def test_sums_are_under_way_while_products_are_made(operation):
    chunks = 3
    if operation == "columns":
        traces = columns(2, (9,), 3, [2, 4], chunks, (True, True), False)
    else:
        traces = rows_of(2, (9,), 3, 2, chunks, (True, True))
    for trace in traces:
        issues, made = trace.of("issue"), trace.of("compute")
        assert len(issues) == chunks and len(made) == chunks + (operation == "columns")
        for issue, product, following in zip(issues, made, made[1:]):
            assert product.finish <= issue.start <= following.start
        assert (made[-1].label == "backward of copied_products, weight gradient") == (operation == "columns")


@pytest.mark.parametrize("operation", ["columns", "rows"])
def test_no_product_waits_for_a_sum(operation, monkeypatch):
    """Transfers are held until the last product has begun on every rank: earlier products must not wait for one."""
    last = {"columns": "weight gradient", "rows": "chunk 3 of 4"}[operation]
    begun = {rank: threading.Event() for rank in range(3)}
    held = []

    @contextmanager
    def computing(transport, label):
        if label.endswith(last):
            begun[transport.rank].set()
        yield

    def before(rank, what):
        if what == "post":
            held.append(begun[rank].wait(HELD))

    for module in (overlap, products):
        monkeypatch.setattr(module, "computing", computing)
    if operation == "columns":
        columns(3, (12,), 3, [2, 4], 4, (True, True), False, before=before)
    else:
        rows_of(3, (12,), 3, 2, 4, (True, True), before=before)
    assert held and all(held)


def test_compiled_code_stops_at_them_and_goes_on_behind():
    generator = torch.Generator().manual_seed(0)
    x, into, back = small(generator, 4, 3), small(generator, 2, 3), small(generator, 3, 2)

    def rank(group):
        def block(rows):
            _, (inner,) = copied_products(rows * 2, [into], Ranks(group), 2)
            return sum_of_products(inner + 1, back, Ranks(group), 2) - 1

        result = []
        for function in (block, torch.compile(block, backend="eager")):
            mine = x.clone().requires_grad_()
            y = function(mine)
            y.sum().backward()
            result.append((y.detach(), mine.grad))
        assert all(torch.equal(plain, compiled) for plain, compiled in zip(*result, strict=True))

    run_local(2, rank)


def test_ranks_that_pass_other_shapes_are_told():
    def rank(group):
        sum_of_products(torch.ones(4 + group.rank, 3), torch.ones(2, 3), Ranks(group))

    with pytest.raises(CommError, match=r"sum_of_products.*summed"):
        run_local(2, rank, timeout=HELD)
