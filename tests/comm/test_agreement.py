"""Arguments that differ between ranks: every rank reports the differing argument. Equal arguments work as usual."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace._core import fingerprint
from interlace.comm import (
    CommError,
    Transport,
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
    run_local,
)
from interlace.comm.process.agreement import Arguments, Fingerprint, fingerprint_of_mask, fingerprint_of_shards
from interlace.comm.transports.header import HEADER_BYTES, check_packed, differences, header_of, pack
from tests.comm import disagreements
from tests.comm.disagreements import DIFFERENT, OP, attention, connected
from tests.comm.jobs import TIMEOUT, data, reduced, same_bits
from tests.mask_strategies import masks
from tests.sampling import given_by_tier

WORLD = {"local": 3, "emulated local": 2, "shm": 3, "gloo": 2, "emulated shm": 2}


def named(number: int) -> str:
    operation, instead, _ = DIFFERENT[number]
    return f"{operation.__name__}, {instead}"


ALL = range(len(DIFFERENT))


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("local", ALL),
        ("emulated local", ALL),
        ("shm", ALL[::5]),
        ("gloo", ALL[2::5]),
        pytest.param("shm", ALL, marks=pytest.mark.slow),
        pytest.param("gloo", ALL, marks=pytest.mark.slow),
        pytest.param("emulated shm", ALL, marks=pytest.mark.slow),
    ],
)
def test_what_differs_is_named_on_every_rank(pool: Any, kind: str, numbers: range) -> None:
    start = time.monotonic()
    if "local" in kind:
        cases = []
        for number in numbers:
            told = run_local(WORLD[kind], lambda g, n=number: disagreements.told(connected(kind, g, TIMEOUT), n))
            cases.append(told)
    else:
        ranks = pool.returned(WORLD[kind], disagreements.all_told, kind, numbers, TIMEOUT, timeout=300)
        cases = list(zip(*ranks, strict=True))
    for number, told in zip(numbers, cases, strict=True):
        assert all(told), (named(number), told)
        result = [re.search(DIFFERENT[number][2], text) is not None for text in told]
        # Over gloo a closing connection may lose data already sent: then one rank reports the difference.
        assert any(result) if kind == "gloo" else all(result), (named(number), told)
    assert time.monotonic() - start < TIMEOUT * len(numbers) / 4  # reported, not by timeout


@pytest.mark.parametrize("kind", WORLD)
def test_what_is_each_ranks_own_may_differ(pool: Any, kind: str) -> None:
    if "local" in kind:
        result = run_local(WORLD[kind], lambda g: disagreements.works(connected(kind, g, TIMEOUT)))
    else:
        result = pool.returned(WORLD[kind], disagreements.all_work, kind, TIMEOUT)
    assert result == [len(disagreements.OWN) + len(DIFFERENT)] * WORLD[kind]


# ---------------------------------------------------------------------- any two sets of arguments

SHAPES = st.sampled_from([(4,), (2, 2), (4, 1), (2,), (0,), (4, 0)])
FLOATS = st.sampled_from([torch.float32, torch.int32, torch.float64])
OPS = {"sum": OP.SUM, "mean": OP.AVG, "max": OP.MAX, "min": OP.MIN}
COLLECTIVES = st.one_of(
    st.tuples(st.just("gather"), SHAPES, FLOATS),
    st.tuples(st.just("reduce"), SHAPES, FLOATS, st.sampled_from(sorted(OPS))),
    st.tuples(st.just("scatter"), SHAPES, FLOATS, st.sampled_from(sorted(OPS))),
    st.tuples(st.just("exchange"), SHAPES, FLOATS),
).filter(lambda call: call[2:] != (torch.int32, "mean"))  # refused before communication: test_collectives.py


def ran(group: Transport, call: tuple[Any, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None, str]:
    """(result, expected result by hand if all ranks made this call, the error)."""
    name, shape, dtype, *op = call
    inputs = [data(rank, (group.world, *shape), dtype, seed=3) for rank in range(group.world)]
    mine = inputs[group.rank].clone()
    try:
        if name == "gather":
            result, wanted = torch.empty(group.world, *mine.shape, dtype=dtype), torch.stack(inputs)
            all_gather_into_tensor(result, mine, group)
        elif name == "reduce":
            result, wanted = mine, reduced(inputs, op[0])
            all_reduce(result, OPS[op[0]], group)
        elif name == "scatter":
            result, wanted = torch.empty_like(mine[0]), reduced(inputs, op[0])[group.rank]
            reduce_scatter_tensor(result, mine, OPS[op[0]], group)
        else:
            result, wanted = torch.empty_like(mine), torch.stack([x[group.rank] for x in inputs])
            all_to_all_single(result, mine, group=group)
        group.barrier()
    except CommError as error:
        return None, None, str(error)
    return result, wanted, ""


@given_by_tier(40, 150, COLLECTIVES, COLLECTIVES, st.booleans())
def test_calls_are_correct_if_equal_else_refused_on_both_ranks(first: Any, second: Any, same: bool) -> None:
    calls = (first, first if same else second)
    results = run_local(2, lambda group: ran(group, calls[group.rank]), timeout=TIMEOUT)
    for rank, (result, wanted, error) in enumerate(results):
        if calls[0] == calls[1]:
            assert not error and same_bits(result, wanted), (calls, error)
        else:
            assert re.match(rf"rank {rank}\b", error) and "no answer" not in error, (calls, error)


ATTENTION = st.fixed_dictionaries(
    {
        "mask": st.sampled_from(sorted(disagreements.masks())),
        "method": st.sampled_from(["lpt", "zigzag"]),
        "scale": st.sampled_from([None, 0.5, 8**-0.5]),
        "softcap": st.sampled_from([None, 2.0]),
        "deterministic": st.booleans(),
        "chunk": st.sampled_from([1, 2, 5]),
        "grad": st.booleans(),
        "prepared": st.booleans(),
    }
)


def meaning(call: dict[str, Any]) -> Any:
    """Arguments that must agree; equivalent ways to write them give the same value."""
    said = {**call, "mask": call["mask"].replace("written otherwise", "causal"), "chunk": min(call["chunk"], 2)}
    return {**said, "scale": call["scale"] or 8**-0.5, "prepared": None}


@settings(max_examples=40)
@given(ATTENTION, ATTENTION, st.sets(st.sampled_from(sorted(["mask", "method", "scale", "softcap", "chunk", "grad"]))))
def test_attention_calls_that_differ_are_refused_on_both_ranks(
    first: dict[str, Any], second: dict[str, Any], kept: set[str]
) -> None:
    calls = (first, {**second, **{name: first[name] for name in kept}})

    def rank(group: Transport) -> str:
        try:
            attention(group, **calls[group.rank])
            group.barrier()
        except CommError as error:
            return str(error)
        return ""

    told = run_local(2, rank, timeout=TIMEOUT)
    alike = meaning(calls[0]) == meaning(calls[1])
    for error in told:
        assert (error == "") == alike and "no answer" not in error, (calls, told)


# ---------------------------------------------------------------------- headers


def test_a_header_shows_every_argument_that_differs() -> None:
    mine = Arguments(op="sum", shape=[4, 6], scale=0.5)
    other = Arguments(op="max", shape=[4, 6], softcap=None)
    assert differences(mine.text, other.text, "here", "there") == [
        "op is sum here but max there",
        "scale is 0.5 here but not given there",
        "softcap is not given here but None there",
    ]
    expected, result = (header_of(3, "an operation", each, [torch.empty(2)]) for each in (mine, other))
    with pytest.raises(CommError, match="rank 0, an operation: op is sum here but max on rank 1; scale is"):
        check_packed(0, 1, expected, pack(result))


def test_arguments_too_long_to_show_are_compared_whole() -> None:
    long = {f"name{n}": n for n in range(200)}
    for changed, says in [
        ({**long, "name199": 0}, "an operation: arguments of rank 1 differ after the part that fits in a header"),
        ({**long, "name3": 0}, "an operation: name3 is 3 here but 0 on rank 1: every"),
    ]:
        expected, result = (header_of(3, "an operation", Arguments(**each), []) for each in (long, changed))
        with pytest.raises(CommError, match=says):
            check_packed(0, 1, expected, pack(result))
        check_packed(0, 1, result, pack(result))


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_header_is_an_error_of_the_transport(draw: Any) -> None:
    """Any bytes give an error that names the peer, and no other effect."""
    expected = header_of(3, "an operation", Arguments(op="sum"), [torch.empty(2)])
    raw = bytearray(pack(expected))
    if draw.draw(st.booleans()):
        raw = bytearray(draw.draw(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES)))
    else:
        for _ in range(draw.draw(st.integers(1, 5))):
            raw[draw.draw(st.integers(0, 80))] ^= draw.draw(st.integers(1, 255))
    if raw == pack(expected):
        return
    with pytest.raises(CommError, match=r"rank 0\b.*rank 1\b"):
        check_packed(0, 1, expected, bytes(raw))


# ---------------------------------------------------------------------- fingerprints


def test_a_fingerprint_depends_on_every_bit_and_place() -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 63, 64, 65, 200):
        whole = rng.integers(0, 256, size, dtype=np.uint8)
        seen = {fingerprint(whole), fingerprint(whole, 1), fingerprint(np.append(whole, np.uint8(0)))}
        for place in range(size):
            for bit in range(8):
                changed = whole.copy()
                changed[place] ^= 1 << bit
                seen.add(fingerprint(changed))
        for place in range(size - 1):
            if whole[place] != whole[place + 1]:
                seen.add(fingerprint(np.concatenate([whole[:place], whole[[place + 1, place]], whole[place + 2 :]])))
        swaps = sum(int(whole[place] != whole[place + 1]) for place in range(size - 1))
        assert len(seen) == 3 + 8 * size + swaps
    assert fingerprint(np.zeros((3, 5))) == fingerprint(np.zeros(15))
    with pytest.raises(ValueError, match="contiguous"):
        fingerprint(np.zeros((4, 4))[:, ::2])


def test_sparse_numbers_do_not_collide() -> None:
    """Mostly equal words, as in masks: one or two bits changed, also high ones."""
    seen, tried = set(), 0
    words = np.zeros(64, np.int64)
    places = [(place, bit) for place in range(0, 64, 7) for bit in (0, 1, 31, 32, 55, 56, 62, 63)]
    for n, (place, bit) in enumerate(places):
        for other, its_bit in places[n:]:
            changed = words.view(np.uint64).copy()
            changed[place] ^= np.uint64(1 << bit)
            changed[other] ^= np.uint64(1 << its_bit)
            seen.add(fingerprint(changed))
            tried += (place, bit) != (other, its_bit)
    assert len(seen) == tried + 1


@settings(max_examples=30)
@given(masks(longest=40), masks(longest=40))
def test_masks_have_one_fingerprint_where_they_say_the_same(one: Any, other: Any) -> None:
    same = one.bits.shape == other.bits.shape and one.sinks == other.sinks
    same = same and all(torch.equal(a, b) for a, b in zip(one.tokens(), other.tokens()))
    assert (str(fingerprint_of_mask(one)) == str(fingerprint_of_mask(other))) == same
    again = one.select(torch.arange(one.length).expand(one.batch, -1))
    assert str(fingerprint_of_mask(one)) == str(fingerprint_of_mask(again))


def test_shards_keep_their_fingerprint() -> None:
    _, make = disagreements.sequence()
    shards = make(2)
    assert fingerprint_of_shards(shards) is fingerprint_of_shards(shards)
    assert fingerprint_of_shards(shards) == fingerprint_of_shards(make(2)) != fingerprint_of_shards(make(4))
    assert str(Fingerprint("a", [])) != str(Fingerprint("b", []))
