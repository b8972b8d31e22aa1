"""Samples of a run, identical on every rank, and the items decoded ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.data import ReadAhead
from interlace.data.workers.pool import WorkerPool
from interlace.train.config.load import ConfigError
from interlace.train.data.feed import Feed, report_left_out
from tests import forkserver
from tests.digits import digits


def _feed(wanted: Callable[[list[Any]], Any] | None = None, validation_samples: int = 5, producers: Any = None) -> Feed:
    ahead = ReadAhead(wanted=wanted, producers=producers)
    return Feed(
        digits("train"), digits("heldout"), batch_size=6, seed=3, validation_samples=validation_samples, ahead=ahead
    )


def _pictures(samples: list[Any]) -> list[Any]:
    return [item for sample in samples for item in sample.media["vision"]]


def test_ranks_get_the_whole_batch_but_decode_only_their_items() -> None:
    """Two ranks, each of which reads every other image: together they read each one once."""
    feeds = [_feed(lambda samples, first=first: _pictures(samples)[first::2]) for first in (0, 1)]
    batches = [[feed.next() for _ in range(3)] for feed in feeds]
    for one, other in zip(*batches, strict=True):
        assert (one.epoch, one.position, one.tokens) == (other.epoch, other.position, other.tokens)
        assert one.tokens == sum(len(sample) for sample in one.samples) and len(one.samples) == 6
        for a, b in zip(one.samples, other.samples, strict=True):
            assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels)
        loaded = [[item.loaded for item in _pictures(batch.samples)] for batch in (one, other)]
        assert loaded == [[True, False] * 3, [False, True] * 3]
    assert [batch.position for batch in batches[0]] == [0, 1, 2]
    for feed in feeds:
        feed.close()
        assert feed.train.read_items % 3 == 0 and feed.train.read_items >= 9


def test_held_out_samples_are_all_of_them_and_wait_to_be_read() -> None:
    feed = _feed(validation_samples=50)
    assert len(feed.held_out) == 50 and feed.held_out is feed.held_out
    assert feed.held_out_data.read_items == 0
    assert all(item.data is not None for item in _pictures(feed.held_out))
    assert feed.held_out_data.read_items == 50
    feed.close()


def test_workers_decode_validation_samples_bit_identically() -> None:
    forkserver.context()  # the server has imported torch: workers start fast
    alone = _feed(validation_samples=50)
    feed = _feed(validation_samples=50, producers=lambda loader: WorkerPool(loader, 1))
    for one, other in zip(feed.held_out, alone.held_out, strict=True):
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.labels, other.labels)
    feed.ask_held_out([feed.held_out[:30], feed.held_out[30:]], lambda samples: _pictures(samples)[::2])
    feed.held_out_data.picture = None  # here nothing can be decoded
    for one, other in zip(_pictures(feed.held_out), _pictures(alone.held_out), strict=True):
        assert torch.equal(one.data, other.data) and one.tokens == other.tokens
    assert feed.held_out_data.read_items == feed.decoded_items == 50
    feed.ask_held_out([feed.held_out], _pictures)  # no further requests
    assert feed.loader.producers._pending == [] and not feed._apart._batch._answers
    for each in (feed, alone):
        each.close()


def test_other_validation_samples_are_no_continuation() -> None:
    feed, other = _feed(), _feed()
    other.held_out_data = other.train
    state = feed.state_dict()
    feed.load_state_dict(state)
    with pytest.raises(ConfigError, match="the validation samples are not those"):
        other.load_state_dict(state)
    for one in (feed, other):
        one.close()


def test_left_out_and_cut_samples_are_reported(tmp_path: Path) -> None:
    class Split:
        def __init__(self, listing: str) -> None:
            self.listing = lambda: listing
            self.report = lambda: f"report of {listing.strip()}"

    lines: list[str] = []
    report_left_out([Split(""), Split("v.jsonl:1: cut to 8 tokens\n")], tmp_path, lines.append)
    assert len(lines) == 1 and lines[0].startswith("report of v.jsonl:1")
    report_left_out([Split("a\n"), Split("b\n")], tmp_path, lines.append)
    assert len(lines) == 3 and (tmp_path / "left_out.txt").read_text() == "a\nb\n"
    report_left_out([Split("a\nb\n"), Split("b\n")], tmp_path, lines.append)  # nothing new of its own
    assert len(lines) == 4 and (tmp_path / "left_out.txt").read_text() == "a\nb\n"
    report_left_out([Split(""), Split("")], tmp_path, lines.append)
    assert len(lines) == 4 and not (tmp_path / "left_out.txt").exists()


def test_without_a_reader_nothing_is_decoded() -> None:
    feed = _feed(lambda samples: [])
    feed.next()
    time.sleep(0.1)  # the thread continues
    feed.close()
    assert feed.train.read_items == 0 and feed.blank_items == 0
