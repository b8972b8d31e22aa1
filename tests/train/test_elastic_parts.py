"""Components of an elastic rank: its reports, the transfer of state, and the parts of lost time."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from interlace.layout import ParallelSpec
from interlace.plan import analytic_costs
from interlace.plan.memory import StateSize
from interlace.resilience.coordinator.layouts import Templates, held_by
from interlace.resilience.coordinator.roster import Templates as Proposed
from interlace.resilience.errors import ResilienceError
from interlace.resilience.generation import Event, Generation, Node
from interlace.run import parallelize
from interlace.run.graph import parameter_layers
from interlace.run.lanes import HowCut
from interlace.train.checkpoint.identity import canonical_names
from interlace.train.config.load import ConfigError, from_table
from interlace.train.data.texts import tokenizer_of
from interlace.train.elastic.config import check
from interlace.train.elastic.log import Recovery, write_recovery
from interlace.train.elastic.meeting import Meeting
from interlace.train.elastic.proposals import propose, templates_of
from interlace.train.elastic.rank import leader_of
from interlace.train.elastic.state import Held, Note, bits_of, give, sizes_of
from interlace.train.models.build import build
from interlace.train.models.costs import flop_costs
from interlace.train.report.recovery import PARTS, write_page
from interlace.train.runfolder import json_lines
from tests.distributed.workers import run_ranks
from tests.resilience.elastic_cluster import TABLE
from tests.tiny import tiny_mllm

GENERATION = Generation(
    2,
    (("a",), ("b", "c")),
    {name: Node(name, 1, "host") for name in "abc"},
    cause=(Event("death", "d<", 103.0, "x&y"),),
)


@given(st.sets(st.integers(0, 70)))
def test_a_note_says_which_parameters_are_held(places: set[int]) -> None:
    order = [f"p{i}" for i in range(71)]
    names = {f"p{i}" for i in places}
    note = Note("host", "c", "d", 7, bits_of(names, order), "folder", "nonce", (1.0, 2.0, 3.0))
    again = Note.from_json(note.to_json().encode(), 3)
    assert again == note and set(again.names(order)) == names


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"host": 3}', b'{"host":"h","config":"c","data":"d","held":"x!"}'])
def test_what_is_no_note_is_refused_with_its_rank(raw: bytes) -> None:
    with pytest.raises(ResilienceError, match="rank 5"):
        Note.from_json(raw, 5)


def test_the_first_of_those_that_came_furthest_leads() -> None:
    def note(step: int) -> Note:
        return Note("h", "c", "d", step)

    assert leader_of({0: note(-1), 1: note(-1)}) == -1
    assert leader_of({0: note(-1), 1: note(4), 2: note(5), 3: note(5)}) == 2


def test_give_sets_weights_without_copy_and_keeps_ties() -> None:
    model = tiny_mllm(tied=True)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.device("meta"):
        empty = tiny_mllm(tied=True)
    kept = [name for name in values if "layers.0" in name or "embed_tokens" in name]
    give(empty, {name: values[name] for name in kept})
    now = dict(empty.named_parameters(remove_duplicate=False))
    for name, parameter in now.items():
        assert parameter.is_meta == (name not in kept and not name.endswith("lm_head.weight"))
    assert all(now[name].data_ptr() == values[name].data_ptr() for name in kept)
    tied = [name for name in now if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    assert len(tied) == 2 and now[tied[0]] is now[tied[1]]


def test_held_tensors_merge_only_at_the_same_step() -> None:
    """Also after going back to a checkpoint: older copies of layers that a rank now lacks are of a later step."""

    def held(step: int, *names: str) -> Held:
        progress: Any = SimpleNamespace(step=step)
        region: Any = f"region of {step}"
        return Held(
            progress, {name: {"weight": torch.tensor(float(step))} for name in names}, {names[0]: {"weight": region}}
        )

    now = held(3, "a", "b")
    same = now.beside(held(3, "b", "c"))
    assert same.step == 3 and list(same.tensors) == ["b", "c", "a"] and set(same.regions) == {"a", "b"}
    for before in (held(5, "b", "c"), None):
        assert now.beside(before) is now
    assert bits_of(now.beside(held(5, "c")).tensors, "abc") == "3" and bits_of(same.tensors, "abc") == "7"


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(ParallelSpec(), marks=pytest.mark.slow),
        pytest.param(ParallelSpec(tp=2), marks=pytest.mark.slow),
        pytest.param(ParallelSpec(cp=3, shard="optimizer", shard_ranks=3), marks=pytest.mark.slow),
        ParallelSpec(tp=2, cp=2, shard="full", shard_ranks=2),
    ],
)
def test_lane_sizes_match_the_bytes_of_each_rank(spec: ParallelSpec) -> None:
    """Also for rows that are not divisible by the number of ranks."""
    model = tiny_mllm(kv_heads=2, layers=3, hidden=20)
    specs = dict.fromkeys(model.modules_order(), spec)
    templates = Templates(model, analytic_costs(model), specs=specs)
    trained = dict.fromkeys(dict(model.named_parameters()), StateSize(2, 4))
    size, config = spec.lane_size, config_of()
    sizes = sizes_of(copy.deepcopy(model).to("meta"), trained, templates.layout([size]), config)
    layers, first = parameter_layers(model), canonical_names(model)
    for lanes in ([1, 2], [3, 5]):
        layout = templates.layout([count * size for count in lanes])
        ranks = parallelize(copy.deepcopy(model), layout)._ranks
        for number, rank in ranks.items():
            here = sizes[number % size]
            names = [name for name in held_by(layout, number, layers, first) if name in here]
            result = {name: 12 * p.numel() + 4 for name, p in rank.own.items()}
            assert {name: here[name] for name in names} == result, (lanes, number)


TIMES = st.floats(0.001, 50.0)


@given(step=TIMES, worked=TIMES, vote=TIMES, meet=TIMES, copying=st.floats(0.0, 0.001), first=TIMES)
def test_the_time_lost_is_what_lies_between_two_steps_less_one(step, worked, vote, meet, copying, first) -> None:
    counted = 1000.0
    noticed = counted + worked
    gave_up = noticed + vote
    began = gave_up + meet
    now = began + step + first  # the first step takes longer by `first`
    generation = Generation(2, GENERATION.pipelines, GENERATION.nodes, cause=(Event("hang", "d", noticed),))
    recovery = Recovery.of(generation, 6)
    recovery.halted = (counted, step, gave_up)
    recovery.close(now, formed=gave_up + meet / 2, began=began, copying=copying)
    assert recovery.lost == pytest.approx(now - counted - step)
    assert recovery.split["replay"] == pytest.approx(min(worked, step))
    assert recovery.split["detection"] == pytest.approx(max(worked - step, 0.0), abs=1e-6)
    assert recovery.split["vote"] == pytest.approx(vote)
    assert all(recovery.split[part] >= 0 for part in PARTS)


def test_a_join_loses_no_step_and_a_start_nothing() -> None:
    start = Recovery.of(GENERATION, 6)
    start.close(5.0, 1.0, 2.0, 0.0)
    assert start.metrics() == {} and start.lost == 0.0
    join = Recovery.of(GENERATION, 6)
    join.halted = (100.0, 1.0, 50.0)  # nothing was discarded since
    join.close(103.0, formed=100.5, began=102.0, copying=0.5)
    assert join.split == {"detection": 0.0, "vote": 0.0, "regroup": 1.5, "copy": 0.5, "replay": 0.0}


def test_recovery_line_lost_with_its_rank_is_written_later(tmp_path: Path) -> None:
    """Also if half of it was written. No line is written twice, or mistaken for that of an earlier run with its
    number."""
    changes = [Recovery(number, "train", [("death", node, 1.5 * number, "it is gone")], [["a"]], 6)
               for number, node in ((2, "x"), (1, ""), (2, "d"), (3, "e"), (4, "f"))]  # fmt: skip
    earlier, first, second, third, fourth = changes
    made, path = config_of(), tmp_path / "recovery.jsonl"
    write_recovery(tmp_path, earlier, None, made)
    write_recovery(tmp_path, first, None, made)
    with path.open("a") as file:
        file.write('{"generation": 2, "cau')  # the last output of rank 0
    write_recovery(tmp_path, third, second, made)
    write_recovery(tmp_path, fourth, third, made)
    assert [line["cause"][0][1] for line in json_lines(path)] == ["x", "", "d", "e", "f"]


def test_recovery_page_draws_each_part_and_escapes_text(tmp_path: Path) -> None:
    recovery = Recovery.of(GENERATION, 6)
    recovery.halted, recovery.step, recovery.bytes, recovery.transfers = (100.0, 1.0, 103.2), 12, 3 << 20, 2
    recovery.close(106.0, formed=103.5, began=104.5, copying=0.25)
    line = json.loads(json.dumps(vars(recovery)))
    text = write_page(tmp_path, "my <run>", [line]).read_text()
    assert text.count("<rect") == len(PARTS)
    assert "my &lt;run&gt;" in text and "death d&lt; x&amp;y" in text and "3.00 MiB in 2 transfers" in text
    assert write_page(tmp_path, "empty", []).read_text().count("<rect") == 0


def config_of(**changes: dict[str, Any]) -> Any:
    made = copy.deepcopy(TABLE)
    for section, keys in changes.items():
        made[section] |= keys
    return from_table(made)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"assign": "stratified"}}, "train.assign"),
        ({"train": {"balance": "per_module"}}, "train.balance"),
        ({"train": {"balance": "none"}}, "train.balance"),
        ({"parallel": {"schedule": "auto"}}, "parallel.schedule"),
        ({"parallel": {"placement": "colocated"}}, "parallel.placement"),
    ],
)
def test_what_goes_by_pipelines_that_are_alike_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(config_of(**changes), source="test")


def test_ranks_propose_templates_of_their_model() -> None:
    config = config_of(resilience={"nodes": 5, "min_nodes": 2})
    model = build(config, tokenizer_of(config, source="test"))
    templates = Templates(model, flop_costs(config, model))
    result = Proposed.from_json(propose(config, model, templates, source="test"))
    assert result.sizes == [2, 3] and result.microbatches == 2 * config.train.microbatches
    assert result.times == tuple(templates.time(size) for size in (2, 3)) and result.times[1] < result.times[0]
    with pytest.raises(ConfigError, match="ranks_per_node"):
        propose(config_of(resilience={"nodes": 40, "min_nodes": 20}), model, templates, source="test")


def test_tied_weight_split_within_a_lane_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No known model has one: embeddings and heads are beside the blocks, where rows are whole."""
    made = copy.deepcopy(TABLE)
    made["model"]["language_model"]["config"] |= {"tie_word_embeddings": True, "num_key_value_heads": 2}
    made["resilience"] |= {"nodes": 4, "min_nodes": 1, "ranks_per_node": 2}
    made["parallel"] |= {"vision": {"tp": 2}, "language_model": {"tp": 2}}
    config = from_table(made)
    model = build(config, tokenizer_of(config, source="test"))
    templates = templates_of(config, model, flop_costs(config, model))
    propose(config, model, templates, source="test")
    embedding = next(names for names in model.tied_parameters())[0]
    monkeypatch.setattr("interlace.run.lanes.how_cut", lambda *_, **__: HowCut(True, {embedding}))
    with pytest.raises(
        ConfigError, match=r"embed_tokens.weight .* each use a part of it: .*sequence_parallel to false"
    ):
        propose(config, model, templates, source="test")


@pytest.mark.slow
def test_model_larger_than_one_rank_needs_more_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(resilience={"nodes": 8, "min_nodes": None}, data={"max_tokens": 14})
    model = build(config, tokenizer_of(config, source="test"))
    templates = Templates(model, flop_costs(config, model))

    def least(memory: float) -> int:
        monkeypatch.setattr("interlace.train.elastic.proposals.memory_of", lambda *_: memory)
        return Proposed.from_json(propose(config, model, templates, source="test")).min_nodes

    assert least(1e12) == 1
    state = sum(parameter.numel() * 20 for parameter in model.parameters())  # weight, gradient, moments, average
    assert least(0.9 * state) > 1
    with pytest.raises(ConfigError, match="no pipeline of up to"):
        least(1000.0)


class Alone:
    """A member with a file as its coordinator."""

    def __init__(self, rank: int, path: str) -> None:
        self.number, self.path = rank, path

    def rank(self, _generation: Generation) -> int:
        return self.number

    def own_store(self, _generation: Generation) -> dist.Store:
        return dist.PrefixStore("generation", dist.FileStore(self.path, 2))

    def over(self, _generation: Generation) -> bool:
        return False


def meet(rank: int, path: str) -> list[int]:
    dist.barrier()  # a peer that is still connecting would fail
    dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = rank  # on rank 1 the creation of a group has failed
    nodes = {name: Node(name, 1, "here") for name in "ab"}
    with Meeting(Alone(rank, path), Generation(1, (("a",), ("b",)), nodes), 20.0) as meeting:
        meeting.join(1.0)
        return meeting.gather("number", rank)


def test_ranks_meet_after_a_group_failed_on_one_of_them(tmp_path: Path) -> None:
    """Torch's group keys include the number of groups made before."""
    assert run_ranks(2, meet, str(tmp_path / "store")) == [("returned", [0, 1])] * 2
