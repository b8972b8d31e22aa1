"""Decoded items shared by the processes of a node: complete or absent, bounded, removed with the last user."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.data.workers import decode_cache as decoded
from interlace.data.workers.decode_cache import Decoded, Place
from tests import forkserver


@pytest.fixture
def where(tmp_path: Path) -> Place:
    return Place(tmp_path / f"{decoded.PREFIX}a", 1 << 20)


@pytest.mark.parametrize("dtype", decoded.DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (3, 200, 301), (2, 1, 2, 1, 2, 1, 2, 1)])
def test_cached_item_is_bit_identical_and_a_private_copy(where, dtype, shape):
    kept, item = Decoded(where), torch.randn(shape, dtype=torch.float64).to(dtype)
    assert kept.get((1, "vision", 0)) is None and not kept.has((1, "vision", 0))
    fits = item.nbytes < 0.9 * where.limit
    assert kept.put((1, "vision", 0), item) == fits
    if fits:
        first = kept.get((1, "vision", 0))
        assert first is not None and first.dtype == dtype and first.shape == item.shape and torch.equal(first, item)
        first.zero_()
        second = kept.get((1, "vision", 0))
        assert second is not None and torch.equal(second, item)
        assert kept.get((1, "vision", 1)) is None and kept.get((1, "audio", 0)) is None
        kept.close()
        assert torch.equal(second, item)  # also after the folder is removed
    kept.close()


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 14), st.integers(1, 60)), min_size=1, max_size=60))
def test_the_bound_holds_and_what_was_used_last_stays(tmp_path_factory, uses):
    """Against a dict in the order of use: all items in the folder were used after all missing ones."""
    kept = Decoded(Place(tmp_path_factory.mktemp("bound") / f"{decoded.PREFIX}a", 100_000))
    order: dict[int, int] = {}
    for clock, (key, kib) in enumerate(uses):
        if kept.get((key,)) is None:
            assert kept.put((key,), torch.zeros(256 * kib))
            assert sum(path.stat().st_size for path in kept.folder.iterdir() if len(path.name) == 32) <= kept.limit
        os.utime(kept._file((key,)), (clock, clock))  # timestamps of file systems are coarse
        order.pop(key, None)
        order[key] = kib
    there = [key for key in order if kept.has((key,))]
    assert there == list(order)[len(order) - len(there) :] and there
    kept.close()


def test_items_over_the_limit_or_on_a_full_disk_are_not_cached(where, monkeypatch):
    kept = Decoded(where)
    assert not kept.put((1,), torch.zeros(1 << 18))
    monkeypatch.setattr(Path, "replace", lambda self, other: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert not kept.put((2,), torch.zeros(8)) and kept.get((2,)) is None
    assert not [path for path in where.folder.iterdir() if path.name.startswith(".")]
    kept.close()


@pytest.mark.parametrize("damage", [b"", b"ITEM", b"x" * 500])
def test_a_damaged_file_is_no_item(where, damage):
    kept = Decoded(where)
    kept.put((1,), torch.zeros(100))
    kept._file((1,)).write_bytes(damage)
    assert kept.get((1,)) is None
    kept.close()


def test_one_decodes_and_the_others_are_told(where):
    kept, other = Decoded(where), Decoded(where)
    with kept.claimed((7,)) as mine:
        assert mine
        with other.claimed((7,)) as too:
            assert not too
    with other.claimed((7,)) as too:
        assert too
    kept.close()
    other.close()


def test_the_last_user_removes_the_folder(where):
    one, other = Decoded(where), Decoded(where)
    one.put((1,), torch.ones(3))
    one.mark_broken((2,), "three died of it")
    one.close()
    one.close()
    result = other.get((1,))
    assert result is not None and result.tolist() == [1, 1, 1]
    assert other.broken((2,)) == "three died of it" and other.broken((1,)) is None
    other.close()
    assert not where.folder.exists()


def _die_inside(where: Place, said: Path) -> None:
    kept = Decoded(where)
    kept.put((1,), torch.ones(3))
    with kept.claimed((2,)):
        said.touch()
        signal.pause()


def test_what_a_killed_process_leaves_behind(where, tmp_path):
    """Its locks are free at once; its folder is removed by the next run of the node."""
    process = forkserver.context().Process(target=_die_inside, args=(where, tmp_path / "said"))
    process.start()
    while not (tmp_path / "said").exists():
        assert process.is_alive()
        time.sleep(0.01)
    kept = Decoded(where)
    with kept.claimed((2,)) as mine:
        assert not mine
    process.kill()
    process.join()
    with kept.claimed((2,)) as mine:
        assert mine
    assert kept.has((1,))
    os.close(kept._alive)  # as if this one was also killed
    assert where.folder.exists()
    Decoded(Place(where.folder.with_name(f"{decoded.PREFIX}b"), 1)).close()
    assert not where.folder.exists()


def test_where_items_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(decoded, "SHARED", tmp_path / "shm")
    assert decoded.place("run", 0, tmp_path) is None
    disk = decoded.place("run", 5, tmp_path)  # without shared memory
    assert disk is not None and disk.folder.parent == tmp_path / "decoded" and disk.limit == 5
    (tmp_path / "shm").mkdir()
    shared = decoded.place("run", 5, tmp_path)
    assert shared is not None and shared.folder == tmp_path / "shm" / disk.folder.name
    assert decoded.place("run", 1 << 60, tmp_path).folder.parent == tmp_path / "decoded"
    assert decoded.place("other", 5, tmp_path).folder.name != shared.folder.name


def test_a_handle_of_a_removed_folder_leaves_its_successor_alone(where):
    """Someone clears the shared memory while a run is on, and another process makes the folder again."""
    first = Decoded(where)
    (where.folder / "alive").unlink()
    second = Decoded(where)
    first.close()
    assert second.put((1,), torch.zeros(8)) and second.has((1,))
    second.close()
    assert not where.folder.exists() and not list(where.folder.parent.glob(f"{decoded.PREFIX}*"))
