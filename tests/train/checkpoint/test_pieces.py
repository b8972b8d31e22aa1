"""Pieces in checkpoints: any cut is read from any other, only the held part, and mismatches are refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from interlace.parallel.region import Box, Region
from interlace.train.checkpoint import checkpoints as ck
from interlace.train.checkpoint import storage
from interlace.train.checkpoint.identity import identity_of
from interlace.train.checkpoint.pieces import Piece
from interlace.train.checkpoint.storage import CheckpointError, Stored, StoredChunk
from tests.distributed.workers import run_ranks

SIZES = (12, 6)


def model() -> nn.ParameterDict:
    torch.manual_seed(0)
    return nn.ParameterDict({"weight": torch.randn(SIZES), "bias": torch.randn(SIZES[0])})


def region(shape: tuple[int, ...], dim: int, parts: int, world: int, rank: int) -> Region:
    """This rank's share of each of `parts` equal parts along `dim`."""
    size = shape[dim] // (parts * world)
    boxes = []
    for part in range(parts):
        first = (part * world + rank) * size
        offsets = tuple(first if i == dim else 0 for i in range(len(shape)))
        boxes.append(Box(offsets, tuple(size if i == dim else length for i, length in enumerate(shape))))
    return Region(shape, tuple(boxes), dim)


def cuts() -> list[tuple[int, int, int]]:
    """(dimension, parts, ranks) that divide `SIZES`."""
    ways = itertools.product((0, 1), (1, 2, 3), (1, 2, 3, 4))
    return [(dim, parts, world) for dim, parts, world in ways if SIZES[dim] % (parts * world) == 0]


def pieces(cut: tuple[int, int, int], rank: int, rows: int | None = None) -> Iterator[tuple[str, Region]]:
    """Pieces of a rank of a cut. rows: this rank's number of rows; another rank has the others."""
    dim, parts, world = cut
    for name, shape in (("weight", SIZES), ("bias", SIZES[:1])):
        if dim < len(shape):
            held = region(shape, dim, parts, world, rank)
            yield name, held if rows is None else held.rows(0, min(rows, held.sizes[0]))


def store(folder: Path) -> ck.Checkpoints:
    return ck.Checkpoints(folder, keep=9, identity=identity_of(model(), {}))


def load_pieces(folder: Path, path: Path) -> None:
    """Any piece, of any cut, equals the same part of the whole."""
    whole = dict(model().named_parameters())
    for cut in cuts():
        for rank in range(cut[2]):
            for rows in (None, 1, 2):
                held = dict(pieces(cut, rank, rows))
                empty = {name: Piece(torch.full(each.sizes, -1.0), each) for name, each in held.items()}
                moments = {f"exp_avg.{n}": Piece(torch.full(p.region.sizes, -1.0), p.region) for n, p in empty.items()}
                store(folder).load(path, empty, moments)
                for name, each in held.items():
                    assert torch.equal(empty[name].tensor, each.piece(whole[name])), (cut, rank, rows, name)
                    assert torch.equal(moments[f"exp_avg.{name}"].tensor, 2 * each.piece(whole[name]))


def save_cuts(rank: int, folder: str) -> int:
    """Saves under every cut of 2 ranks, and loads everything under every other cut."""
    with torch.no_grad():
        whole = dict(model().named_parameters())
        number = 0
        for number, cut in enumerate((cut for cut in cuts() if cut[2] == 2), 1):
            regions = dict(pieces(cut, rank))
            state = {n: Piece(regions[n].piece(t), regions[n]) if n in regions else t for n, t in whole.items()}
            moments = {
                f"exp_avg.{n}": Piece(2 * p.tensor, p.region) if isinstance(p, Piece) else 2 * p
                for n, p in state.items()
            }
            path = store(Path(folder)).save(number, state, moments, {"number": number})
            chunks = ck.read_manifest(path).tensors["model.weight"].chunks
            assert len(chunks) == 2 * cut[1]  # each box once
            if rank == 0:
                held = model()
                for parameter in held.parameters():
                    parameter.zero_()
                assert ck.load_parameters(path, held, identity_of(held, {})) == number
                assert all(torch.equal(p, whole[n]) for n, p in held.named_parameters())
            some = random.Random(number).sample(cuts(), 2)
            for other in some:
                for place in range(other[2]):
                    for name, each in pieces(other, place):
                        taken = Piece(torch.full(each.sizes, -1.0), each)
                        store(Path(folder)).load(path, {name: taken}, {})
                        assert torch.equal(taken.tensor, each.piece(whole[name])), (cut, other, place, name)
    return number


def test_every_cut_is_saved_once_and_read_under_any_other(tmp_path: Path) -> None:
    for kind, value in run_ranks(2, save_cuts, str(tmp_path)):
        assert (kind, value) == ("returned", sum(cut[2] == 2 for cut in cuts())), value


def test_pieces_are_read_from_whole_tensors_and_only_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dict(model().named_parameters())
    path = store(tmp_path).save(1, whole, {f"exp_avg.{n}": 2 * p for n, p in whole.items()}, {})
    load_pieces(tmp_path, path)
    read: list[int] = []
    real = storage.torch.frombuffer
    monkeypatch.setattr(storage.torch, "frombuffer", lambda b, **k: (read.append(len(b)), real(b, **k))[1])
    held = region(SIZES, 0, 1, 4, 2)
    store(tmp_path).load(path, {"weight": Piece(torch.zeros(3, 6), held)}, {})
    assert 3 * 6 * 4 in read and 12 * 6 * 4 not in read


def overlap(rank: int, folder: str) -> str:
    """Two ranks that both claim the first half, with different cuts."""
    held = Region(SIZES, (Box((0, 0), (6, 6) if rank else (12, 3)),))
    whole = dict(model().named_parameters())
    state = {"weight": Piece(held.piece(whole["weight"]).detach(), held), "bias": whole["bias"]}
    try:
        store(Path(folder)).save(1, state, {}, {})
    except Exception as error:
        return str(error)
    return "nothing"


def test_pieces_that_do_not_make_up_the_whole_are_refused(tmp_path: Path) -> None:
    for kind, words in run_ranks(2, overlap, str(tmp_path)):
        assert kind == "returned" and "step-00000001" in words and "model.weight" in words, words
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("step-")]
    path = store(tmp_path / "other").save(1, dict(model().named_parameters()), {}, {})
    wrong = Region((12, 4), (Box((0, 0), (12, 4)),))
    with pytest.raises(CheckpointError, match=r"model\.weight has shape \[12, 6\], not \[12, 4\]"):
        store(tmp_path / "other").load(path, {"weight": Piece(torch.zeros(12, 4), wrong)}, {})


BOXES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 4), st.integers(0, 3)), max_size=6)


@settings(max_examples=300)
@given(boxes=BOXES, guillotine=st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 3)), max_size=4))
def test_chunks_are_taken_if_they_cover_every_place_once(
    boxes: list[tuple[int, int, int, int]], guillotine: list[tuple[int, bool, int]]
) -> None:
    """Compared with counting. Most random boxes do not cover the whole; others are made by cutting the whole
    repeatedly.
    """
    shape = (4, 3)
    result = [(0, 0, 4, 3)]
    for which, across, at in guillotine:
        row, column, rows, columns = result.pop(which % len(result))
        if across:
            result += [(row, column, min(at, rows), columns), (row + at, column, max(rows - at, 0), columns)]
        else:
            result += [(row, column, rows, min(at, columns)), (row, column + at, rows, max(columns - at, 0))]
    for made in (boxes, result, result[:-1] + boxes[:1]):
        made = [box for box in made if box[0] + box[2] <= 4 and box[1] + box[3] <= 3]
        times = torch.zeros(shape)
        for row, column, rows, columns in made:
            times[row : row + rows, column : column + columns] += 1
        right = bool((times == 1).all()) and (len(made) == 1 or all(box[2] and box[3] for box in made))
        chunks = [
            StoredChunk(offsets=[r, c], sizes=[rs, cs], file="rank-0.safetensors", begin=0) for r, c, rs, cs in made
        ]
        try:
            Stored(dtype="F32", shape=list(shape), chunks=chunks)
            taken = True
        except ValueError:
            taken = False
        assert taken == right, made
