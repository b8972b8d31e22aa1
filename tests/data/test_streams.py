"""Batches of streams on ranks that are threads: contents, order, data movement and errors."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter

import numpy as np
import pytest
import torch

from interlace.comm.transports.base import Forwarding
from interlace.data import IterableStream, StreamError, StreamLoader, StreamOptions
from interlace.estimate.step_flops import StepFlops
from interlace.layout import Layout, ParallelSpec
from interlace.modalities.errors import DecodeError
from interlace.model import Media, Sample, SampleOutline
from interlace.model.collate import JOINED
from interlace.model.naming import LANGUAGE_MODEL
from interlace.run import parallelize
from tests.run.streamed import Counted, names_of
from tests.tiny import random_sample, tiny_mllm

P = ParallelSpec
KINDS = ((1, 1), (0, 0), (2, 0))


@pytest.fixture(scope="module")
def parallel():
    """Three ranks: an image encoder on two, the language model on the third with the audio encoder."""
    mllm = tiny_mllm(layers=1)
    specs = {"vision": P(dp=3), "audio": P(dp=3), LANGUAGE_MODEL: P(dp=3)}
    return parallelize(mllm, Layout.from_specs(mllm, specs, placement="shared"), timeout=20)


def loader_of(data: Counted, parallel, size: int = 4, readers: int | None = None, **more) -> StreamLoader:
    return StreamLoader(data.stream, parallel, size, options=StreamOptions(readers, timeout=20), **more)


def taken(loader: StreamLoader, count: int) -> list[list[str]]:
    return [names_of(next(loader)) for _ in range(count)]


@pytest.mark.parametrize("shards", [(6, 5, 7), (1, 12), (3,), (0, 9, 0, 2)])
def test_epochs_of_uneven_and_empty_readers_are_whole(parallel, shards: tuple[int, ...]) -> None:
    data, total = Counted(parallel.mllm, shards), sum(shards)
    with loader_of(data, parallel) as loader:
        flat = list(itertools.chain.from_iterable(taken(loader, -(-3 * total // 4))))
    for epoch in range(3):
        assert Counter(flat[epoch * total : (epoch + 1) * total]) == Counter(list(data.whole))


def test_a_batch_takes_equally_many_of_every_reader(parallel) -> None:
    data = Counted(parallel.mllm, (20, 20, 20))
    with loader_of(data, parallel, 7) as loader:
        for names in taken(loader, 6):
            counts = Counter(name.split("/")[0] for name in names)
            assert sorted(counts.values()) == [2, 2, 3]


def test_items_are_decoded_once_and_by_their_reader(parallel) -> None:
    data = Counted(parallel.mllm, (9, 9, 9), kinds=KINDS)
    with loader_of(data, parallel, 6) as loader:
        names = taken(loader, 3)
        dealt = {shard: rank for rank, ahead in loader._ahead.items() for shard in _shards_of(data, loader, rank)}
    for name in itertools.chain.from_iterable(names):
        for key in (key for key in data.decoded if key.startswith(f"{name} ")):
            assert data.decoded[key] == 1
            assert data.threads[key] == {f"interlace-stream-{dealt[int(name.split('/')[0])]}"}
    assert sum(data.decoded.values()) >= sum(
        len(i) for n in itertools.chain(*names) for i in data.whole[n].media.values()
    )


def _shards_of(data: Counted, loader: StreamLoader, rank: int) -> list[int]:
    from interlace.data.streams.base import dealt

    return [unit[1] for unit in dealt(data.stream.shards, 0, 0, loader.ranks_that_read.index(rank), loader.readers)]


class Counting(Forwarding):
    """A transport that counts the bytes of all-to-alls that leave this rank."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.bytes: list[int] = []

    def copy_batch(self, outgoing, incoming, label, then=None, arguments=None):
        if label == "all_to_all_single":
            self.bytes.append(sum(copy.tensor.nbytes for copy in outgoing))
        return self.inner.copy_batch(outgoing, incoming, label, then, arguments)

    def used_for(self, what, at_once=False):
        return self.inner.used_for(what, at_once)


def test_the_bytes_that_move_are_those_of_the_plan(parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Counted(parallel.mllm, (9, 4, 7), kinds=KINDS)
    made = parallel.item_transports
    counting: dict[int, Counting] = {}

    def transports():
        counting.update({rank: Counting(transport) for rank, transport in made().items()})
        return dict(counting)

    monkeypatch.setattr(parallel, "item_transports", transports)
    with loader_of(data, parallel, 6) as loader:
        for step in range(4):
            batch = next(loader)
            samples = data.samples(names_of(batch))
            # By hand: each rank that computes with a part and has not read it receives all of it.
            table = parallel.table(samples)
            due: set[tuple[int, int, str]] = set()
            for chunk in table.chunks:
                for stage in parallel.layout.pipelines(chunk.module)[chunk.replica].stages:
                    due |= {(int(i), rank, chunk.module) for i in chunk.samples for rank in stage.ranks}
            readers = {i: rank for rank, held in batch.given.of_rank.items() for i in _own(data, loader, held, rank)}
            total = 0
            for i, rank, module in due:
                if readers[i] == rank:
                    continue
                if module == LANGUAGE_MODEL:
                    total += 8 * len(samples[i])
                else:
                    total += sum(-(-item.data.nbytes // 8) * 8 for item in samples[i].media.get(module, ()))
            assert batch.moved == total > 0
            assert sum(each.bytes[step] for each in counting.values()) == total


def _own(data: Counted, loader: StreamLoader, held, rank: int) -> list[int]:
    shards = _shards_of(data, loader, rank)
    return [i for i, sample in enumerate(held) if int(sample.name.split("/")[0]) in shards]


def test_ranks_have_what_they_compute_with_and_nothing_else(parallel) -> None:
    data = Counted(parallel.mllm, (9, 9, 9), kinds=KINDS)
    with loader_of(data, parallel, 6) as loader:
        batch = next(loader)
    whole = data.samples(names_of(batch))
    table = parallel.table(whole)
    for rank, held in batch.given.of_rank.items():
        mine = {
            m: {int(i) for c in table.chunks if (c.module, c.replica) == (m, rank) for i in c.samples}
            for m in parallel.layout.modules
        }
        for i, (sample, expected) in enumerate(zip(held, whole, strict=True)):
            assert isinstance(sample, Sample if i in mine[LANGUAGE_MODEL] else SampleOutline)
            assert (len(sample), sample.targets) == (len(expected), expected.targets)
            if isinstance(sample, Sample):
                assert torch.equal(sample.input_ids, expected.input_ids) and torch.equal(sample.labels, expected.labels)
            else:
                with pytest.raises(RuntimeError, match="on another rank"):
                    sample.input_ids  # noqa: B018
            for name, items in expected.media.items():
                for item, like in zip(sample.media[name], items, strict=True):
                    assert (item.shape, item.tokens, item.about) == (like.shape, like.tokens, like.about)
                    assert torch.equal(item.data, like.data) if i in mine[name] else item.data is None


@pytest.mark.parametrize(("readers", "again"), [(3, 3), (2, 2), (3, 1), (1, 3), (2, 3)])
def test_a_run_goes_on_where_it_was_saved(parallel, readers: int, again: int) -> None:
    data = Counted(parallel.mllm, (7, 5, 6, 4))
    with loader_of(data, parallel, 5, readers=readers, buffer=3, seed=2) as loader:
        begun = taken(loader, 3)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = taken(loader, 6)
    with loader_of(data, parallel, 5, readers=again, buffer=3, seed=2) as other:
        other.load_state_dict(state)
        result = taken(other, 6)
    if again == readers:
        assert result == rest
    # With any readers, an epoch has every sample once: 22, of which 15 were taken before.
    flat = list(itertools.chain.from_iterable([*begun, *result]))
    assert Counter(flat[:22]) == Counter(list(data.whole)) and Counter(flat[22:44]) == Counter(list(data.whole))


def test_a_place_is_that_of_what_was_handed_out(parallel) -> None:
    """At every step of two epochs, including the uneven ends of shares."""
    data = Counted(parallel.mllm, (9, 2, 1, 4))
    with loader_of(data, parallel, 3, buffer=2) as loader:
        states, batches = [loader.state_dict()], []
        for _ in range(11):
            batches.append(names_of(next(loader)))
            states.append(loader.state_dict())
    for place in (0, 3, 5, 6, 9):
        with loader_of(data, parallel, 3, buffer=2) as other:
            other.load_state_dict(states[place])
            assert taken(other, 2) == batches[place : place + 2]


def test_a_state_of_other_data_or_settings_is_refused(parallel) -> None:
    data = Counted(parallel.mllm, (4, 4))
    with loader_of(data, parallel) as loader:
        state = loader.state_dict()
    for other, match in (
        (loader_of(data, parallel, 5), "batch_size"),
        (loader_of(data, parallel, seed=1), "seed"),
        (loader_of(Counted(parallel.mllm, (4,)), parallel), "shards"),
    ):
        with other, pytest.raises(ValueError, match=match):
            other.load_state_dict(state)
    with loader_of(data, parallel) as other, pytest.raises(ValueError, match="none of a stream"):
        other.load_state_dict({"epoch": 0})


def test_the_exchange_of_the_coming_batch_is_begun_by_dispatch(parallel) -> None:
    data = Counted(parallel.mllm, (9, 9, 9))
    with loader_of(data, parallel, 3) as loader:
        batch = next(loader)
        time.sleep(0.3)
        assert all(ahead._ready.empty() for ahead in loader._ahead.values())  # no transfer before it begins
        parallel.step(batch.given)
        actions = parallel._last[0].actions
        assert all(str(mine[0]).startswith("DISPATCH") for mine in actions)
        ends = [ahead._ready.get(timeout=20) for ahead in loader._ahead.values()]  # without another call
        assert len({tuple(s.name for s in each.moved.samples) for each in ends}) == 1
        timeline = parallel.timeline()
    for rank in range(3):
        assert timeline.finish[rank][0] >= timeline.start[rank][0]


def test_nothing_moves_where_data_are_read_at_random(parallel) -> None:
    generator = torch.Generator().manual_seed(0)
    parallel.step([random_sample(parallel.mllm, generator, images=1) for _ in range(3)])
    assert not any(str(action).startswith("DISPATCH") for mine in parallel._last[0].actions for action in mine)


# -- failures ----------------------------------------------------------------------------------------------


def text(name: str) -> Sample:
    return Sample(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4]), {}, name)


def test_a_reader_that_fails_is_named_everywhere(parallel) -> None:
    def fails():
        yield text("a")
        raise OSError("the disk is gone")

    with StreamLoader(IterableStream([fails, fails, fails]), parallel, 6, options=StreamOptions(timeout=20)) as loader:
        with pytest.raises(StreamError, match=r"reader 0, on rank 0: OSError: the disk is gone"):
            next(loader)
        with pytest.raises(StreamError, match="the disk is gone"):  # the error again, not a hang
            next(loader)


def test_a_reader_that_is_late_is_named(parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = []

    def slow():
        while not stop:
            time.sleep(0.05)
        yield text("a")

    def quick():
        yield from (text(str(i)) for i in range(9))

    monkeypatch.setattr(parallel._process, "_timeout", 3.0)
    order = [unit[1] for unit in __import__("interlace.data.streams.base", fromlist=["dealt"]).dealt(3, 0, 0, 1, 3)]
    sources = [slow if shard in order else quick for shard in range(3)]
    with StreamLoader(IterableStream(sources), parallel, 3, options=StreamOptions(timeout=3.0)) as loader:
        with pytest.raises(Exception, match=r"lengths of a coming batch.*rank 1"):
            next(loader)
        stop.append(True)


def test_a_sample_beyond_the_bound_is_named(parallel) -> None:
    data = Counted(parallel.mllm, (3, 3, 3), kinds=((1, 0),))
    with StreamLoader(data.stream, parallel, 3, options=StreamOptions(limit=64, timeout=20)) as loader:
        with pytest.raises(StreamError, match=r"reader \d, on rank \d: ValueError: \d/0 has .*exchange_mb"):
            next(loader)


def test_a_step_beyond_the_bound_is_refused_on_all_ranks(parallel) -> None:
    data = Counted(parallel.mllm, (30, 1, 1), kinds=((0, 0),))
    each = 8 * max(len(sample) for sample in data.whole.values())
    with StreamLoader(data.stream, parallel, 24, options=StreamOptions(readers=1, limit=each, timeout=20)) as loader:
        with pytest.raises(ValueError, match=r"rank 0 would send .*largest sample: .*exchange_mb"):
            next(loader)


def test_an_empty_stream_is_an_error(parallel) -> None:
    with StreamLoader(IterableStream([lambda: iter(())]), parallel, 3, options=StreamOptions(timeout=20)) as loader:
        with pytest.raises(StreamError, match="no sample that can be read"):
            next(loader)


def test_samples_whose_media_cannot_be_decoded_are_left_out(parallel) -> None:
    def broken() -> torch.Tensor:
        raise DecodeError("no picture")

    def source():
        for i in range(6):
            ids = torch.tensor([1, *[46] * 1, 2, 3])
            media = {"vision": [Media((3, 4, 4), 1, load=broken if i % 2 else lambda: torch.ones(3, 4, 4))]}
            yield Sample(ids, torch.tensor([-100, -100, 3, 4]), media, str(i))

    with StreamLoader(IterableStream([source]), parallel, 3, options=StreamOptions(readers=1, timeout=20)) as loader:
        assert taken(loader, 2) == [["0", "2", "4"]] * 2


def test_settings_that_do_not_fit_are_refused(parallel) -> None:
    data = Counted(parallel.mllm, (3,))
    for options, match in (({"readers": 4}, "1 to 3"), ({"limit": 0}, "limit")):
        with pytest.raises(ValueError, match=match):
            StreamLoader(data.stream, parallel, 3, options=StreamOptions(**options))
    with pytest.raises(ValueError, match="at least one sample"):
        StreamLoader(data.stream, parallel, 0)
    loader = loader_of(data, parallel)
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_ids_beyond_32_bits_are_refused(parallel) -> None:
    big = Sample(torch.tensor([1, 2**40]), torch.tensor([2, 3]), {}, "big")
    with StreamLoader(IterableStream([lambda: iter([big])]), parallel, 1, options=StreamOptions(timeout=20)) as loader:
        with pytest.raises(StreamError, match=r"'big': input_ids do not fit in 32 bits"):
            next(loader)


@pytest.mark.parametrize("way", [pytest.param(True, marks=pytest.mark.slow), JOINED])
def test_flops_are_counted_from_outlines(parallel, monkeypatch: pytest.MonkeyPatch, way: bool | str) -> None:
    """Also if items see each other bidirectionally, so that their positions in another rank's text matter."""
    monkeypatch.setattr(parallel.mllm.language_settings, "bidirectional", way)
    data = Counted(parallel.mllm, (6, 6, 6), kinds=KINDS)
    with loader_of(data, parallel, 9) as loader:
        batch = next(loader)
    count = StepFlops(parallel.mllm)
    table = parallel.table(data.samples(names_of(batch)))
    expected = count.of(data.samples(names_of(batch)), table)
    for held in batch.given.of_rank.values():
        assert {type(sample) for sample in held} == {Sample, SampleOutline}
        assert count.of(held, table) == expected
    monkeypatch.setattr(parallel.mllm.language_settings, "bidirectional", False)
    assert count.of(data.samples(names_of(batch)), table) != expected


def test_media_without_a_place_in_the_text_are_named(parallel) -> None:
    item = Media((3, 4, 4), 1, torch.ones(3, 4, 4))
    wrong = Sample(torch.tensor([1, 46, 46, 2]), torch.tensor([-100, -100, 2, 3]), {"vision": [item]}, "wrong")
    with StreamLoader(
        IterableStream([lambda: iter([wrong])]), parallel, 1, options=StreamOptions(timeout=20)
    ) as loader:
        with pytest.raises(StreamError, match=r"'wrong', vision: 2 placeholders \(id 46\) for items of 1 tokens"):
            next(loader)


def test_outlines_make_the_same_tables(parallel) -> None:
    data = Counted(parallel.mllm, (6, 6, 6), kinds=KINDS)
    with loader_of(data, parallel, 9) as loader:
        batch = next(loader)
    tables = [parallel.table(held, 2) for held in batch.given.of_rank.values()]
    tables.append(parallel.table(data.samples(names_of(batch)), 2))
    assert len({table.digest for table in tables}) == 1
    assert np.array_equal(tables[0].targets, tables[-1].targets)
