"""Step tables: refused inputs, links, joined pieces, and the digest."""

import random
from dataclasses import replace

import numpy as np
import pytest

from interlace.schedule import Chunk, Edge, StepTable
from interlace.schedule.table import merged
from tests.schedule.graphs import random_case


def chunk(module: str, index: int, replica: int = 0) -> Chunk:
    return Chunk(module, replica, index, np.array([index], np.int32))


CHUNKS = (chunk("a", 0), chunk("b", 0), chunk("a", 1))


def edge(*pieces: tuple[int, ...]) -> Edge:
    return Edge("a", "b", "embeds", np.array(pieces, np.int32).reshape(-1, 5))


@pytest.mark.parametrize(
    ("chunks", "edges", "says"),
    [
        ((), (), "at least one chunk"),
        ((chunk("a", 1),), (), "got a, replica 0, chunk 1, expected chunk 0 of its replica"),
        (CHUNKS, (replace(edge(), pieces=np.zeros((1, 5))),), r"pieces must be int32 \[n, 5\], got float64 \[1, 5\]"),
        (CHUNKS, (edge((0, 0, 3, 0, 1)),), "a piece from a to b has a chunk or rows out of range"),
        (CHUNKS, (edge((0, 0, 1, 0, 0)),), "a piece from a to b has a chunk or rows out of range"),
        (CHUNKS, (edge((1, 0, 1, 0, 1)),), "a piece from a to b has b, replica 0, chunk 0, of another module"),
        (CHUNKS, (edge((0, 0, 2, 0, 1)),), "a piece from a to b has a, replica 0, chunk 1, of another module"),
    ],
)
def test_bad_tables_are_refused(chunks: tuple[Chunk, ...], edges: tuple[Edge, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StepTable(chunks, edges)


def test_bad_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"targets has shape \(2,\), expected \(3,\)"):
        StepTable(CHUNKS, targets=np.zeros(2, np.int64))


def test_links_are_the_pairs_of_all_edges_sorted() -> None:
    assert StepTable(CHUNKS).links.shape == (0, 2)
    for seed in range(50):
        table = random_case(seed).table
        pairs = {(int(p[0]), int(p[2])) for e in table.edges for p in e.pieces}
        assert table.links.dtype == np.int32
        assert [tuple(pair) for pair in table.links.tolist()] == sorted(pairs)
        for module, replica in {(c.module, c.replica) for c in table.chunks}:
            assert [table.chunks[i].index for i in table.of(module, replica)] == list(
                range(len(table.of(module, replica)))
            )
    twice = StepTable(CHUNKS, (edge((2, 0, 1, 0, 1), (0, 0, 1, 1, 1), (2, 4, 1, 2, 1)),))
    assert twice.links.tolist() == [[0, 1], [2, 1]]


def test_aligned_chunks_read_each_other() -> None:
    table = StepTable.aligned([("a", "b")], [{"b"}, {"a", "b"}], replicas=2)
    assert [str(c) for c in table.chunks[:3]] == [
        f"{m}, replica 0, chunk {i}" for m, i in [("b", 0), ("a", 0), ("b", 1)]
    ]
    assert table.links.tolist() == [[1, 2], [4, 5]]
    assert {chunk.module for chunk in table.chunks} == {"a", "b"}


def test_pieces_that_follow_each_other_are_joined() -> None:
    rng = random.Random(0)
    for _ in range(50):
        cells = [(rng.randrange(2), rng.randrange(6), destination, row) for destination in range(2) for row in range(6)]
        pieces = np.array([(s, a, d, b, 1) for s, a, d, b in rng.sample(cells, len(cells))], np.int32)
        result = merged(pieces)
        rows = [(s, a + i, d, b + i) for s, a, d, b, n in result.tolist() for i in range(n)]
        assert sorted(rows) == sorted(cells)
        for before, after in zip(result[:-1].tolist(), result[1:].tolist(), strict=True):
            assert (before[2], before[3]) < (after[2], after[3])
            follows = [x + before[4] for x in (before[1], before[3])] == [after[1], after[3]]
            assert not (follows and before[0] == after[0] and before[2] == after[2])


def test_the_digest_tells_tables_apart() -> None:
    tables = [
        StepTable(CHUNKS),
        StepTable(CHUNKS, place=(0, 1, 0)),
        StepTable(CHUNKS, targets=np.arange(3)),
        StepTable(CHUNKS, (edge((0, 0, 1, 0, 1)),)),
        StepTable(CHUNKS, (edge((0, 0, 1, 0, 2)),)),
        StepTable((*CHUNKS[:2], replace(CHUNKS[2], samples=np.array([7], np.int32)))),
    ]
    assert len({table.digest for table in tables}) == len(tables)
    assert all(table.digest == replace(table).digest and 0 <= table.digest < 2**48 for table in tables)
