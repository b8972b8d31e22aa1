"""Tables of steps from lengths alone, against row-by-row definitions; routes of rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.parallel.route import Routes, put, take
from interlace.run.tables.table import Lengths, nominal_table, step_table
from interlace.schedule.table import Chunk, Edge, StepTable, merged
from tests.tiny import random_microbatches, tiny_mllm

LLM = "language_model"


def layout(dp: dict[str, int], *, placement: str = "parallel") -> Layout:
    """Every replica on its own rank."""
    modules: dict[str, Any] = {}
    rank = itertools.count()
    for name, count in dp.items():
        pipelines = [Pipeline(name, r, (Stage(name, 0, 0, 1, Lane((next(rank),))),)) for r in range(count)]
        modules[name] = (ParallelSpec(dp=count), tuple(pipelines))
    return Layout(modules, next(rank), placement)


def row_of(index: slice | torch.Tensor) -> list[int]:
    return list(range(index.start, index.stop)) if isinstance(index, slice) else index.tolist()


@st.composite
def steps(draw: st.DrawFn) -> tuple[Layout, Lengths, dict[str, Any]]:
    counts = st.integers(1, 4)
    encoders = draw(st.sampled_from([("vision",), ("vision", "audio"), ()]))
    where = layout(
        {name: draw(counts) for name in (*encoders, LLM)}, placement=draw(st.sampled_from(["parallel", "shared"]))
    )
    n = draw(st.integers(1, 12))
    numbers = lambda low, high: np.array(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)), np.int64)  # noqa: E731
    lengths = Lengths(numbers(1, 9), numbers(0, 3), {name: numbers(0, 3) for name in encoders})
    options: dict[str, Any] = {"chunks": {name: draw(st.integers(1, 6)) for name in encoders if draw(st.booleans())}}
    if draw(st.booleans()):
        options["microbatches"] = draw(st.integers(1, 5))
    elif draw(st.booleans()):
        order = draw(st.permutations(range(n)))
        cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=4))) if n > 1 else []
        options["groups"] = [order[a:b] for a, b in itertools.pairwise([0, *cuts, n])]
    return where, lengths, options


@given(steps())
def test_every_sample_and_row_is_routed_once_to_its_reader(step: Any) -> None:
    where, lengths, options = step
    table = step_table(where, lengths, **options)
    encoders = [name for name in where.modules if name != LLM]
    for module in where.modules:
        mine = [chunk for chunk in table.chunks if chunk.module == module]
        result = sorted(int(i) for chunk in mine for i in chunk.samples)
        wanted = range(len(lengths)) if module == LLM else np.flatnonzero(lengths.rows[module]).tolist()
        assert result == list(wanted)
        assert all(chunk.replica < where.spec(module).dp and len(chunk.samples) for chunk in mine)
        most = options.get("chunks", {}).get(module)
        if most is not None:
            assert max((chunk.index for chunk in mine), default=-1) < most
    if "groups" in options:
        chosen = [list(c.samples) for c in sorted(table.chunks, key=lambda c: (c.index, c.replica)) if c.module == LLM]
        assert [sorted(group) for group in chosen] == [sorted(group) for group in options["groups"]]
    assert table.targets is not None and table.targets.sum() == lengths.targets.sum()

    routes = Routes(table)
    for i, chunk in enumerate(table.chunks):
        if chunk.module != LLM:
            continue
        assert table.targets[i] == lengths.targets[chunk.samples].sum()
        for name in encoders:
            rows = [(s, k) for s in chunk.samples for k in range(lengths.rows[name][s])]
            got: list[Any] = [None] * len(rows)
            for source in routes.sources.get(i, []):
                if table.chunks[source].module != name:
                    continue
                assert i in routes.readers[source]
                made = [(s, k) for s in table.chunks[source].samples for k in range(lengths.rows[name][s])]
                route = routes.between(source, i)
                [places] = route.places
                assert len(row_of(route.rows)) == len(row_of(places)) == route.length
                for a, b in zip(row_of(route.rows), row_of(places), strict=True):
                    got[b] = made[a]
            assert got == rows
            assert routes.total(name, i) == len(rows)


@given(steps())
def test_tables_are_alike_where_their_steps_are(step: Any) -> None:
    where, lengths, options = step
    assert step_table(where, lengths, **options).digest == step_table(where, lengths, **options).digest
    other = Lengths(lengths.tokens, lengths.targets + 1, lengths.rows)
    assert step_table(where, lengths, **options).digest != step_table(where, other, **options).digest
    moved = step_table(where, lengths, **options, place=(0, 1, 1))
    assert moved.digest != step_table(where, lengths, **options).digest


def test_encoder_chunks_may_be_fewer_or_more_than_llm_chunks() -> None:
    lengths = Lengths(np.full(8, 5), np.full(8, 1), {"vision": np.full(8, 2)})

    def read(chunks: int, placement: str = "parallel") -> list[list[int]]:
        table = step_table(
            layout({"vision": 1, LLM: 1}, placement=placement), lengths, microbatches=4,
            chunks={"vision": chunks} if chunks else None,
        )  # fmt: skip
        return [len(Routes(table).readers[i]) for i in table.of("vision", 0)]  # type: ignore[misc]

    assert read(4) == [1, 1, 1, 1]
    assert read(2) == [2, 2]
    assert read(8) == [1] * 8
    assert read(0, "shared") == [4]  # one large encoder phase


def test_replicas_of_one_number_keep_their_samples() -> None:
    lengths = Lengths(np.arange(1, 9), np.ones(8, np.int64), {"vision": np.ones(8, np.int64)})
    table = step_table(layout({"vision": 2, LLM: 2}), lengths, microbatches=2)
    for source, reader in table.links.tolist():
        assert table.chunks[source].replica == table.chunks[reader].replica
    table = step_table(layout({"vision": 3, LLM: 2}), lengths, microbatches=2)
    assert {chunk.replica for chunk in table.chunks if chunk.module == "vision"} == {0, 1, 2}


def test_what_is_no_step_is_refused() -> None:
    where = layout({"vision": 1, LLM: 1})
    none = Lengths(np.zeros(0, np.int64), np.zeros(0, np.int64), {"vision": np.zeros(0, np.int64)})
    one = Lengths(np.ones(1, np.int64), np.ones(1, np.int64), {"vision": np.ones(1, np.int64)})
    with pytest.raises(ValueError, match="at least one sample"):
        step_table(where, none)
    with pytest.raises(ValueError, match="microbatches is 0"):
        step_table(where, one, microbatches=0)
    with pytest.raises(ValueError, match=r"chunks\['vision'\] is 0"):
        step_table(where, one, chunks={"vision": 0})
    with pytest.raises(ValueError, match="chunks names 'audio': the encoders are vision"):
        step_table(where, one, chunks={"audio": 1})


def test_lengths_are_read_without_media() -> None:
    mllm = tiny_mllm()
    samples = [sample for group in random_microbatches(mllm, "all") for sample in group]
    lengths = Lengths.of(samples, list(mllm.encoders))
    for i, sample in enumerate(samples):
        assert lengths.tokens[i] == len(sample.input_ids)
        assert lengths.targets[i] == int((sample.labels != -100).sum())
        for name in mllm.encoders:
            assert lengths.rows[name][i] == sum(item.tokens for item in sample.media.get(name, []))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)), max_size=14), st.randoms())
def test_adjacent_pieces_are_merged_and_links_are_their_pairs(drawn: Any, random: Any) -> None:
    """(source chunk, destination chunk, rows), consecutive on both sides; checked row by row."""
    at: dict[tuple[str, int], int] = {}
    pieces = []
    for source, destination, count in drawn:
        here, there = at.get(("from", source), 0), at.get(("to", destination), 0)
        skip = random.randint(0, 1)  # rows read by another chunk
        pieces.append((source, here + skip, 4 + destination, there, count))
        at["from", source], at["to", destination] = here + skip + count, there + count
    given = pieces.copy()
    random.shuffle(given)
    result = merged(np.array(given, np.int32).reshape(-1, 5))

    def rows(each: Any) -> list[tuple[int, int, int, int]]:
        return [(d, dr + k, s, sr + k) for s, sr, d, dr, count in each for k in range(count)]

    told = [tuple(piece) for piece in result.tolist()]
    assert rows(told) == sorted(rows(pieces))
    for a, b in itertools.pairwise(told):  # no two could be merged
        assert (a[0], a[1] + a[4], a[2], a[3] + a[4]) != b[:4]
    chunks = [Chunk(name, i, 0, np.array([i], np.int32)) for name in ("vision", LLM) for i in range(4)]
    table = StepTable(tuple(chunks), (Edge("vision", LLM, "embeds", result),))
    assert table.links.tolist() == [list(pair) for pair in sorted({(s, d) for s, _, d, _, _ in pieces})]


def test_a_nominal_table_of_many_replicas_stays_small() -> None:
    """792 and 1,546 replicas have some 20 million common samples; links between chunks would be as many."""
    table = nominal_table(layout({"vision": 792, LLM: 1546}), 32)
    for module, dp in (("vision", 792), (LLM, 1546)):
        sizes = np.array([len(chunk.samples) for chunk in table.chunks if chunk.module == module])
        assert len(sizes) == 32 * dp and sizes.min() >= 16 and sizes.max() - sizes.min() <= sizes.max() / 16
    assert len(table.links) <= 16 * 1546 * 32


def test_a_nominal_table_gives_every_chunk_as_much() -> None:
    table = nominal_table(layout({"vision": 3, "audio": 1, LLM: 2}), 4)
    for module, count in (("vision", 12), ("audio", 4), (LLM, 8)):
        sizes = [len(chunk.samples) for chunk in table.chunks if chunk.module == module]
        assert len(sizes) == count and len(set(sizes)) == 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), st.booleans())
def test_rows_are_taken_and_put(places: list[int], add: bool) -> None:
    rows = torch.arange(12.0).view(6, 2)
    index = torch.tensor(places)
    assert torch.equal(take(rows, index), rows[places])
    into = torch.ones(6, 2)
    put(into, index, rows[: len(places)], add=add)
    expected = torch.ones(6, 2)
    for i, place in enumerate(places):
        expected[place] = rows[i] + add
    assert torch.equal(into, expected)
