"""Messages between lanes: every row arrives once, at its place, for all sizes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.parallel.route import Routes, pairs, parts_of_regions, put, rows_per_receiver, take
from interlace.schedule import Chunk, Edge, StepTable

SIZES = st.integers(1, 9)


@given(st.integers(0, 200), SIZES, SIZES)
def test_every_row_arrives_once_and_in_order(rows: int, senders: int, receivers: int) -> None:
    result = parts_of_regions((rows,), senders, receivers, receives=True)
    assert [row for part in result for row in range(part.start, part.stop)] == list(range(rows))
    assert [part.receiver for part in result] == sorted(part.receiver for part in result)
    assert tuple((part.sender, part.receiver) for part in result) == pairs(senders, receivers)
    counts = rows_per_receiver(result, receivers)
    assert len(counts) == receivers and sum(counts) == rows
    for place, count in enumerate(counts):
        assert count == sum(part.stop - part.start for part in result if part.receiver == place)


@given(st.integers(0, 200), SIZES, SIZES)
def test_work_is_shared_out(rows: int, senders: int, receivers: int) -> None:
    """All places get a part, no two are assigned the same rows, and parts differ by at most one row."""
    result = parts_of_regions((rows,), senders, receivers, receives=True)
    assert len(result) == max(senders, receivers) == len(set(pairs(senders, receivers)))
    assert {part.sender for part in result} == set(range(senders))
    assert {part.receiver for part in result} == set(range(receivers))
    sizes = [part.stop - part.start for part in result]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 200), SIZES, SIZES)
def test_a_gradient_goes_back_the_way_its_rows_came(rows: int, senders: int, receivers: int) -> None:
    there = parts_of_regions((rows,), senders, receivers, receives=True)
    back = parts_of_regions((rows,), receivers, senders, receives=False)
    assert [(part.receiver, part.sender, part.start, part.stop) for part in back] == [tuple(part) for part in there]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 3), SIZES)
def test_regions_travel_to_the_ranks_that_have_them_and_back(regions: list[int], tp: int, others: int) -> None:
    lane, ends = tp * len(regions), np.cumsum(regions).tolist()
    result = parts_of_regions(tuple(regions), others, lane, receives=True)
    assert [row for part in result for row in range(part.start, part.stop)] == list(range(sum(regions)))
    assert tuple((part.sender, part.receiver) for part in result) == pairs(others, lane)
    counts = rows_per_receiver(result, lane)
    for region, end in enumerate(ends):
        assert sum(counts[region * tp : (region + 1) * tp]) == regions[region]
        for part in result:
            if part.start < part.stop and part.receiver // tp == region:
                assert end - regions[region] <= part.start and part.stop <= end
    back = parts_of_regions(tuple(regions), lane, others, receives=False)
    assert [(p.receiver, p.sender, p.start, p.stop) for p in back] == [tuple(part) for part in result]


@st.composite
def dealt(draw: st.DrawFn) -> tuple[StepTable, int, np.ndarray]:
    """A chunk that reads runs of rows of two others, in any order; ranks, and the owner of each of its placeholders."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    sources = [draw(st.integers(0, 1)) for _ in lengths]
    ends = np.cumsum(lengths)
    pieces, used = [], [0, 0]
    for source, length, end in zip(sources, lengths, ends.tolist(), strict=True):
        pieces.append((source, used[source], 2, end - length, length))
        used[source] += length
    members = np.zeros(1, np.int32)
    chunks = [Chunk("vision", 0, 0, members), Chunk("vision", 0, 1, members), Chunk("language_model", 0, 0, members)]
    edge = Edge("vision", "language_model", "embeds", np.array(draw(st.permutations(pieces)), np.int32))
    ranks = draw(st.integers(1, 4))
    owner = draw(st.lists(st.integers(0, ranks - 1), min_size=int(ends[-1]), max_size=int(ends[-1])))
    return StepTable(tuple(chunks), (edge,), np.zeros(3, np.int64)), ranks, np.array(owner, np.int64)


@given(dealt())
def test_ranks_read_the_rows_of_their_own_placeholders_in_order(given: tuple[StepTable, int, np.ndarray]) -> None:
    table, ranks, owner = given
    plain, routes = Routes(table), Routes(table, ranks=ranks, owners=lambda chunk, encoder: owner)
    rows = {source: 100.0 * source + torch.arange(40.0)[:, None] for source in routes.sources[2]}

    def read(of: Routes, rank: int) -> torch.Tensor:
        whole = torch.full((of.total("vision", 2, rank), 1), torch.nan)
        for source, made in rows.items():
            route = of.between(source, 2)
            put(whole, route.places[rank], take(made, route.rows).split(route.regions)[rank])
        return whole

    every = read(plain, 0)
    assert not every.isnan().any()
    for rank in range(ranks):
        assert torch.equal(read(routes, rank), every[torch.from_numpy(owner == rank)])
