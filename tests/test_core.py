"""Every function of interlace._core under hostile arguments: a valid answer, or ValueError, TypeError or OverflowError.

Crashes, hangs, gigabytes of memory and indices out of range are failures. `make test-asan` runs this file on a build
with AddressSanitizer and UndefinedBehaviorSanitizer, where an out-of-bounds read or a signed overflow is a crash.
"""

import itertools
import mmap
import random
import resource
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import BitfieldMask, _core
from tests.sampling import given_by_tier
from tests.schedule.core_calls import schedule_calls

# A hang in C++ can only be stopped by ending the process, as this method of pytest-timeout does.
pytestmark = pytest.mark.timeout(600, method="thread")

Check = Callable[..., bool]


class Call(NamedTuple):
    arguments: tuple  # calls with an answer
    valid: Check  # (result, *arguments)


# --- one valid call of every function


def within(array, shape, low, high) -> bool:
    """Integers low .. high - 1 in an array of this shape."""
    array = np.asarray(array)
    return array.dtype.kind in "iu" and array.shape == shape and bool(((array >= low) & (array < high)).all())


def finite(*values) -> bool:
    return all(np.isfinite(value).all() for value in values)


def assigned(bin_of, weights, bins, capacity=None, *_) -> bool:
    most = np.bincount(bin_of).max()
    return within(bin_of, weights.shape, 0, bins) and (capacity is None or most <= capacity)


def replicated(replica_of, weights, _, replicas, equal, *__) -> bool:
    return assigned(replica_of, weights, replicas, -(-len(weights) // replicas) if equal else None)


def in_rows(bin_of, weights, rows, bins, capacity, *_) -> bool:
    return all(assigned(row, row, bins, capacity) for row in np.asarray(bin_of).reshape(int(rows), -1))


def exact(found, weights, bins, capacity, *_) -> bool:
    bin_of, makespan, bound, _ = found
    return assigned(bin_of, weights, bins, capacity) and finite(makespan) and 0 <= bound <= makespan


def permutation(order, n) -> bool:
    return within(order, (n,), 0, n) and len(set(order.tolist())) == n


def exchanged(orders, source, *_) -> bool:
    return all(permutation(order, len(source)) for order in orders)


def matched(found, cost, alone) -> bool:
    threshold, partner = found
    taken = partner[partner >= 0]
    return finite(threshold) and within(partner, alone.shape, -1, cost.shape[1]) and len(set(taken)) == len(taken)


def deferred(plan, encoder, llm, microbatches, *_) -> bool:
    count, shape = plan["count"], encoder.shape
    return (
        1 <= count <= microbatches
        and all(within(plan[name], shape, 0, count) for name in ("encoder_of", "llm_of"))
        and finite(plan["encoder_loads"], plan["llm_loads"], plan["threshold"])
    )


def reordered(found, forward, *_) -> bool:
    times = found["seconds"], found["printed_seconds"], found["bound"]
    return permutation(found["order"], len(forward)) and finite(*times)


def simulated(found, rows, first, *others) -> bool:
    names = ("start", "rank_busy", "peak_memory") + (("finish",) if found["complete"] else ())
    reached = found["reached"]
    return (
        finite(*(found[name] for name in names))
        and within(reached, (len(first) - 1,), 0, len(rows) + 1)
        and (reached <= np.diff(first)).all()
        and within(found["lane"], (len(rows),), -1, len(others[5]) - 1)
    )


def cut(cuts, layers, stages) -> bool:
    return (
        within(cuts, (stages + 1,), 0, layers + 1)
        and cuts[0] == 0
        and cuts[-1] == layers
        and np.all(np.diff(cuts) >= 1)
    )


def limited(cuts, costs, memory, limits, speeds) -> bool:
    held = [memory[a:b].sum(dtype=float) for a, b in itertools.pairwise(cuts)]
    rounding = 1e-12 * memory.sum(dtype=float)  # what a stage holds is a difference of two sums from the first layer
    return cut(cuts, len(costs), len(speeds)) and all(a <= b + rounding for a, b in zip(held, limits.astype(float)))


def templated(found, costs, widths, nodes, gpus, per_stage) -> bool:
    cuts, used, time = found
    return cut(cuts, len(costs), len(used)) and used.sum() == nodes * gpus and set(used) <= set(widths) and finite(time)


def instantiated(found, sizes, times, nodes, pipelines, microbatches) -> bool:
    counts, split, time = found
    return (
        (counts * sizes).sum() == nodes
        and counts.sum() >= pipelines
        and shared(split, np.zeros(counts.sum()), microbatches)
        and finite(time)
    )


def shared(counts, times, microbatches, *_) -> bool:
    return within(counts, times.shape, 1, microbatches + 1) and counts.sum() == microbatches


def orchestrated(found, forward, layers, size, backbone, tp, gpus, *_) -> bool:
    time, degrees = found
    return finite(time) and within(degrees, (len(forward), 3), 1, gpus + 1) and degrees.prod(axis=1).sum() <= gpus


def counted(value, *_) -> bool:
    return 0 <= value < 2**64


def listed(lists, queries, keys, sinks, block, threads) -> bool:
    (batch, q_len), (_, k_len) = queries[0].shape, keys[0].shape
    q_blocks, k_blocks = -(-q_len // block), -(-k_len // block)
    sides = [(q_blocks, k_blocks)] * 2 + [(k_blocks, q_blocks)] * 2
    return all(
        within(ptr, (batch * rows + 1,), 0, len(idx) + 1) and ptr[-1] == len(idx) and within(idx, idx.shape, 0, others)
        for ptr, idx, (rows, others) in zip(lists[::2], lists[1::2], sides)
    )


def written(outputs: int) -> Check:
    """The last arrays were written to; finite inputs give finite outputs, except the lse of empty rows."""

    def valid(result, *arguments) -> bool:
        inputs = [x for x in flat(arguments[:-outputs]) if isinstance(x, float) or getattr(x, "dtype", x) == np.float32]
        tame = all(finite(x) and (np.abs(x) < 1e3).all() for x in inputs)
        return result is None and (not tame or not any(np.isnan(x).any() for x in arguments[-outputs:]))

    return valid


def flat(arguments):
    for argument in arguments:
        yield from argument if isinstance(argument, list) else [argument]


def configured(found, modules, gpus, *_) -> bool:
    time, dp, _, groups = found
    used = sum(tp * cp * pp for tp, cp, pp, *_ in groups)
    return not groups if time == np.inf else finite(time) and 1 <= len(groups) <= len(modules) and dp * used <= gpus


def simulation() -> tuple[np.ndarray, ...]:
    """A chunk of module 0 on the lane of ranks 0 and 1, read by one of module 1 on rank 2.

    There are two reductions, and a shard of the weights of module 1 that no rank gathers.
    """
    integers = lambda *values: np.array(values, np.int64)  # noqa: E731
    forward, send, reduce = [0, 0, 0, 0, -1, -1, 0], [4, 0, 0, 0, 1, 1, 0], [9, 0, 0, -1, 0, -1, 0]
    tied = [9, 0, 0, -1, 1, -1, 0]
    rows = [forward, send, reduce, tied] * 2 + [[5, 0, 0, 0, 1, 0, 0], [0, 1, 0, 1, -1, -1, 0], reduce]
    nodes = integers(0, 1), integers(0, 0), integers(0, 1), integers(0, 1)
    lanes, reductions = (integers(0, 2, 3), integers(0, 1, 2)), (integers(0, 3, 5), integers(0, 1, 2, 0, 1))
    seconds = np.linspace(0.5, 1.5, len(rows))
    first = integers(0, 4, 8, 11)
    return (
        np.array(rows, np.int32),
        first,
        integers(0, 1),
        *nodes,
        *lanes,
        *reductions,
        integers(0, 1),
        integers(1),
        integers(0, 1),
        integers(1),
        *[seconds] * 4,
    )


def searched(layers: int) -> list[np.ndarray]:
    """One module: (tp, cp), forward and backward for these, and six figures of every layer."""
    times = np.arange(1.0, 2 * layers + 1).reshape(2, layers)
    return [np.array([[1.0, 1], [2, 1]]), times, 2 * times, np.ones((6, layers))]


def calls() -> dict[str, Call]:
    w = np.array([3.0, 1.0, 4.0, 1.5, 5.0, 9.0])
    volume = np.array([[4.0, 1, 0, 2], [0, 3, 5, 1], [2, 2, 1, 0], [7, 0, 0, 1]])
    frozen = np.array([True, True, False, True, False, False])
    table = np.arange(1.0, 9.0).reshape(4, 2)
    integers = lambda *values: np.array(values, np.int64)  # noqa: E731
    dealt = {name: Call((w, 3, 2), assigned) for name in ("lpt", "even", "lpt_greedy", "contiguous", "zigzag", "ring")}
    batched = {
        name: Call((w, w * w, 3), lambda b, w, _, n: assigned(b, w, n)) for name in ("packed", "padded", "convolution")
    }
    memory = np.frombuffer(mmap.mmap(-1, _core.Exchange.size(2, 64)), np.uint8)
    return {
        **{f"assign_{name}": call for name, call in dealt.items()},
        **{f"post_balance_{name}": call for name, call in batched.items()},
        "assign_random": Call((w, 3, 2, 7), assigned),
        "assign_exact": Call((w, 3, 2, 1000, 60.0), exact),
        "assign_rows": Call((w, 2, 3, 1, True), in_rows),
        "lower_bound": Call((w, 3, 2), lambda bound, *_: finite(bound)),
        "nodewise_placement": Call((volume, 2), lambda order, volume, _: permutation(order, len(volume))),
        "nodewise_placement_of_items": Call(
            (integers(0, 1, 3, 1), integers(2, 0, 1, 1), w[:4], 4, 2),
            lambda order, source, batch, sizes, ranks, _: permutation(order, ranks),
        ),
        "nodewise_bound": Call((volume, 2, 50), lambda bound, *_: finite(bound)),
        "exchange_orders": Call((integers(0, 1, 2, 1), integers(2, 0, 1, 1), 3), exchanged),
        "subset_sum": Call((w, 7.0, 0.5), lambda items, w, *_: within(items, items.shape, 0, len(w))),
        "bottleneck_match": Call((table[:, :1] * [1.0, 2, 3], w[:4]), matched),
        "assign_replicas": Call((w, w, 2, True, False), replicated),
        "assign_microbatches": Call((w, w, 3, True, False), deferred),
        "deferral_costs": Call(([w[:3], w[3:]], w[:2]), lambda c, a, b: finite(c) and c.shape == (len(a), len(b))),
        "assign_ascending": Call((w, 3, 2), assigned),
        "reorder_microbatches": Call((table, table, 2, 0.1, 100), reordered),
        "pipeline_makespan": Call((table, table, 2, 0.1, integers(2, 0, 3, 1)), lambda seconds, *_: finite(seconds)),
        "simulate": Call(simulation(), simulated),
        **{name: Call(*call) for name, call in schedule_calls().items()},
        "partition": Call((w, 3), lambda cuts, w, stages: cut(cuts, len(w), stages)),
        "backward_needs": Call((frozen, False), lambda needs, frozen, _: all(x.shape == frozen.shape for x in needs)),
        "frozen_costs": Call((w, w, w, frozen, False, True), lambda c, w, *_: finite(c) and c.shape == w.shape),
        "pipeline_template": Call((table, integers(1, 2), 2, 2, 4), templated),
        "instantiate": Call((integers(2, 3), w[:2], 7, 2, 10), instantiated),
        "split_batch": Call((w, 20, True), shared),
        "limited_partition": Call((w, w, w[3:] + 6, w[:3]), limited),
        "orchestrate": Call(
            (table[:2], integers(2, 4), np.ones((2, 5)), 1, integers(1, 2), 16, 8, 1, 10.0, [0.1, 0.5], [0.0, 0.5]),
            orchestrated,
        ),
        "search_configuration": Call(
            ([searched(2), searched(3)], 4, 8, 1, 1e3, [0.0, 0.5], [0.1, 0.5], [0.0, 1.0], [1, 2], [False, True],
             [[-1, 2], [1, 1]], [[2, 2], []]), configured),
        "attention_isa": Call((), lambda name: name in ("amx", "avx512", "avx2", "baseline")),
        "Exchange": Call((memory, 1, 2, 64), lambda end, *_: end.moves == 0),
        "fingerprint": Call((w, 7), counted),
        **attention_calls(),
    }  # fmt: skip


def attention_calls() -> dict[str, Call]:
    """5 queries and keys of 3 documents (one is padding), 2 query heads per key head, blocks of 2, head dimension 3."""
    doc = np.array([[0, 0, 0, 1, -1]], np.int32)
    mask = BitfieldMask.causal(1, 5).bits.numpy()
    fields = [mask, doc, np.full_like(doc, -1), np.array([[0, 1, 2, 0, 0]], np.int32)]
    queries = [*fields, np.full_like(doc, 2)]
    lists = list(_core.attention_block_lists(queries, fields, 0, 2, 1))
    parts = [*queries, *fields, *lists[:4]]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, 5, 3)).astype(np.float32) for heads in (2, 1, 1))
    out, lse, dlse = np.zeros_like(q), np.zeros((1, 2, 5), np.float32), np.ones((1, 2, 5), np.float32)
    rest = (parts, 2, 0, 0.5, 3.0, 2)
    return {
        "attention_block_lists": Call((queries, fields, 0, 2, 2), listed),
        "attention_forward": Call((q, k, v, *rest, out, lse), written(2)),
        "attention_backward": Call(
            (q, dlse, q, k, v, out, lse, *rest, np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)), written(3)
        ),
    }


CALLS = calls()

# --- possible errors of an argument

WHOLE = [
    *(-(2**63), -(2**62), -(2**31), -2, -1, 0, 1, 2, 3, 5, 63, 64, 65, 1000, 2**15, 2**20, 2**24, 2**28, 2**30),
    *(2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 2**80, 2.5, None, "2", True),
]
REAL = [
    *(0.0, -0.0, 5e-324, 1e-320, 1e-308, 1e-155, 1e-9, 0.5, 1.0, 2.0, 1e9, 2.0**53, 2.0**62, 2.0**63, 1e30, 1e154),
    *(1e200, 1e300, 1e308, 1.7976931348623157e308, -1.0, -5e-324, -1e308, float("inf"), float("-inf"), float("nan")),
    *(None, "1", True, 10**400),
]
DTYPES = "f2 f4 f8 >f8 >f2 longdouble i1 i2 >i4 i4 i8 u1 u4 u8 ? c16 O S8 M8[s]".split()


def misaligned(array):
    """The same values in an array whose elements are not aligned to their size."""
    room = np.zeros(array.nbytes + 1, np.uint8)
    copy = room[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def every_other(array):
    return np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array


def read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def longest(array):
    """An array of terabytes that uses no memory."""
    return np.broadcast_to(array.reshape(-1)[:1], (2**41,)) if array.size else array


SHAPES = {
    "empty": lambda a: a[:0],
    "no columns": lambda a: a[..., :0],
    "no queries": lambda a: a[..., :0, :],
    "one": lambda a: a[:1],
    "short": lambda a: a[:-1],
    "narrow": lambda a: a[..., :-1],
    "long": lambda a: np.resize(a, (a.shape[0] + 1, *a.shape[1:])),
    "wide": lambda a: np.concatenate([a, a[..., :1]], axis=-1),
    "many": lambda a: np.resize(a, (a.shape[0] * 50, *a.shape[1:])),
    "0-d": lambda a: a.reshape(-1)[:1].reshape(()),
    "flat": lambda a: a.reshape(-1),
    "nested": lambda a: a[None],
    "column": lambda a: a[..., None],
    "transposed": lambda a: a.T,
    "huge": longest,
    "huge square": lambda a: np.broadcast_to(a.reshape(-1)[:1], (2**20, 2**20)),
    "huge and empty": lambda a: np.zeros((2**40, *a.shape[1:-1], 0), a.dtype),
    "reversed": lambda a: a[::-1],
    "backwards": lambda a: a[..., ::-1],
    "every other": every_other,
    "fortran": np.asfortranarray,
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "misaligned": misaligned,
    "read-only": read_only,
    "a list": lambda a: a.tolist(),
}


def filled(value, place):
    def changed(array):
        copy = array.copy()
        copy[place] = value  # OverflowError if the dtype cannot hold it
        return copy

    return changed


VALUES = {
    f"{value!r} {name}": filled(value, place)
    for value in [x for x in REAL + WHOLE if not isinstance(x, str | None)]
    for name, place in (("everywhere", ...), ("first", (0,)), ("last", (-1,)))
}
CASTS = {f"as {dtype}": lambda a, dtype=dtype: a.astype(dtype) for dtype in DTYPES}
ARRAYS = SHAPES | VALUES | CASTS


def variants(argument) -> list:
    """Names of mutations that apply to an argument."""
    if isinstance(argument, np.ndarray):
        return [*ARRAYS, "None"]
    if isinstance(argument, list):
        return [
            "no items",
            "one more",
            "one less",
            *((i, name) for i in range(len(argument)) for name in variants(argument[i])),
        ]
    return list(range(len(REAL if isinstance(argument, float) else WHOLE)))


def mutated(argument, variant):
    """Raises ValueError, TypeError or OverflowError if numpy itself refuses."""
    if isinstance(argument, np.ndarray):
        return None if variant == "None" else ARRAYS[variant](argument)
    if isinstance(argument, list):
        if isinstance(variant, tuple):
            i, inner = variant
            return [*argument[:i], mutated(argument[i], inner), *argument[i + 1 :]]
        return {"no items": [], "one more": argument + argument[:1], "one less": argument[:-1]}[variant]
    return (REAL if isinstance(argument, float) else WHOLE)[variant]


def copied(argument):
    if isinstance(argument, list):
        return [copied(item) for item in argument]
    return argument.copy() if isinstance(argument, np.ndarray) else argument


def attempt(name: str, changes: dict[int, Any]) -> None:
    """Calls a function with some arguments mutated: {position: variant}."""
    print(name, changes)  # the last one printed caused a crash or a hang
    arguments = [copied(argument) for argument in CALLS[name].arguments]
    try:
        with np.errstate(all="ignore"):
            for position, variant in changes.items():
                arguments[position] = mutated(arguments[position], variant)
        result = getattr(_core, name)(*arguments)
    except (ValueError, TypeError, OverflowError, IndexError, AttributeError) as error:
        assert str(error)
        return
    assert CALLS[name].valid(result, *arguments), (result, arguments)


@pytest.fixture(autouse=True)
def modest_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20, f"{grown} KiB for arrays of a few numbers"


def test_none_is_forgotten():
    functions = {name for name in dir(_core) if not name.startswith("__")}
    assert set(CALLS) == functions


@pytest.mark.parametrize("name", CALLS)
def test_the_call_that_is_mutated_is_answered(name):
    arguments = [copied(argument) for argument in CALLS[name].arguments]
    result = getattr(_core, name)(*arguments)
    assert CALLS[name].valid(result, *arguments), result


def single_changes(name: str) -> list[tuple[int, Any]]:
    return [(i, variant) for i, argument in enumerate(CALLS[name].arguments) for variant in variants(argument)]


@pytest.mark.parametrize("name", CALLS)
def test_one_hostile_argument(name):
    changes = single_changes(name)
    for change in random.Random(0).sample(changes, min(500, len(changes))):
        attempt(name, dict([change]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CALLS if len(single_changes(name)) > 500])
def test_each_hostile_argument(name):
    for change in single_changes(name):
        attempt(name, dict([change]))


@pytest.mark.parametrize("name", CALLS)
def test_all_arrays_alike(name):
    """Arrays that still match each other pass the first check."""
    places = [i for i, argument in enumerate(CALLS[name].arguments) if isinstance(argument, np.ndarray)]
    for variant in ARRAYS if places else []:
        attempt(name, dict.fromkeys(places, variant))


def several_hostile_arguments(data):
    names = [name for name, call in CALLS.items() if call.arguments]
    name = data.draw(st.sampled_from(names))
    arguments = CALLS[name].arguments
    places = data.draw(st.sets(st.integers(0, len(arguments) - 1), min_size=1, max_size=4))
    attempt(name, {place: data.draw(st.sampled_from(variants(arguments[place]))) for place in sorted(places)})


@given_by_tier(250, 1000, st.data())
def test_several_hostile_arguments(data):
    several_hostile_arguments(data)


@pytest.mark.slow
@settings(max_examples=6700)
@given(st.data())
def test_many_hostile_arguments(data):
    several_hostile_arguments(data)
