"""Large and mixed chats passed to other processes, and their answers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from interlace.data import Loader, MixedDataset, Part, ReadAhead, RowLoader
from interlace.data.chats.dataset import ChatDataset
from interlace.data.chats.files.records import ChatFileError
from interlace.data.chats.files.sources import Rules
from interlace.data.chats.store import ROW, ChatStore, prepare
from interlace.data.workers.decode_cache import PREFIX, Place
from interlace.data.workers.pool import WorkerPool
from tests import forkserver
from tests.data.chat_faults import chats, image, said, talk, user
from tests.data.workers import numbers


def _rows(folder: Path, count: int) -> ChatStore:
    """A store of this many samples of 1 to 7 tokens, without their tokens."""
    folder.mkdir()
    draw, rows = np.random.default_rng(0), np.zeros(count, ROW)
    rows["tokens"] = draw.integers(1, 8, count)
    rows["hash"] = draw.integers(0, 2**32, count)
    rows.tofile(folder / "samples.bin")
    (folder / "store.json").write_text(json.dumps({"fingerprint": "as it was"}))
    return ChatStore(folder, Rules(), np.memmap(folder / "samples.bin", ROW, "r"), [], "as it was")


def test_a_million_samples_are_handed_over_as_paths(tmp_path: Path) -> None:
    store, made = _rows(tmp_path / "store", 1_000_000), chats()
    every, half = np.arange(len(store)), np.flatnonzero(store.hashes < 2**31)
    mixed = MixedDataset(
        [Part(name, ChatDataset(store, made, at, "train")) for name, at in (("a", every), ("b", half))]
    )
    for loader in (Loader(mixed, 64), RowLoader(mixed, 4, 64)):
        loader.order(0)
        sent = pickle.dumps(loader)
        assert len(sent) < len(store)  # one byte each; a column has 4 or 8
        copy = pickle.loads(sent)
        for ours, theirs in zip(mixed.parts, copy.dataset.parts, strict=True):
            assert np.array_equal(ours.data.picks, theirs.data.picks)
            assert isinstance(theirs.data.store.rows, np.memmap)
            assert np.array_equal(ours.data.token_lengths, theirs.data.token_lengths)
        assert copy.indices(1, 5) == loader.indices(1, 5)


@pytest.mark.parametrize("how", ["anew", "gone"])
def test_chats_that_were_prepared_anew_are_not_taken_for_those(tmp_path: Path, how: str) -> None:
    store = _rows(tmp_path / "store", 10)
    sent = pickle.dumps(store)
    if how == "anew":
        (tmp_path / "store" / "store.json").write_text(json.dumps({"fingerprint": "another"}))
    else:
        (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(ChatFileError, match="other chats were prepared" if how == "anew" else "no longer there"):
        pickle.loads(sent)


def test_what_workers_lose_of_a_mixture_is_counted_and_blank(tmp_path: Path) -> None:
    forkserver.context()
    stores = {}
    for name, count in (("a", 6), ("b", 4)):
        for number in range(count):
            Image.new("RGB", (24, 16), (number * 30, 0, 90)).save(tmp_path / f"{name}{number}.png")
        lines = [talk(user(image(f"{name}{number}.png")), said("red")) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        stores[name] = prepare([tmp_path / f"{name}.jsonl"], chats(), Rules(), tmp_path / "cache")
    threaded, handed = (
        MixedDataset([Part(n, ChatDataset(s, chats(), np.arange(len(s)), "train")) for n, s in stores.items()])
        for _ in range(2)
    )
    for name in ("a3", "b1"):
        (tmp_path / f"{name}.png").write_bytes(b"gone")
    with Loader(threaded, 5, seed=1, ahead=ReadAhead(prefetch=0)) as loader:
        distinct = len(set(loader.order(0).tolist()))  # with equal shares the smaller source repeats samples
        expected = [numbers(loader._load(next(loader))) for _ in range(2)]
    assert (threaded.read_items, threaded.blank_items) == (10, 2)

    where = Place(tmp_path / f"{PREFIX}m", 1 << 24)
    with Loader(
        handed, 5, seed=1, ahead=ReadAhead(prefetch=1, producers=lambda loader: WorkerPool(loader, 1, where=where))
    ) as loader:
        assert [numbers(next(loader)) for _ in range(2)] == expected
        read, blank = handed.read_items, handed.blank_items
        for _ in range(2):  # readable items are among the decoded ones; blank items are not
            next(loader)
        assert blank >= 2 and distinct <= read <= handed.read_items < read + 8
    assert {Path(where).name for where in handed.failures} == {"a.jsonl:4", "b.jsonl:2"}
    assert "failed after it was verified" in handed.report()
