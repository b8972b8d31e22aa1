"""docs/extending.md: every example works, and extensions that cannot work are refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import cli
from interlace.comm import all_reduce, connect
from interlace.layout import Layout
from interlace.run import parallelize, stage_graph
from interlace.schedule import Op, Schedule, StepTable, check, compute_actions, generator_of
from interlace.schedule.actions import Action
from interlace.train.config.load import ConfigError, from_table
from interlace.train.models.tuning import check_degrees, rates
from interlace.train.optim import Optimizer
from tests.cli import TINY
from tests.extending.page import imported
from tests.run.parity import assert_same_gradient, make_layout, oracle
from tests.tiny import random_microbatches, tiny_mllm
from tests.train.one_process import TABLE, ToyModel

OWN = "tests.extending.unusable"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return imported(tmp_path, monkeypatch)


# ---------------------------------------------------------------------- optimizers


def optimizer_of(model: ToyModel, config: Any) -> Optimizer:
    return Optimizer(model.named_parameters(), config, rates(config, model))


def updated(model: ToyModel, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for name, parameter in model.named_parameters():
            if step > 2 or "norm" not in name:  # norms have no gradient in the first steps
                parameter.grad = parameter.detach().cos() * step
        optimizer.step(step)


def test_own_optimizer_goes_on_from_its_saved_state(mine: Any) -> None:
    train = TABLE["train"] | {"optimizer": "mine:SignMomentum", "optimizer_options": {"momentum": 0.8}}
    config = from_table(TABLE | {"train": train})
    whole, parts, resumed = ToyModel(), ToyModel(), ToyModel()
    optimizer = optimizer_of(whole, config)
    updated(whole, optimizer, 1, 6)
    (made,) = optimizer.made.values()
    assert isinstance(made, mine.SignMomentum) and made.defaults["momentum"] == 0.8
    before, after = optimizer_of(parts, config), optimizer_of(resumed, config)
    updated(parts, before, 1, 2)
    resumed.load_state_dict(parts.state_dict())
    saved, state = before.state(), after.state()
    assert set(saved) == set(state) == {f"average.{name}" for name, _ in whole.named_parameters()}
    for name, tensor in state.items():
        tensor.copy_(saved[name])
    updated(resumed, after, 3, 6)
    for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Counts", {}, "keeps its state 'step' as int: keep it as a tensor"),
        ("Remembers", {}, "does not begin with a state of zeros"),
        ("Slows", {}, "does not continue from its saved state"),
        ("Raises", {}, r"failed in a trial update of a \(4, 3\) weight: no rows today"),
        ("Counts", {"speed": 3}, "cannot be created with {'speed': 3}: .*unexpected keyword argument 'speed'"),
        ("NOTHING", {}, "is not a subclass of torch.optim.Optimizer"),
        ("Absent", {}, "has no 'Absent'"),
    ],
)
def test_unusable_optimizers_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    train = TABLE["train"] | {"optimizer": f"{OWN}:{name}", "optimizer_options": options}
    config = from_table(TABLE | {"train": train})
    with pytest.raises(ConfigError, match=f"optimizer = '{OWN}:{name}'.*{message}"):
        check_degrees(config, ToyModel())


def test_own_optimizer_shards_weights_only_if_elementwise(mine: Any) -> None:
    for name, fits in ((f"{OWN}:Whole", False), ("mine:SignMomentum", True)):
        train = TABLE["train"] | {"optimizer": name}
        parallel = {"language_model": {"dp": 2, "shard": "optimizer"}}
        config = from_table(TABLE | {"train": train, "parallel": parallel})
        if fits:
            check_degrees(config, ToyModel())
        else:
            with pytest.raises(ConfigError, match=r"needs whole matrices.*shard = 'optimizer'"):
                check_degrees(config, ToyModel())


# ---------------------------------------------------------------------- schedules


def test_own_schedule_trains_as_one_process(mine: Any) -> None:
    mllm = tiny_mllm()
    microbatches = random_microbatches(mllm, "all", count=6)
    loss, gradients = oracle(mllm, microbatches)
    mllm.zero_grad()
    parallel = parallelize(mllm, make_layout(mllm, "parallel", 3), schedule="mine:in_groups")
    result = parallel.step(microbatches)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for name, parameter in parallel.named_parameters():
        assert_same_gradient(name, parameter.grad, gradients[name])
    schedule = parallel.schedule(result.table)
    assert schedule.name == "in groups"
    assert check(schedule).peak_in_flight == (8, 4, 4)  # rank 0 runs two encoders
    assert parallel.evaluate(microbatches).loss == pytest.approx(loss, rel=1e-5)


def graph_and_table() -> tuple[Any, StepTable]:
    mllm = tiny_mllm()
    layout: Layout = make_layout(mllm, "parallel", 3)
    graph = stage_graph(mllm, layout)
    return graph, StepTable.aligned(graph.links, [frozenset(graph.modules)] * 3)


@settings(max_examples=40)
@given(data=st.data())
def test_any_possible_order_becomes_a_sound_schedule(data: st.DataObject) -> None:
    graph, table = graph_and_table()
    remaining, order = compute_actions(graph, table), list[Action]()
    while remaining:  # a random linear extension: an action may move ahead of any that it does not need
        possible = [action for action in remaining if works(graph, table, [*order, action])]
        order.append(data.draw(st.sampled_from(possible)))
        remaining.remove(order[-1])
    schedule = Schedule.of_order("random", graph, table, order)
    check(schedule)
    for rank, actions in enumerate(schedule.actions):
        done = [a for a in actions if a.op in (Op.FORWARD, Op.BACKWARD)]
        assert done == [a for a in order if a in done], rank


def works(graph: Any, table: StepTable, order: list[Action]) -> bool:
    """Whether each action of the sequence comes after those that it needs: an oracle by brute force."""
    done: set[tuple[Op, str, int, int]] = set()
    stages = {module: len(graph.layout.pipelines(module)[0].stages) for module in graph.modules}
    links = [tuple(link) for link in table.links.tolist()]
    for a in order:
        if a.op is Op.FORWARD:
            needs = [(Op.FORWARD, a.module, a.stage - 1, a.chunk)] if a.stage else []
            needs += [
                (Op.FORWARD, m, stages[m] - 1, i)
                for i, o in links
                if o == a.chunk and not a.stage
                for m in [table.chunks[i].module]
            ]
        else:
            needs = [(Op.FORWARD, a.module, a.stage, a.chunk)]
            if a.stage + 1 < stages[a.module]:
                needs.append((Op.BACKWARD, a.module, a.stage + 1, a.chunk))
            else:
                needs += [(Op.BACKWARD, table.chunks[o].module, 0, o) for i, o in links if i == a.chunk]
        if not done.issuperset(needs):
            return False
        done.add((a.op, a.module, a.stage, a.chunk))
    return True


@settings(max_examples=60)
@given(data=st.data())
def test_orders_that_cannot_run_are_refused(data: st.DataObject) -> None:
    graph, table = graph_and_table()
    order = compute_actions(graph, table)
    i, j = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
    order[i], order[j] = order[j], order[i]
    if works(graph, table, order):
        check(Schedule.of_order("swapped", graph, table, order))
    else:
        with pytest.raises(ValueError, match=r"schedule 'swapped': action \d+, .* comes before .*, which it needs"):
            Schedule.of_order("swapped", graph, table, order)


def test_incomplete_and_doubled_orders_are_refused_by_action() -> None:
    graph, table = graph_and_table()
    order = compute_actions(graph, table)
    with pytest.raises(ValueError, match="lacks B:vision/0@0"):
        Schedule.of_order("short", graph, table, order[:-1] if order[-1].module == "vision" else order[:-2])
    with pytest.raises(ValueError, match=f"action {len(order)}, .* is not in this step, or comes twice"):
        Schedule.of_order("long", graph, table, [*order, order[0]])
    with pytest.raises(ValueError, match=r"F:vision/7@0 is not a compute action of this step"):
        Schedule.of_order("odd", graph, table, [Action(Op.FORWARD, "vision", 7, 0)])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_schedule", "returned list, not an interlace.schedule.Schedule"),
        ("forwards_only", "returned a Schedule with backward = False, not True"),
        ("NOTHING", "is not a function"),
        ("absent", "has no 'absent'"),
    ],
)
def test_unusable_schedules_are_refused(name: str, message: str) -> None:
    graph, table = graph_and_table()
    with pytest.raises(ValueError, match=f"schedule.*{OWN}:{name}'.*{message}"):
        generator_of(f"{OWN}:{name}")(graph, table)


def test_ranks_with_different_schedules_run_no_step() -> None:
    graph, table = graph_and_table()
    one, other = (generator_of(name)(graph, table) for name in ("1f1b", "gpipe"))
    assert one.digest != other.digest and one.digest == generator_of("1f1b")(graph, table).digest


# ---------------------------------------------------------------------- transports


def summed(rank: int, folder: str) -> tuple[str, bool, list[float]]:
    sys.path.insert(0, folder)
    try:
        with connect(transport="mine:CountingTransport", timeout=30.0) as group:
            values = torch.full((5,), float(rank + 1))
            all_reduce(values, group=group)
            return group.name, type(group).sent > 0, values.tolist()  # type: ignore[attr-defined]
    finally:
        sys.path.remove(folder)


def test_own_transport_carries_collectives(tmp_path: Path, mine: Any, pool: Any) -> None:
    assert pool.returned(2, summed, str(tmp_path)) == [("counting", True, [3.0] * 5)] * 2


def refusal(rank: int, name: str) -> str:
    with pytest.raises(ValueError) as error:
        connect(transport=f"{OWN}:{name}", timeout=30.0)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NOTHING", "is not a subclass of"),
        ("absent", "has no 'absent'"),
        ("Silent", "does not define capabilities()"),
    ],
)
def test_unusable_transports_are_refused(pool: Any, name: str, message: str) -> None:
    for text in pool.returned(2, refusal, name):
        assert message in text and f"{OWN}:{name}" in text


# ---------------------------------------------------------------------- all in one run, and the mask


def test_one_run_with_extensions_of_every_kind(tmp_path: Path, mine: Any, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.toml"
    config.write_text(TINY.format(folder=tmp_path / "runs"))
    changes = {
        "train.optimizer": "mine:SignMomentum",
        "parallel.schedule": "mine:in_groups",
        "model.vision.projector": "mine:Bottleneck",
        "model.vision.projector_config.width": 4,
        "log.trackers": '["mine:Printed"]',
        "log.accuracy_samples": 0,
    }
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    code = cli.main(["train", str(config), *settings])
    printed = capfd.readouterr()
    assert code == 0, printed.err
    lines = [line for line in printed.out.splitlines() if line.startswith("tracker: ")]
    assert lines[0] == "tracker: begin tiny at step 0"
    assert lines[-2:] == ["tracker: trained 6 steps", "tracker: finished"]
    losses = [float(line.split()[-1]) for line in lines if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_own_mask_equals_its_rule(mine: Any) -> None:
    frames, tokens, seen = 5, 3, 2
    dense = mine.sliding_frames(frames, tokens, seen).to_dense()[0]
    frame = torch.arange(frames * tokens) // tokens
    distance = frame[:, None] - frame
    assert torch.equal(dense, (distance >= 0) & (distance <= seen))
