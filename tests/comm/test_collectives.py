"""Each collective against its definition computed by hand, on every transport of a machine without GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from interlace.comm import (
    Transport,
    all_gather_into_tensor,
    all_gather_matmul,
    all_reduce,
    all_to_all_single,
    matmul_reduce_scatter,
    reduce_scatter_tensor,
    run_local,
)
from interlace.comm.collectives.rows import ONE_ROUND
from tests.comm.jobs import data, digest, on_ranks, reduced, same_bits, strided

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
]  # fmt: skip
OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
KINDS = [("local", 1), ("local", 2), ("local", 4), ("shm", 2), ("shm", 4), ("gloo", 2), ("gloo", 4)]
on_every_transport = pytest.mark.parametrize(("kind", "world"), KINDS)
FAST = [("local", 1), ("local", 2), ("shm", 2), ("shm", 4), ("gloo", 2)]
costly = pytest.mark.parametrize(
    ("kind", "world"), [pytest.param(*each, marks=[pytest.mark.slow] * (each not in FAST)) for each in KINDS]
)


def finished(work: Any) -> None:
    if work is not None:
        work.wait()


def gathers(group: Transport) -> int:
    compared = 0
    for dtype in DTYPES:
        for shape in [(5,), (3, 4), (2, 0, 3), (0,), (1, 30_001)]:
            for case in ("plain", "strided input", "strided output", "stacked", "async"):
                inputs = [data(rank, shape, dtype) for rank in range(group.world)]
                wanted = torch.cat(inputs)
                mine, output = inputs[group.rank], torch.zeros_like(wanted)
                if case == "strided input":
                    mine = strided(mine)
                elif case == "strided output":
                    output = strided(output)
                elif case == "stacked":
                    wanted, output = torch.stack(inputs), torch.zeros(group.world, *shape, dtype=dtype)
                finished(all_gather_into_tensor(output, mine, group, async_op=case == "async"))
                assert same_bits(output, wanted), (dtype, shape, case)
                compared += 1
    return compared


@costly
def test_all_gather_is_bitwise_the_concatenation(pool: Any, kind: str, world: int) -> None:
    assert on_ranks(pool, kind, world, gathers) == [200] * world


def reductions(group: Transport, dtypes: list[torch.dtype]) -> list[str]:
    """Asserts on every rank; returns digests of the results that must be equal on all ranks."""
    digests = []
    for dtype in dtypes:
        for shape in [(group.world * 5,), (group.world, 3, 2), (group.world * 2, 0), (group.world * 4099,)]:
            for op, case in cases(dtype):
                inputs = [data(rank, shape, dtype, seed=1) for rank in range(group.world)]
                rows = shape[0] // group.world
                wanted = reduced(inputs, op)[group.rank * rows : (group.rank + 1) * rows]
                mine, output = inputs[group.rank], torch.zeros_like(wanted)
                if case == "strided input":
                    mine = strided(mine)
                elif case == "strided output":
                    output = strided(output)
                finished(reduce_scatter_tensor(output, mine, OPS[op], group, async_op=case == "async"))
                assert same_bits(output, wanted), ("reduce_scatter", dtype, shape, op, case)
        for shape in [(), (1,), (7, 3), (0,), (ONE_ROUND // dtype.itemsize + 7,)]:  # the last one takes two rounds
            for op, case in cases(dtype):
                inputs = [data(rank, shape, dtype, seed=2) for rank in range(group.world)]
                tensor = inputs[group.rank].clone()
                if case.startswith("strided") and shape:
                    tensor = strided(tensor)
                finished(all_reduce(tensor, OPS[op], group, async_op=case == "async"))
                assert same_bits(tensor, reduced(inputs, op)), ("all_reduce", dtype, shape, op, case)
                digests.append(digest(tensor))
    return digests


def cases(dtype: torch.dtype) -> list[tuple[str, str]]:
    """(reduction, memory layout or form of the call)."""
    others = [op for op in OPS if op != "sum" and (dtype.is_floating_point or op != "mean")]
    return [("sum", case) for case in ("plain", "strided input", "strided output", "async")] + [
        (op, "plain") for op in others
    ]


@costly
def test_reductions_are_bit_equal_on_all_ranks_and_repeatable(pool: Any, kind: str, world: int) -> None:
    first = on_ranks(pool, kind, world, reductions, DTYPES)
    assert len(first[0]) == 5 * (4 * 7 + 4 * 6)  # only floating-point dtypes have a mean
    assert all(digests == first[0] for digests in first)
    floats = [torch.float32, torch.bfloat16]
    assert on_ranks(pool, kind, world, reductions, floats) == on_ranks(pool, kind, world, reductions, floats)


def exchanges(group: Transport, rounds: int) -> int:
    for seed in range(rounds):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(0, 4, (group.world, group.world), generator=generator)  # [from, to]
        dtype, columns = DTYPES[seed % len(DTYPES)], (1, 3, 0, 20_000)[seed % 4]
        inputs = [data(rank, (int(rows[rank].sum()), columns), dtype, seed) for rank in range(group.world)]
        gives, takes = rows[group.rank].tolist(), rows[:, group.rank].tolist()
        wanted = torch.cat([inputs[rank].split(rows[rank].tolist())[group.rank] for rank in range(group.world)])
        mine, output = inputs[group.rank], torch.zeros_like(wanted)
        if seed % 3 == 1:
            mine = strided(mine)
        elif seed % 3 == 2:
            output = strided(output)
        finished(all_to_all_single(output, mine, takes, gives, group, async_op=seed % 2 == 0))
        assert same_bits(output, wanted), seed
    return rounds


@on_every_transport
def test_all_to_all_of_uneven_pieces(pool: Any, kind: str, world: int) -> None:
    assert on_ranks(pool, kind, world, exchanges, 48) == [48] * world


def tables(world: int) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, 5), min_size=world, max_size=world)
    return st.lists(row, min_size=world, max_size=world)


@given(st.integers(1, 4).flatmap(tables))
def test_all_to_all_of_any_split(rows: list[list[int]]) -> None:
    world = len(rows)
    inputs = [torch.arange(sum(rows[rank])) + 100 * rank for rank in range(world)]

    def rank(group: Transport) -> Tensor:
        takes = [row[group.rank] for row in rows]
        output = torch.full((sum(takes),), -1)
        all_to_all_single(output, inputs[group.rank], takes, rows[group.rank], group)
        return output

    for to, result in enumerate(run_local(world, rank)):
        wanted = [value for source in range(world) for value in inputs[source].split(rows[source])[to].tolist()]
        assert result.tolist() == wanted


def test_all_to_all_of_equal_pieces_needs_no_sizes() -> None:
    def rank(group: Transport) -> list[int]:
        output = torch.empty(6, dtype=torch.int64)
        all_to_all_single(output, torch.arange(6) + 10 * group.rank, group=group)
        return output.tolist()

    assert run_local(3, rank) == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23], [4, 5, 14, 15, 24, 25]]


# ---------------------------------------------------------------------- gradients


def gather(x: Tensor, group: Transport) -> Tensor:
    output = x.new_empty(group.world * x.shape[0], *x.shape[1:])
    all_gather_into_tensor(output, x, group)
    return output


def gather_into_a_view(x: Tensor, group: Transport) -> Tensor:
    whole = x.new_zeros(group.world * x.shape[0] + 2, 2, *x.shape[1:])
    all_gather_into_tensor(whole[1:-1, 1], x.transpose(0, -1).contiguous().transpose(0, -1), group)
    return whole


def gather_later(x: Tensor, group: Transport) -> Tensor:
    output = x.new_empty(group.world * x.shape[0], *x.shape[1:])
    work = all_gather_into_tensor(output, x, group, async_op=True)
    assert work is not None
    work.wait()
    return output


def gather_over_what_had_a_gradient(x: Tensor, group: Transport) -> Tensor:
    output = torch.cat([x] * group.world) * 3  # overwritten: has no effect
    all_gather_into_tensor(output, x, group)
    return output


def scatter(x: Tensor, group: Transport) -> Tensor:
    output = x.new_empty(x.shape[0] // group.world, *x.shape[1:])
    reduce_scatter_tensor(output, x, group=group)
    return output


def scatter_mean(x: Tensor, group: Transport) -> Tensor:
    output = x.new_empty(x.shape[0] // group.world, *x.shape[1:])
    reduce_scatter_tensor(output, x, dist.ReduceOp.AVG, group)
    return output


def total(x: Tensor, group: Transport) -> Tensor:
    output = x * 1
    all_reduce(output, group=group)
    return output


def mean(x: Tensor, group: Transport) -> Tensor:
    output = x.t() * 1
    all_reduce(output, dist.ReduceOp.AVG, group)
    return output


def exchange(x: Tensor, group: Transport) -> Tensor:
    """Rank r sends its first s rows to rank s, or all rows if it has fewer."""
    rows = [[1, 0, 3, 0], [2, 1, 0, 1], [1, 1, 1, 1], [0, 0, 4, 0]]
    gives = rows[group.rank][: group.world]
    takes = [row[group.rank] for row in rows[: group.world]]
    output = x.new_empty(sum(takes), *x.shape[1:])
    all_to_all_single(output, x[: sum(gives)], takes, gives, group)
    return output


def derivatives(group: Transport, function: Callable[[Tensor, Transport], Tensor]) -> tuple[Tensor, ...]:
    """First and second derivatives of all ranks' sum of sin(function(x^2)) . c, by autograd and by finite differences.

    Every rank's x is varied in turn, so differences need no autograd across ranks. The test sums the contributions of
    the ranks to a derivative.
    """
    x = data(group.rank, (4, 2), torch.float64, seed=3) / 50
    directions = data(group.rank, (4, 2), torch.float64, seed=4) / 50

    def loss(x: Tensor) -> Tensor:
        result = function(x * x, group)
        return (result.sin() * data(group.rank, result.shape, torch.float64, seed=5)).sum()

    def gradient(x: Tensor, again: bool) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        (result,) = torch.autograd.grad(loss(x), x, create_graph=again)
        return x, result

    def moved(rank: int, index: int, step: float) -> Tensor:
        shifted = x.clone()
        if rank == group.rank:
            shifted.view(-1)[index] += step
        return shifted

    variable, first = gradient(x, True)
    (second,) = torch.autograd.grad((first * directions).sum(), variable)
    step = 1e-5
    first_by_steps, second_by_steps = (torch.zeros(group.world, 8, dtype=torch.float64) for _ in range(2))
    for rank in range(group.world):
        for index in range(8):
            up, down = moved(rank, index, step), moved(rank, index, -step)
            with torch.no_grad():
                first_by_steps[rank, index] = (loss(up) - loss(down)) / (2 * step)
            difference = gradient(up, False)[1] - gradient(down, False)[1]
            second_by_steps[rank, index] = (difference * directions).sum() / (2 * step)
    return first.detach(), second, first_by_steps, second_by_steps


DIFFERENTIABLE = [
    gather, gather_into_a_view, gather_later, gather_over_what_had_a_gradient, scatter, scatter_mean, total, mean,
    exchange,
]  # fmt: skip


def all_derivatives(group: Transport) -> list[tuple[Tensor, ...]]:
    return [derivatives(group, function) for function in DIFFERENTIABLE]


@pytest.mark.parametrize(
    ("kind", "world"), [("local", 1), ("local", 2), pytest.param("local", 4, marks=pytest.mark.slow), ("shm", 2)]
)
def test_first_and_second_derivatives(pool: Any, kind: str, world: int) -> None:
    ranks = on_ranks(pool, kind, world, all_derivatives)
    for function, *result in zip(DIFFERENTIABLE, *ranks):
        first, second = (torch.stack([rank[n].reshape(-1) for rank in result]) for n in (0, 1))
        first_by_steps, second_by_steps = (sum(rank[n] for rank in result) for n in (2, 3))
        assert first.abs().max() > 1e-3 and second.abs().max() > 1e-3, function
        torch.testing.assert_close(first, first_by_steps, rtol=1e-6, atol=1e-7, msg=function.__name__)
        torch.testing.assert_close(second, second_by_steps, rtol=1e-6, atol=1e-7, msg=function.__name__)


@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_gradcheck_of_a_world_of_one(function: Callable[[Tensor, Transport], Tensor]) -> None:
    def rank(group: Transport) -> bool:
        x = data(0, (4, 2), torch.float64, seed=3).requires_grad_()
        return torch.autograd.gradcheck(lambda x: function(x, group), x) and torch.autograd.gradgradcheck(
            lambda x: function(x, group), x
        )

    assert run_local(1, rank) == [True]


def test_overwriting_a_tensor_saved_for_backward_is_an_error() -> None:
    def rank(group: Transport) -> None:
        x = torch.ones(2, requires_grad=True)
        kept = torch.ones(4)
        y = (torch.cat([x, x]) * kept).sum()
        all_gather_into_tensor(kept, torch.zeros(2), group)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    run_local(2, rank)


def overwritten(group: Transport) -> bool:
    tensor = torch.zeros(4)
    before = tensor._version
    all_gather_into_tensor(tensor, torch.ones(2), group)
    return tensor._version > before


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_autograd_sees_what_a_transport_writes(pool: Any, kind: str) -> None:
    assert on_ranks(pool, kind, 2, overwritten) == [True, True]


def test_a_gradient_stays_where_it_is_not_wanted() -> None:
    def rank(group: Transport) -> None:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            output = torch.empty(4)
            all_gather_into_tensor(output, x, group)
        assert not output.requires_grad
        with pytest.raises(RuntimeError, match="leaf"):
            all_reduce(x, group=group)
        with pytest.raises(ValueError, match="max has no gradient"):
            reduce_scatter_tensor(torch.empty(1), x, dist.ReduceOp.MAX, group)

    run_local(2, rank)


# ---------------------------------------------------------------------- arguments


def test_wrong_arguments_are_named_before_anything_moves() -> None:
    x = torch.zeros(4)
    wrong: list[tuple[str, Callable[[Transport], Any]]] = [
        ("must have 2 times the elements", lambda g: all_gather_into_tensor(torch.zeros(7), x, g)),
        ("must have 2 times the elements", lambda g: reduce_scatter_tensor(torch.zeros(3), x, group=g)),
        ("one tensor is torch.float64", lambda g: all_gather_into_tensor(torch.zeros(8).double(), x, g)),
        ("op .* is not supported", lambda g: all_reduce(x, dist.ReduceOp.PRODUCT, g)),
        ("complex64 is not supported", lambda g: all_reduce(torch.zeros(2, dtype=torch.complex64), group=g)),
        ("AVG of torch.bool would be rounded", lambda g: all_reduce(torch.zeros(2).bool(), dist.ReduceOp.AVG, g)),
        ("AVG of torch.int64 .* use SUM and", lambda g: all_reduce(torch.ones(2).long(), dist.ReduceOp.AVG, g)),
        ("AVG of torch.int8", lambda g: reduce_scatter_tensor(x[:2].char(), x.char(), dist.ReduceOp.AVG, g)),
        ("no dimension to split", lambda g: all_to_all_single(torch.zeros(()), torch.zeros(()), group=g)),
        ("need rows of the same shape", lambda g: all_to_all_single(torch.zeros(4, 2), torch.zeros(4, 3), group=g)),
        ("are not divisible by", lambda g: all_to_all_single(torch.zeros(4), torch.zeros(3), group=g)),
        ("must be 2 numbers", lambda g: all_to_all_single(x, x, [1, 1, 2], [2, 2], g)),
        ("must be 2 numbers", lambda g: all_to_all_single(x, x, [5, -1], [2, 2], g)),
        ("sends itself", lambda g: all_to_all_single(x, x, [1, 3], [3, 1], g)),
    ]

    def rank(group: Transport) -> None:
        for message, call in wrong:
            with pytest.raises(ValueError, match=message):
                call(group)
        all_reduce(x.clone(), group=group)  # the transport stays usable

    run_local(2, rank)


def inferred(group: Transport) -> None:
    ranks = range(group.world)
    mine, sum_of_ranks = float(group.rank), float(sum(range(group.world)))
    with torch.inference_mode():
        output = torch.empty(2 * group.world)
        all_gather_into_tensor(output, torch.full((2,), mine), group)
        assert output.tolist() == [float(rank) for rank in ranks for _ in range(2)]
        strided_output = torch.empty(2, group.world).T
        all_gather_into_tensor(strided_output, torch.full((2,), mine), group)
        assert strided_output.flatten().tolist() == output.tolist()
        for length in (2, ONE_ROUND):
            total = torch.full((length,), mine)
            all_reduce(total, group=group)
            assert total.eq(sum_of_ranks).all() and total.is_inference()
        piece = torch.empty(1)
        reduce_scatter_tensor(piece, torch.arange(group.world) + mine, group=group)
        assert piece.item() == group.world * mine + sum_of_ranks
        exchanged = torch.empty(group.world)
        all_to_all_single(exchanged, torch.full((group.world,), mine), group=group)
        assert exchanged.tolist() == [float(rank) for rank in ranks]
        for layout in ("direct", "remap"):
            x, weight = torch.full((4, 3), mine), torch.ones(5, 3)
            _, (y,) = all_gather_matmul(x, [weight], group=group, num_chunks=4, layout=layout)
            assert [row[0] for row in y.tolist()] == [3.0 * rank for rank in ranks for _ in range(4)]
            rows = matmul_reduce_scatter(
                torch.ones(group.world * 4, 3), weight, group=group, num_chunks=2, layout=layout
            )
            assert rows.eq(3 * group.world).all()
    total = torch.ones(2)  # and ordinary tensors again
    all_reduce(total, group=group)
    assert not total.is_inference()


@on_every_transport
def test_inference_mode(pool: Any, kind: str, world: int) -> None:
    on_ranks(pool, kind, world, inferred)


def test_torch_compile_breaks_the_graph_at_collectives() -> None:
    def rank(group: Transport) -> list[Tensor]:
        def step(x: Tensor, weight: Tensor) -> Tensor:
            output = x.new_empty(2 * len(x), 4)
            all_gather_into_tensor(output, x * 2, group)
            _, (y,) = all_gather_matmul(output.relu(), [weight], group=group, num_chunks=2)
            y = matmul_reduce_scatter(y.tanh(), weight.t(), group=group, num_chunks=2)
            total = y.sin()
            all_reduce(total, group=group)
            return total.square()

        x, weight = torch.randn(3, 4).requires_grad_(), torch.randn(5, 4).requires_grad_()
        compiled = torch.compile(step, backend="eager")
        for _ in range(3):
            outputs = [function(x, weight) for function in (step, compiled)]
            grads = [torch.autograd.grad(output.sum(), [x, weight]) for output in outputs]
            for eager, other in zip((outputs[0], *grads[0]), (outputs[1], *grads[1])):
                assert torch.equal(eager, other)

    counters = torch._dynamo.utils.counters
    counters.clear()
    run_local(2, rank)
    # Communication is not traced: a new label or transport causes no recompilation.
    assert 0 < counters["stats"]["unique_graphs"] <= 10


def test_conjugate_and_negative_views_are_resolved_before_send() -> None:
    def rank(group: Transport) -> None:
        x = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        output = torch.empty(4, dtype=torch.complex64)
        all_gather_into_tensor(output, x.conj(), group)
        assert output.tolist() == [1 - 3j, 2 - 4j] * 2
        negated = torch.empty(4)
        all_gather_into_tensor(negated, x.conj().imag, group)
        assert negated.tolist() == [-3, -4] * 2

    run_local(2, rank)
