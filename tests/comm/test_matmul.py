"""all_gather_matmul and matmul_reduce_scatter against plain products of concatenated tensors in one process."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from interlace.comm import CommError, all_gather_matmul, matmul_reduce_scatter, run_local, traced
from interlace.comm.overlap.matmul import chunks_for
from tests.comm.products import column, row
from tests.judge import judge

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
LEADING = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
OPTIONS = st.fixed_dictionaries(
    {"num_chunks": st.sampled_from([1, 2, 3, 5, "auto"]), "layout": st.sampled_from(["auto", "direct", "remap"])}
)


def check_column(case, results, tolerance):
    dtype = case.x[0].dtype
    expected, torchs = case.oracle(), case.oracle(dtype)

    def of(rank, made):
        _, products, d_x, d_weights = made
        return [*products[rank], d_x[rank], *d_weights[rank]]

    for rank, (got, got_products, got_x, got_weights) in enumerate(results):
        assert torch.equal(got.double(), expected[0])
        check([*got_products, got_x, *got_weights], of(rank, expected), of(rank, torchs), dtype, tolerance)


def check_row(case, results, tolerance):
    dtype = case.x[0].dtype
    expected, torchs = case.oracle(), case.oracle(dtype)

    def of(rank, made):
        y, d_x, d_weights = made
        return [case.rows(y, rank), d_x[rank], d_weights[rank]]

    for rank, result in enumerate(results):
        check(result, of(rank, expected), of(rank, torchs), dtype, tolerance)


def check(results, expected, torchs, dtype, tolerance):
    """Equal to `tolerance` times the largest element. None: to the accuracy of torch's own products in the dtype."""
    for number, (have, want, torch_has) in enumerate(zip(results, expected, torchs, strict=True)):
        assert have.dtype == dtype and have.shape == want.shape
        if tolerance is None:
            judge(f"result {number}", have, torch_has, want)
        elif want.numel():
            assert (have.double() - want).abs().max() <= tolerance * want.abs().max()


@given(
    world=st.sampled_from([1, 2, 4]), rows=st.integers(0, 9), width=st.integers(0, 6),
    outs=st.lists(st.integers(0, 5), max_size=3), leading=LEADING, strided=st.booleans(), regather=st.booleans(),
    options=OPTIONS, seed=st.integers(0, 99),
)  # fmt: skip
def test_gather_and_products(world, rows, width, outs, leading, strided, regather, options, seed):
    case = column(world, rows, width, outs, leading=leading, strided=strided, dtype=torch.float64, seed=seed)
    check_column(case, case.run(regather=regather, **options), 1e-13)


@given(
    world=st.sampled_from([1, 2, 4]), rows=st.integers(0, 9), width=st.integers(0, 6), out=st.integers(0, 5),
    leading=LEADING, strided=st.booleans(), options=OPTIONS, seed=st.integers(0, 99),
)  # fmt: skip
def test_product_and_reduce_scatter(world, rows, width, out, leading, strided, options, seed):
    case = row(world, rows, width, out, leading=leading, strided=strided, dtype=torch.float64, seed=seed)
    check_row(case, case.run(**options), 1e-13)


@pytest.mark.parametrize("layout", ["direct", "remap"])
@pytest.mark.parametrize("chunks", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_row_lands_in_its_place_bit_for_bit(world, dtype, chunks, layout):
    """Products of small integers are exact in every dtype, so a moved row, a lost sum or a stale buffer is visible."""
    for leading in ((), (3,)):
        case = column(world, 11, 8, [6, 4], leading=leading, dtype=dtype, whole=True, seed=chunks)
        check_column(case, case.run(num_chunks=chunks, layout=layout), 0.0)
        case = row(world, 11, 8, 6, leading=leading, dtype=dtype, whole=True, seed=chunks)
        check_row(case, case.run(num_chunks=chunks, layout=layout), 0.0)


@pytest.mark.parametrize("layout", ["direct", "remap"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overlapped_products_are_plain_products_to_rounding(dtype, chunks, layout):
    """Sums of 320 products round about sqrt(320) times; in bfloat16 the reference error is that of torch's own
    products.
    """
    tolerance = None if dtype == torch.bfloat16 else 320**0.5 * torch.finfo(dtype).eps
    for case, check in (
        (column(4, 40, 48, [32, 16], leading=(2,), dtype=dtype), check_column),
        (row(4, 40, 48, 32, leading=(2,), dtype=dtype), check_row),
    ):
        check(case, case.run(num_chunks=chunks, layout=layout), tolerance)


@pytest.mark.parametrize("layout", [pytest.param("direct", marks=pytest.mark.slow), "remap"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_on_every_run(dtype, layout):
    delays = torch.Generator()

    def before(rank: int, what: str) -> None:
        time.sleep(float(torch.rand((), generator=delays)) * 2e-3)

    for case in (column(4, 13, 24, [16, 8], leading=(2,), dtype=dtype), row(4, 13, 24, 16, leading=(2,), dtype=dtype)):
        first = case.run(num_chunks=3, layout=layout)
        for seed in range(5):
            delays.manual_seed(seed)
            again = case.run(num_chunks=3, layout=layout, before=before)
            torch.testing.assert_close(again, first, rtol=0, atol=0)


class _AllRanks(torch.autograd.Function):
    """The operation on all ranks at once: a numeric derivative includes the effect of a rank on the others."""

    @staticmethod
    def forward(ctx, run, world, *inputs):
        ctx.run, ctx.world = run, world
        ctx.save_for_backward(*inputs)
        return tuple(torch.stack(parts) for parts in zip(*run_local(world, lambda group: run(group, inputs, None))))

    @staticmethod
    def backward(ctx, *grads):
        inputs = ctx.saved_tensors
        results = run_local(ctx.world, lambda group: ctx.run(group, inputs, [g[group.rank] for g in grads]))
        return None, None, *(torch.stack(parts) for parts in zip(*results))


def _run_one(operation):
    def run(group, inputs, grads):
        mine = [one[group.rank].detach().requires_grad_() for one in inputs]
        outputs = operation(*mine)
        if grads is None:
            return [out.detach() for out in outputs]
        return torch.autograd.grad(outputs, mine, grads)

    return run


@pytest.mark.parametrize("layout", ["direct", "remap"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(
    ("world", "by_projections"),
    [(2, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(4, True, marks=pytest.mark.slow)],
)
def test_gradcheck(world, by_projections, chunks, layout):
    """By random projections; with two chunks on two ranks also element by element: each evaluation runs all ranks."""
    torch.manual_seed(0)
    options = {"num_chunks": chunks, "layout": layout}

    def make(*shape):
        return torch.randn(world, *shape, dtype=torch.float64, requires_grad=True)

    def gather(x, a, b):
        gathered, products = all_gather_matmul(x, [a, b], **options)
        return gathered, *products

    def scatter(x, weight):
        return [matmul_reduce_scatter(x, weight, **options)]

    for operation, inputs in (
        (gather, (make(2, 3, 2), make(2, 2), make(1, 2))),
        (scatter, (make(2, 3 * world, 2), make(2, 2))),
    ):
        arguments = (_run_one(operation), world, *inputs)
        assert torch.autograd.gradcheck(_AllRanks.apply, arguments, fast_mode=by_projections or chunks == 1)


# ---------------------------------------------------------------------- skipped computation and freed memory


def _loss(outputs):
    return sum((out.float() ** 2).sum() for out in outputs)


@pytest.mark.parametrize("chunks", [1, 3])
def test_frozen_tensors_cost_nothing_in_backward(chunks):
    def rank(group, train_x, train_weight):
        x = torch.ones(6, 4, requires_grad=train_x)
        weight = torch.ones(3, 4, requires_grad=train_weight)
        z = torch.ones(12, 4, requires_grad=train_x)
        _, (y,) = all_gather_matmul(x, [weight], num_chunks=chunks)
        out = matmul_reduce_scatter(z, weight, num_chunks=chunks)
        found = []
        for result in (y, out):
            with traced(group) as trace:
                _loss([result]).backward()
            transfers = len(trace.of("issue"))
            products = [event.label for event in trace.of("compute")]
            found.append((transfers, sum("weight gradient" in label for label in products)))
        assert (x.grad is None, weight.grad is None) == (not train_x, not train_weight)
        return found

    # (transfers, weight products) in backward of the gather and of the reduce-scatter
    assert run_local(2, rank, True, True) == [[(chunks, 1), (chunks, 1)]] * 2
    assert run_local(2, rank, True, False) == [[(chunks, 0), (chunks, 0)]] * 2
    assert run_local(2, rank, False, True) == [[(0, 1), (chunks, 1)]] * 2


def test_gathered_has_no_gradient_when_x_has_none():
    def rank(group):
        gathered, (y,) = all_gather_matmul(torch.ones(2, 3), [torch.ones(4, 3, requires_grad=True)])
        return gathered.requires_grad, y.requires_grad

    assert run_local(2, rank) == [(False, True)] * 2


def test_an_unused_product_and_a_gather_without_weights():
    def rank(group):
        x = torch.full((3, 2), 1.0 + group.rank, requires_grad=True)
        weights = [torch.ones(4, 2, requires_grad=True) for _ in range(2)]
        _, products = all_gather_matmul(x, weights, num_chunks=2)
        products[1].sum().backward()
        assert weights[0].grad is None and torch.equal(weights[1].grad, torch.full((4, 2), 9.0))
        assert torch.equal(x.grad, torch.full((3, 2), 8.0))
        gathered, none = all_gather_matmul(x, [], num_chunks=2)
        assert none == []
        return torch.autograd.grad((gathered * torch.arange(6.0)[:, None]).sum(), x)[0]

    first, second = run_local(2, rank)
    assert torch.equal(first, 2 * torch.arange(3.0)[:, None].expand(3, 2))
    assert torch.equal(second, 2 * torch.arange(3.0, 6.0)[:, None].expand(3, 2))


def test_regather_keeps_this_ranks_rows_only():
    def rank(group, regather):
        kept = []
        x, weights = torch.ones(6, 4, requires_grad=True), [torch.ones(3, 4, requires_grad=True) for _ in range(2)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            _, products = all_gather_matmul(x, weights, num_chunks=2, regather=regather)
        with traced(group) as trace:
            _loss(products).backward()
        return kept, [event.label.rsplit(", ")[-1] for event in trace.of("issue")]

    for kept, issued in run_local(4, rank, False):
        assert sorted(kept, key=len) == [(3, 4), (3, 4), (1, 4, 6, 4)] and issued == ["chunk 0 of 2", "chunk 1 of 2"]
    for kept, issued in run_local(4, rank, True):
        assert sorted(kept, key=len) == [(3, 4), (3, 4), (1, 6, 4)]
        assert issued == ["gather again", "chunk 0 of 2", "chunk 1 of 2"]


# ---------------------------------------------------------------------- autocast, the automatic rule, errors


@pytest.mark.parametrize("world", [1, 2])
def test_autocast_casts_as_it_does_for_linear(world):
    def rank(group):
        x = torch.randn(4, 8, requires_grad=True)
        linear = nn.Linear(8, 6, bias=False)
        with torch.autocast("cpu", torch.bfloat16):
            gathered, (y,) = all_gather_matmul(x, [linear.weight], num_chunks=2)
            z = matmul_reduce_scatter(y, torch.randn(5, 6), num_chunks=2)
            assert gathered.dtype == y.dtype == z.dtype == torch.bfloat16
            assert torch.equal(y, nn.functional.linear(gathered, linear.weight))
            z.float().sum().backward()  # inside the region, as in some training loops
        return x.grad.dtype, linear.weight.grad.dtype

    assert run_local(world, rank) == [(torch.float32, torch.float32)] * world


def test_auto_cuts_nothing_small():
    kib = 1024
    assert chunks_for(64, 8 * kib, 1, 8) == 1  # 512 rows of all ranks
    assert chunks_for(0, 8 * kib, 1, 8) == 1
    assert chunks_for(1024, 8 * kib, 1, 8) == 8
    assert chunks_for(1024, 8 * kib, 1, 2) == 2  # chunks of 1024 rows of all ranks
    assert chunks_for(1 << 16, 16, 1, 8) == 1  # 1 MiB in all
    assert chunks_for(1 << 20, 8 * kib, 1, 8) == 8
    assert chunks_for(512, 8 * kib, 4, 4) == chunks_for(2048, 8 * kib, 1, 4) == 8
    assert chunks_for(1, 64 << 20, 4096, 8) == 1  # one row cannot be split

    def rank(group):
        with traced(group) as trace:
            all_gather_matmul(torch.ones(64, 16), [torch.ones(2, 16)])
            matmul_reduce_scatter(torch.ones(64, 16), torch.ones(2, 16))
            all_gather_matmul(torch.ones(2048, 512), [torch.ones(2, 512)])
        return len(trace.of("issue"))

    assert run_local(2, rank) == [1 + 1 + 4] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: all_gather_matmul(torch.ones(3), [torch.ones(2, 3)]), "must be"),
        (lambda: all_gather_matmul(torch.ones(3, 3), torch.ones(2, 3)), r"pass \[weight\]"),
        (lambda: all_gather_matmul(torch.ones(3, 3), [torch.ones(2, 4)]), r"must be \[N, 3\]"),
        (lambda: all_gather_matmul(torch.ones(3, 3), [torch.ones(2, 3).bfloat16()]), "cast one"),
        (lambda: all_gather_matmul(torch.ones(3, 3), [], num_chunks=0), "at least 1"),
        (lambda: all_gather_matmul(torch.ones(3, 3), [], num_chunks=True), "at least 1"),
        (lambda: all_gather_matmul(torch.ones(3, 3), [], layout="best"), "layout"),
        (lambda: matmul_reduce_scatter(torch.ones(3), torch.ones(2, 3)), "must be"),
        (lambda: matmul_reduce_scatter(torch.ones(4, 3), torch.ones(3)), r"must be \[N, 3\]"),
        (lambda: matmul_reduce_scatter(torch.ones(5, 3), torch.ones(2, 3)), "5 rows are not divisible by 2 ranks"),
        (lambda: matmul_reduce_scatter(torch.ones(4, 3), torch.ones(2, 3), num_chunks="8"), "at least 1"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(call, message):
    with pytest.raises(ValueError, match=message):
        run_local(2, lambda group: call(), timeout=5)


def test_ranks_with_different_shapes_are_told():
    def rank(group):
        all_gather_matmul(torch.ones(3 + group.rank, 2), [torch.ones(2, 2)], num_chunks=2)

    with pytest.raises(CommError, match=r"3, 2\].*4, 2\]|4, 2\].*3, 2\]"):
        run_local(2, rank, timeout=5)


def test_a_transport_that_is_closed_has_no_thread_left():
    before = set(threading.enumerate())

    def rank(group):
        all_gather_matmul(torch.ones(4, 2), [torch.ones(3, 2)], num_chunks=4, layout="remap")
        sides = [thread for thread in threading.enumerate() if thread.name.startswith("interlace-copies")]
        group.barrier()
        group.close()
        return group, sides

    results = run_local(2, rank)
    assert all(sides for _, sides in results)
    assert not {thread for thread in threading.enumerate() if thread not in before}
    assert len({id(group) for group, _ in results}) == 2  # they still exist


@pytest.mark.parametrize("layout", ["direct", "remap"])
def test_a_lost_rank_ends_the_others(layout):
    def rank(group):
        x, weight = torch.ones(8, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        _, (y,) = all_gather_matmul(x, [weight], num_chunks=4, layout=layout)
        if group.rank == 1:
            raise RuntimeError("lost on purpose")
        matmul_reduce_scatter(y, weight, num_chunks=4, layout=layout).sum().backward()

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="lost on purpose"):
        run_local(4, rank, timeout=200)
    assert time.monotonic() - began < 30
