"""`train.balance`: assignment of samples to replicas. Steps are checked against one process, loads by the library."""

from __future__ import annotations

import gc
import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import balance
from interlace.data import Loader, ReadAhead
from interlace.layout import Layout, ParallelSpec
from interlace.model import Media, Sample
from interlace.run import parallelize
from interlace.run.tables.ahead import TablesAhead
from interlace.run.tables.batch import ChunkInputs, GlobalBatch
from interlace.run.tables.dispatch import BALANCES, Dispatcher, Phase
from interlace.run.tables.table import Lengths, step_table
from tests.run.dispatch import LLM, NAMES, batch_of
from tests.run.parity import assert_same_gradient, oracle
from tests.tiny import tiny_mllm


def layout_of(mllm: Any, placement: str, degrees: tuple[int, int, int]) -> Layout:
    specs = {name: ParallelSpec(dp=dp) for name, dp in zip(NAMES, degrees, strict=True)}
    return Layout.from_specs(mllm, specs, placement=placement)


LAYOUTS = [
    ("parallel", (2, 3, 2)),
    ("parallel", (4, 1, 2)),
    ("parallel", (1, 2, 3)),
    ("colocated", (3, 3, 2)),
    ("shared", (4, 4, 4)),
    ("replicated", (2, 2, 2)),
]


def check_parity(placement: str, degrees: tuple[int, int, int], method: Any, kind: str, assign: Any, node: int) -> None:
    mllm = tiny_mllm(layers=1)
    samples = batch_of(mllm, kind)
    loss, gradients = oracle(mllm, [samples])
    mllm.zero_grad()
    layout = layout_of(mllm, placement, degrees)
    parallel = parallelize(mllm, layout, balance=method, assign=assign, ranks_per_node=node, timeout=30)
    result = parallel.step(samples, 2)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in mllm.named_parameters():
        assert_same_gradient(name, parameter.grad, gradients[name])


REPRESENTATIVE = [  # every method, placement and batch once; the slow test has all combinations
    ("parallel", (2, 3, 2), "per_module", "uneven"),
    ("parallel", (4, 1, 2), "llm", "one modality"),
    ("colocated", (3, 3, 2), "none", "uneven"),
    ("colocated", (3, 3, 2), "per_module", "one modality"),
    ("shared", (4, 4, 4), "per_module", "uneven"),
    ("replicated", (2, 2, 2), "llm", "text"),
]


@pytest.mark.parametrize(
    "placement, degrees, method, kind",
    [pytest.param(*each, marks=[pytest.mark.slow] * (place % 2)) for place, each in enumerate(REPRESENTATIVE)],
)
def test_settings_give_the_gradient_of_one_process(placement: str, degrees: Any, method: Any, kind: str) -> None:
    check_parity(placement, degrees, method, kind, "tokens", 2)


@pytest.mark.slow
@pytest.mark.parametrize("method", BALANCES)
@pytest.mark.parametrize("placement, degrees", LAYOUTS)
def test_with_every_batch_and_way_to_assign(placement: str, degrees: Any, method: Any) -> None:
    ways = ("tokens", "stratified") if placement == "shared" else ("tokens", "stratified", "entrain", "as_printed")
    for kind, assign in itertools.product(("uneven", "one modality", "text"), ways):
        check_parity(placement, degrees, method, kind, assign, 1)


@st.composite
def dispatched(draw: st.DrawFn) -> tuple[Dispatcher, Lengths, int]:
    dp = {name: draw(st.integers(1, 6)) for name in NAMES}
    mllm = _mllm()
    layout = layout_of(mllm, "parallel", tuple(dp.values()))
    n = draw(st.integers(1, 40))
    sizes = st.one_of(st.just(0), st.integers(1, 20), st.integers(100, 400))
    rows = {name: np.array(draw(st.lists(sizes, min_size=n, max_size=n)), np.int64) for name in NAMES[:-1]}
    text = np.array(draw(st.lists(st.integers(1, 200), min_size=n, max_size=n)), np.int64)
    items = {name: np.where(each > 0, draw(st.integers(1, 5)), 0) for name, each in rows.items()}
    lengths = Lengths(np.asarray(text + sum(rows.values())), np.ones(n, np.int64), rows, items)
    phases = {
        "vision": Phase(4.0, draw(st.sampled_from([0.0, 0.01])), in_items=True),
        "audio": draw(st.sampled_from([Phase(2.0, 0.01, "padded"), Phase(2.0, 0.01)])),
        LLM: Phase(1.0, 0.001),
    }
    method = draw(st.sampled_from(BALANCES))
    return Dispatcher(method, layout, phases, draw(st.sampled_from([None, 1, 2, 3]))), lengths, draw(st.integers(1, 4))


_MADE: list[Any] = []


def _mllm() -> Any:
    if not _MADE:
        _MADE.append(tiny_mllm(layers=1))
    return _MADE[0]


@settings(max_examples=30, deadline=None)
@given(dispatched())
def test_tables_have_the_loads_that_the_library_predicts(drawn: Any) -> None:
    """Per module: the cost of each replica's samples, as dealt by `post_balance`, in any order of replicas."""
    dispatcher, lengths, count = drawn
    layout = dispatcher.layout
    result = dispatcher(lengths)
    table = step_table(layout, lengths, microbatches=count, replicas=result)
    for name in NAMES:
        rows = lengths.tokens if name == LLM else lengths.rows[name]
        items = np.ones(len(rows), np.int64) if name == LLM else np.maximum(lengths.items_of(name), 1)
        phase, dp = dispatcher.phases[name], layout.spec(name).dp
        used = np.flatnonzero(rows)
        taken = [s for chunk in table.chunks if chunk.module == name for s in chunk.samples.tolist()]
        assert sorted(taken) == used.tolist()  # each once
        costs = np.zeros(dp)
        for replica in range(dp):  # by hand
            mine = [s for c in table.chunks if (c.module, c.replica) == (name, replica) for s in c.samples.tolist()]
            length = [round(rows[s] * phase.per_row) for s in mine]
            if mine and phase.batching == "padded":
                costs[replica] = len(mine) * (max(length) + phase.quadratic * max(length) ** 2)
            else:
                share = items[mine] if phase.in_items else np.ones(len(mine), np.int64)
                costs[replica] = sum(
                    one + phase.quadratic * one**2 / k for one, k in zip(length, share.tolist(), strict=True)
                )
        assert np.allclose(dispatcher.computed(table, lengths)[name], costs, rtol=1e-12)
        if name in result and len(used):
            loads = dispatcher.loads(name, lengths, result[name])
            assert np.array_equal(loads, dispatcher.computed(table, lengths)[name])
        if dispatcher.method == "per_module" or (dispatcher.method == "llm" and name == LLM):
            how = {"batching": phase.batching, "quadratic": phase.quadratic}
            if phase.in_items:
                how["items"] = items[used]
            length = np.rint(rows[used] * phase.per_row).astype(np.int64)
            dealt = balance.post_balance(length, dp, **how)
            predicted = balance.batch_costs(length, dealt, dp, **how)
            assert np.allclose(sorted(costs), sorted(predicted), rtol=1e-12)
        if dispatcher.method == "none":
            for c in table.chunks:
                assert (c.samples * layout.spec(c.module).dp // len(lengths) == c.replica).all()


def test_dispatch_keeps_rows_on_their_rank_or_node() -> None:
    """Encoder batches that are read by one replica go to that replica, or to its node."""
    mllm = tiny_mllm(layers=1)
    layout = layout_of(mllm, "shared", (4, 4, 4))
    rows = np.array([50, 40, 30, 20], np.int64)
    lengths = Lengths(rows + 400, np.ones(4, np.int64), {"vision": rows, "audio": np.zeros(4, np.int64)})
    for node in (None, 1, 2):
        result = Dispatcher("per_module", layout, dict.fromkeys(NAMES, Phase()), node)
        table = step_table(layout, lengths, replicas=result(lengths))
        moved, between = result.crossing(table)
        assert between == 0
        assert node == 2 or moved == 0


def test_what_the_executor_computes_is_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where each chunk is collated for its FORWARD: tokens of the language model, rows of encoders."""
    mllm = tiny_mllm(layers=1)
    samples, real = batch_of(mllm, "uneven"), ChunkInputs.of
    counted: Counter[tuple[str, int]] = Counter()

    def counting(self: ChunkInputs, module: str, chunk: int, *, first_stage: bool) -> Any:
        made = real(self, module, chunk, first_stage=first_stage)
        counted[module, self._table.chunks[chunk].replica] += int((made["plan"].q_doc >= 0).sum())
        return made

    monkeypatch.setattr(ChunkInputs, "of", counting)
    layout = layout_of(mllm, "parallel", (2, 3, 2))
    parallel = parallelize(mllm, layout, balance="per_module", timeout=30)
    parallel.step(samples, 2)
    dispatcher = parallel.dispatcher
    assert dispatcher is not None
    lengths = Lengths.of(samples, NAMES[:-1])
    replica = dispatcher(lengths)
    tokens = {
        LLM: [len(s.input_ids) for s in samples],
        **{
            name: [
                sum(mllm.encoders[name].encoder_length(m.shape, m.about) for m in s.media.get(name, ()))
                for s in samples
            ]
            for name in NAMES[:-1]
        },
    }
    for name in NAMES:
        for r in range(layout.spec(name).dp):
            expected = sum(t for t, where in zip(tokens[name], replica[name], strict=True) if where == r)
            assert counted[name, r] == expected, (name, r)


class Counted:
    """A dataset whose media count their decodings."""

    def __init__(self, samples: list[Sample], decoded: Counter[tuple[int, str, int]]) -> None:
        self.samples, self.decoded = samples, decoded

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        media = {
            name: [self._lazy(item, (index, name, place)) for place, item in enumerate(items)]
            for name, items in sample.media.items()
        }
        return Sample(sample.input_ids, sample.labels, media, sample.name)

    def _lazy(self, item: Media, key: tuple[int, str, int]) -> Media:
        def load() -> Any:
            self.decoded[key] += 1
            return item.data

        return Media(item.shape, item.tokens, load=load, about=item.about)


@pytest.mark.parametrize("method", BALANCES)
def test_rank_decodes_exactly_the_items_it_needs_once(method: Any) -> None:
    """Every rank has its own loader, as in processes; the step itself decodes nothing more."""
    mllm = tiny_mllm(layers=1)
    samples = batch_of(mllm, "uneven")
    layout = layout_of(mllm, "parallel", (2, 3, 2))
    parallel = parallelize(mllm, layout, balance=method, timeout=30)
    table = parallel.table(samples, 2)
    for rank in range(layout.world):
        decoded: Counter[tuple[int, str, int]] = Counter()
        parallel.ranks = [rank]
        with Loader(
            Counted(samples, decoded),
            len(samples),
            shuffle=False,
            ahead=ReadAhead(wanted=lambda batch: parallel.wanted(batch, 2)),
        ) as loader:
            loader._load(loader._make(0, 0))  # as its thread does for each batch
        stage = layout.of_rank(rank)[0]
        replica = layout.replica(rank, stage.module)
        mine = [c for c in table.chunks if (c.module, c.replica) == (stage.module, replica)]
        needed = {
            (int(i), stage.module, place)
            for chunk in mine
            for i in chunk.samples
            for place in range(len(samples[i].media.get(stage.module, ())))
        }
        assert decoded == dict.fromkeys(needed, 1)
    decoded = Counter()
    parallel.ranks = list(range(layout.world))
    with Loader(
        Counted(samples, decoded),
        len(samples),
        shuffle=False,
        ahead=ReadAhead(wanted=lambda batch: parallel.wanted(batch, 2)),
    ) as loader:
        batch = loader._load(loader._make(0, 0))
    before = decoded.copy()
    parallel.step(batch, 2)
    assert decoded == before and set(before.values()) == {1}


def test_a_table_that_was_planned_is_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    mllm = tiny_mllm(layers=1)
    samples = batch_of(mllm, "uneven")
    parallel = parallelize(mllm, layout_of(mllm, "parallel", (2, 1, 2)), balance="per_module", timeout=30)
    expected = parallel.table(samples, 2, place=(0, 1, 2))
    parallel.wanted(samples, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "__call__", lambda *_: pytest.fail("planned in the step"))
        result = parallel.step(samples, 2, place=(0, 1, 2))
    assert result.table.digest == expected.digest
    other = parallel.step(samples, 1)  # a different cut: made again
    assert other.table.digest != expected.digest
    timeline = parallel.timeline()
    assert timeline.planning == [[] for _ in range(5)]
    timeline.planning[0] = [(timeline.begin, timeline.begin + 1e-3)]
    timeline.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["dur"] for event in events if event.get("cat") == "planning"] == [pytest.approx(1e3)]


def test_tables_are_kept_for_as_many_batches_as_are_read_ahead() -> None:
    """data.prefetch may be any number; tables of finished batches are dropped."""
    mllm = tiny_mllm(layers=1)
    layout = layout_of(mllm, "parallel", (1, 1, 1))
    tables = TablesAhead()
    batches = [GlobalBatch.of(batch_of(mllm, "uneven"), 2) for _ in range(20)]
    made = [tables.prepare(batch, lambda batch=batch: batch.table(layout)) for batch in batches]  # type: ignore[misc]
    result = [tables.take(batch) for batch in batches]
    assert [table and table.digest for table in result] == [table.digest for table in made]
    for batch in batches:
        tables.prepare(batch, lambda: made[0])
    batches, kept = batches[:1], batches[0]
    del batch
    gc.collect()
    tables.prepare(kept, lambda: made[0])
    assert len(tables._tables) == 1


def test_what_cannot_be_is_refused() -> None:
    mllm = tiny_mllm(layers=1)
    with pytest.raises(ValueError, match="unknown balance 'all'"):
        parallelize(mllm, layout_of(mllm, "parallel", (2, 2, 2)), balance="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks_per_node is 0"):
        parallelize(mllm, layout_of(mllm, "parallel", (2, 2, 2)), ranks_per_node=0)
    with pytest.raises(ValueError, match="items is for packed batches"):
        balance.post_balance([1, 2], 2, batching="padded", items=[1, 1])
    with pytest.raises(ValueError, match="items must be whole numbers"):
        balance.post_balance([1, 2], 2, items=[0, 1])
