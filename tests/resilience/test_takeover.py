"""Layouts of generations, their transfers (sender, receiver, data) and the copies, against brute force."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import plan
from interlace.costs.modules import layer_costs
from interlace.layout import ParallelSpec
from interlace.plan import analytic_costs
from interlace.resilience.coordinator.layouts import Templates, held_by
from interlace.resilience.takeover import NEARBY, Takeover, Transfer, assign, copy
from interlace.run.graph import parameter_layers
from interlace.train.checkpoint.identity import canonical_names
from tests.forkserver import context
from tests.tiny import tiny_mllm


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_mllm(layers=3)


@pytest.fixture(scope="module")
def templates(model: Any) -> Templates:
    return Templates(model, analytic_costs(model))


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_pipelines_have_all_layers_once_and_match_templates(model, templates, sizes) -> None:
    layout = templates.layout(sizes)
    assert layout.world == sum(sizes)
    chain = np.concatenate(list(layer_costs(analytic_costs(model), model.modules_order()).values()))
    first = 0
    for replica, size in enumerate(sizes):
        stages = [stage for rank in range(first, first + size) for stage in layout.of_rank(rank)]
        assert all(rank in range(first, first + size) for stage in stages for rank in stage.ranks)
        layers = [(stage.module, layer) for stage in stages for layer in range(stage.start, stage.stop)]
        expected = [(name, layer) for name, count in templates.layers.items() for layer in range(count)]
        assert layers == expected  # the chain in order, along the ranks
        template = plan.pipeline_template(chain[:, None], size, 1, widths=[1])
        counts = [sum(s.stop - s.start for s in layout.of_rank(rank)) for rank in range(first, first + size)]
        assert counts == np.diff(template.boundaries).tolist()
        assert all(
            layout.replica(rank, layout.of_rank(rank)[0].module) == replica for rank in range(first, first + size)
        )
        first += size


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), lane=st.sampled_from([(2, 1), (1, 3), (2, 2)]))
def test_lanes_lie_where_ranks_would_and_a_rank_keeps_its_place(model, templates, sizes, lane) -> None:
    tp, cp = lane
    width = tp * cp
    specs = dict.fromkeys(model.modules_order(), ParallelSpec(tp=tp, cp=cp))
    wide = Templates(model, analytic_costs(model), specs=specs)
    assert wide.most_ranks == width * templates.most_ranks
    layout, narrow = wide.layout([size * width for size in sizes]), templates.layout(sizes)
    assert layout.world == width * narrow.world and layout.spec("language_model").lane_size == width
    for rank in range(layout.world):
        here = [(s.module, s.index, s.start, s.stop) for s in layout.of_rank(rank)]
        assert here == [(s.module, s.index, s.start, s.stop) for s in narrow.of_rank(rank // width)]
        for stage in layout.of_rank(rank):
            assert stage.lane.ranks == tuple(range(rank - rank % width, rank - rank % width + width))
    assert wide.shares([size * width for size in sizes], 12) == templates.shares(sizes, 12)
    with pytest.raises(ValueError, match=f"not divisible into lanes of {width} ranks"):
        wide.layout([width + 1])


def test_shares_minimize_the_time_of_the_slowest_pipeline(templates) -> None:
    sizes = (1, 2, 4)
    times = [templates.time(size) for size in sizes]
    shares = templates.shares(sizes, 12)
    assert sum(shares) == 12 and min(shares) >= 1
    splits = [s for s in itertools.product(range(1, 13), repeat=3) if sum(s) == 12]
    assert max(map(float.__mul__, times, map(float, shares))) == pytest.approx(
        min(max(t * n for t, n in zip(times, split, strict=True)) for split in splits)
    )
    assert templates.shares((1, 1, 1), 2) == (1, 1, 1)


def test_a_pipeline_of_more_ranks_than_layers_is_refused(templates) -> None:
    with pytest.raises(ValueError, match="needs at least one layer per"):
        templates.layout([templates.most_ranks + 1])


def test_what_a_rank_is_said_to_hold_is_what_its_stages_have(model, templates) -> None:
    layers, first = parameter_layers(model), canonical_names(model)
    for sizes in ([1, 3], [2, 2], [5]):
        layout = templates.layout(sizes)
        for rank in range(sum(sizes)):
            stages = [model.slice(s.module, s.start, s.stop, copy="modules") for s in layout.of_rank(rank)]
            there = {first[name] for stage in stages for name, _ in stage.named_parameters()}
            assert set(held_by(layout, rank, layers, first)) == there


NAMES = [f"p{i}" for i in range(6)]
SIZES = {name: 2**i for i, name in enumerate(NAMES)}
PLACES = [SIZES, {name: 3 * size for name, size in SIZES.items()}]  # of a lane of two ranks
SETS = st.dictionaries(st.integers(0, 4), st.sets(st.sampled_from(NAMES)), min_size=5, max_size=5)


@settings(deadline=None)
@given(
    needed=SETS,
    held=SETS,
    hosts=st.lists(st.sampled_from("ab"), min_size=5, max_size=5),
    sizes=st.sampled_from([PLACES[:1], PLACES]),
)
def test_all_that_is_missing_comes_once_from_one_that_has_it(needed, held, hosts, sizes) -> None:
    """If ranks have pieces, from a rank with the same piece."""
    lane = len(sizes)
    takeover = assign({r: sorted(n) for r, n in needed.items()}, held, sizes, dict(enumerate(hosts)))
    came = [(t.to, name) for t in takeover.transfers for name in t.names]
    there = {(name, rank % lane) for rank, names in held.items() for name in names}
    missing = {(rank, name) for rank, names in needed.items() for name in names - held[rank]}
    result = [(rank, name) for rank, name in missing if (name, rank % lane) in there]
    assert sorted(came) == sorted(result)
    assert all(name in held[t.source] and name not in held[t.to] for t in takeover.transfers for name in t.names)
    assert all(t.source % lane == t.to % lane for t in takeover.transfers)
    assert set(takeover.orphans) == {name for rank, name in missing if (name, rank % lane) not in there}
    assert takeover.bytes(sizes) == sum(sizes[rank % lane][name] for rank, name in result)


def test_sources_share_the_work_and_near_ones_are_taken_first() -> None:
    names = {f"p{i}": 10 for i in range(8)}
    spread = assign({9: list(names)}, {0: names, 1: names, 9: ()}, [names], {0: "a", 1: "b", 9: "c"})
    assert {t.source for t in spread.transfers} <= {0, 1}
    many = assign(
        {8: list(names), 9: list(names)}, {0: names, 1: names, 8: (), 9: ()}, [names], dict.fromkeys([0, 1, 8, 9], "a")
    )
    load = {s: sum(len(t.names) for t in many.transfers if t.source == s) for s in (0, 1)}
    assert load == {0: 8, 1: 8}
    near = assign({9: list(names)}, {0: names, 1: names, 9: ()}, [names], {0: "a", 1: "b", 9: "b"})
    assert {t.source for t in near.transfers} == {1} and NEARBY > 1


def tensors(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    large = torch.randn(700, 600, generator=g)
    return {
        "large": {"weight": large, "exp_avg": large.t().clone().t(), "step": torch.tensor(float(seed))},  # one strided
        "small": {"weight": torch.randn(3, generator=g), "ema": torch.randn(5, generator=g).to(torch.bfloat16)},
        "empty": {"weight": torch.zeros(0, 4)},
    }


def _copies(rank: int, folder: str) -> None:
    store = dist.FileStore(str(Path(folder) / "store"), 3)
    group = dist.ProcessGroupGloo(dist.PrefixStore("copying", store), rank, 3, timedelta(seconds=60))
    takeover = Takeover(
        (Transfer(0, 1, ("large", "small")), Transfer(0, 2, ("small", "empty")), Transfer(2, 1, ("empty",))), ()
    )
    held, into = tensors(7), {}
    if rank:
        into = {name: {k: torch.full_like(t, -1.0) for k, t in each.items()} for name, each in tensors(0).items()}
    received = copy(takeover, rank, group, held, into)
    names = {0: (), 1: ("large", "small", "empty"), 2: ("small", "empty")}[rank]
    for name, each in into.items():
        for key, tensor in each.items():
            expected = held[name][key] if name in names else torch.full_like(tensor, -1.0)
            assert torch.equal(tensor, expected), (rank, name, key)
    assert received == sum(t.nbytes for name in names for t in held[name].values())
    (Path(folder) / f"ok{rank}").touch()
    store.set(f"done{rank}", "1")
    for other in range(3):
        store.get(f"done{other}")


def test_tensors_arrive_bit_for_bit_and_bytes_are_counted(tmp_path: Path) -> None:
    processes = [context().Process(target=_copies, args=(rank, str(tmp_path))) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert sorted(path.name for path in tmp_path.glob("ok*")) == ["ok0", "ok1", "ok2"]
