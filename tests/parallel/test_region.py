"""Regions: pieces and extracted parts return to their places, in any number of parts and ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.parallel import ColumnParallelLinear, Ranks, RowParallelLinear
from interlace.parallel.linear import ParallelLinear
from interlace.parallel.region import Region


def cut(column: bool, parts: int, world: int, size: int, other: int, rank: int) -> ParallelLinear:
    if column:
        ranks = Ranks.at(rank, world)
        return ColumnParallelLinear(other, parts * world * size, group=ranks, parts=parts, device="meta")
    return RowParallelLinear(world * size, other, group=Ranks.at(rank, world), device="meta")


@settings(max_examples=60)
@given(
    column=st.booleans(), parts=st.integers(1, 3), world=st.integers(1, 4), size=st.integers(1, 3),
    other=st.integers(1, 4), bias=st.booleans(), data=st.data(),
)  # fmt: skip
def test_shards_and_rows_of_all_ranks_make_up_the_whole(
    column: bool, parts: int, world: int, size: int, other: int, bias: bool, data: st.DataObject
) -> None:
    layers = [cut(column, parts, world, size, other, rank) for rank in range(world)]
    key = "bias" if bias else "weight"
    layer = layers[0]
    shape = (layer.out_features,) if bias else (layer.out_features, layer.in_features)
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    written = torch.zeros(torch.Size(shape))
    times = torch.zeros(torch.Size(shape))
    for rank, layer in enumerate(layers):
        region = layer.region(key)
        dim = layer.cut.get(key)
        expected = whole
        if dim is not None:  # by hand: this rank's share of each of the layers in one
            expected = torch.cat([part.chunk(world, dim)[rank] for part in whole.chunk(layer.parts, dim)], dim)
        piece = region.piece(whole)
        assert torch.equal(piece, expected) and region.sizes == tuple(expected.shape) and region.shape == shape
        region.put(written, piece)
        if dim is None and rank:
            continue  # whole on every rank
        cuts = sorted({0, len(piece), *data.draw(st.lists(st.integers(0, len(piece)), max_size=3))})
        for start, stop in itertools.pairwise(cuts):
            rows = region.rows(start, stop)
            assert torch.equal(rows.piece(whole), piece[start:stop]) and rows.sizes == tuple(piece[start:stop].shape)
            for box, part in zip(rows.boxes, rows.parts(piece[start:stop]), strict=True):
                assert torch.equal(box.of(whole), part)
                box.of(times).add_(1)
    assert torch.equal(written, whole) and bool((times == 1).all())


def test_what_does_not_fit_is_refused() -> None:
    region = cut(True, 2, 2, 3, 4, 1).region("weight")
    with pytest.raises(ValueError, match=r"piece has shape \[5, 4\], expected \[6, 4\] of \[12, 4\]"):
        region.put(torch.zeros(12, 4), torch.zeros(5, 4))
    for start, stop in ((-1, 2), (3, 3), (2, 7)):
        with pytest.raises(ValueError, match=rf"rows \[{start}, {stop}\) are empty or outside \[0, 6\)"):
            region.rows(start, stop)
    scalar = Region.full(())
    assert scalar.sizes == () and scalar.piece(torch.tensor(3.0)) == 3
