"""Layout.from_specs and Layout.balanced: cuts against every cut, ranks against the guarantees of each placement."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import plan
from interlace.layout import Layout, ParallelSpec
from tests.plan.place import LLM, Model, model
from tests.sampling import given_by_tier


def bottleneck(costs, cuts):
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(cuts))


def best_bottleneck(costs, parts):
    inner = itertools.combinations(range(1, len(costs)), parts - 1)
    return min(bottleneck(costs, (0, *cut, len(costs))) for cut in inner)


def ranks_of(layout, name, replica):
    """Ranks of the lane of each stage, then of its copies."""
    return [[lane.ranks for lane in stage.lanes] for stage in layout.pipelines(name)[replica].stages]


@st.composite
def models(draw):
    layer = st.tuples(st.integers(1, 9).map(float), st.booleans())
    names = [*["vision", "audio"][: draw(st.integers(0, 2))], LLM]
    return Model({name: draw(st.lists(layer, min_size=1, max_size=6)) for name in names})


options = st.fixed_dictionaries({"frozen_aware": st.booleans(), "recompute": st.booleans()})


@st.composite
def requests(draw):
    """Matching (model, specs, placement)."""
    asked = draw(models())
    *encoders, _ = order = asked.modules_order()
    placement = draw(st.sampled_from(["parallel", "colocated", "shared", "replicated"]))
    most = {name: len(asked.given[name]) for name in order}
    degree = st.integers(1, 3)

    def spec(most, tp=degree, cp=degree, dp=degree):
        return ParallelSpec(tp=draw(tp), cp=draw(cp), pp=draw(st.integers(1, min(most, 3))), dp=draw(dp))

    one = st.just(1)
    if placement == "parallel":
        specs = {name: spec(most[name]) for name in order}
    elif placement == "colocated":
        merged = spec(min((most[name] for name in encoders), default=1))
        specs = {**dict.fromkeys(encoders, merged), LLM: spec(most[LLM])}
    elif placement == "replicated":
        own = spec(most[LLM], one, one)
        specs = {**dict.fromkeys(encoders, ParallelSpec(dp=own.dp)), LLM: own}
    else:
        own = spec(most[LLM])
        ways = [
            ParallelSpec(tp, cp, pp, own.ranks // (tp * cp * pp))
            for tp, cp, pp in itertools.product(range(1, 4), repeat=3)
            if own.ranks % (tp * cp * pp) == 0
        ]
        specs = {name: draw(st.sampled_from([w for w in ways if w.pp <= most[name]])) for name in encoders} | {LLM: own}
    return asked, specs, placement


@settings(max_examples=200)
@given(requests(), options)
def test_every_placement_keeps_its_promise(request, options):
    asked, specs, placement = request
    *encoders, _ = order = asked.modules_order()
    layout = Layout.from_specs(asked, specs, placement=placement, **options)
    assert list(layout.modules) == order and layout.placement == placement
    for name, spec in specs.items():
        assert layout.spec(name) == spec and len(layout.pipelines(name)) == spec.dp
        costs = asked.seconds(name, **options)
        for pipeline in layout.pipelines(name):
            assert len(pipeline.stages) == spec.pp and pipeline.num_layers == len(costs)
            cuts = [0, *(stage.stop for stage in pipeline.stages)]
            assert bottleneck(costs, cuts) == pytest.approx(best_bottleneck(costs, spec.pp))
            assert placement == "replicated" or all(not stage.copies for stage in pipeline.stages)
    used = {name: [rank for p in layout.pipelines(name) for s in p.stages for rank in s.lane.ranks] for name in order}
    if placement == "shared":
        assert all(used[name] == list(range(layout.world)) for name in order)
        return
    if placement == "replicated":
        assert used[LLM] == list(range(layout.world))
        for name, replica in itertools.product(encoders, range(specs[LLM].dp)):
            (homes,) = ranks_of(layout, name, replica)
            assert homes == [home for (home,) in ranks_of(layout, LLM, replica)]
        return
    own = order
    if placement == "colocated" and encoders:
        assert all(used[name] == used[encoders[0]] for name in encoders)
        own = [encoders[0], LLM]
    assert layout.world == sum(specs[name].ranks for name in own)
    if len({spec.dp for spec in specs.values()}) == 1:  # replica by replica
        stages = [p.stages for replica in range(specs[LLM].dp) for p in (layout.pipelines(n)[replica] for n in own)]
        assert [rank for each in stages for stage in each for rank in stage.lane.ranks] == list(range(layout.world))
    else:
        assert [rank for name in own for rank in used[name]] == list(range(layout.world))


@settings(max_examples=100)
@given(models(), st.data(), options)
def test_fewer_ranks_than_stages_minimize_the_busiest_rank(asked, data, options):
    *encoders, _ = order = asked.modules_order()
    placement = data.draw(st.sampled_from(["parallel", "colocated", "replicated"]))
    dp = data.draw(st.integers(1, 2))
    pp = {name: data.draw(st.integers(1, len(asked.given[name]))) for name in order}
    if placement == "replicated":
        pp.update(dict.fromkeys(encoders, 1))
    if placement == "colocated" and encoders:
        pp.update(dict.fromkeys(encoders, min(pp[name] for name in encoders)))
    units = {
        "parallel": [[(name, i)] for name in order for i in range(pp[name])],
        "colocated": [[(n, i) for n in encoders] for i in range(pp[encoders[0]] if encoders else 0)]
        + [[(LLM, i)] for i in range(pp[LLM])],
        "replicated": [[(LLM, i)] for i in range(pp[LLM])],
    }[placement]
    ranks = data.draw(st.integers(1, len(units)))
    specs = {name: ParallelSpec(pp=pp[name], dp=dp) for name in order}
    layout = Layout.from_specs(asked, specs, placement=placement, ranks=ranks, **options)
    assert layout.world == ranks * dp
    seconds = {name: asked.seconds(name, **options) for name in order}

    def home(replica, name, index):
        return layout.pipelines(name)[replica].stages[index].lane.ranks[0] - replica * ranks

    for replica in range(dp):
        homes = [{home(replica, name, i) for name, i in unit} for unit in units]
        assert all(len(each) == 1 for each in homes)
        order_of_homes = [min(each) for each in homes]
        assert order_of_homes == sorted(order_of_homes) and set(order_of_homes) == set(range(ranks))
        cost = []
        for unit in units:
            stages = [layout.pipelines(name)[replica].stages[i] for name, i in unit]
            cost.append(sum(sum(seconds[stage.module][stage.start : stage.stop]) for stage in stages))
        busiest = max(sum(c for c, at in zip(cost, order_of_homes) if at == rank) for rank in range(ranks))
        assert busiest == pytest.approx(best_bottleneck(cost, ranks))
        if placement == "replicated":
            every = [(replica * ranks + rank,) for rank in range(ranks)]
            assert all(ranks_of(layout, name, replica) == [every] for name in encoders)


@given_by_tier(25, 100, models(), st.data(), st.integers(1, 3), options)
def test_a_chain_is_cut_anywhere(asked, data, dp, options):
    order = asked.modules_order()
    chain = [cost for name in order for cost in asked.seconds(name, **options)]
    owners = [(name, i) for name in order for i in range(len(asked.given[name]))]
    ranks = data.draw(st.integers(1, len(chain)))
    layout = Layout.balanced(asked, ranks, dp=dp, **options)
    assert (layout.world, layout.placement, layout.data_parallel) == (ranks * dp, "chain", dict.fromkeys(order, dp))
    for replica in range(dp):
        homes = []
        for name, layer in owners:
            (stage,) = (s for s in layout.pipelines(name)[replica].stages if s.start <= layer < s.stop)
            assert not stage.copies
            homes.append(stage.lane.ranks[0] - replica * ranks)
        assert homes == sorted(homes) and set(homes) == set(range(ranks))
        assert bottleneck(chain, [homes.index(rank) for rank in range(ranks)] + [len(chain)]) == pytest.approx(
            best_bottleneck(chain, ranks)
        )
    for name in order:  # a rank has one stage of a module at most
        lanes = [stage.lane for p in layout.pipelines(name) for stage in p.stages]
        assert len(set(lanes)) == len(lanes) and layout.spec(name).pp == len(layout.pipelines(name)[0].stages)


def test_ranks_by_hand():
    three = model(vision=4, audio=2, language_model=4)
    unequal = {"vision": ParallelSpec(tp=2, dp=2), "audio": ParallelSpec(), LLM: ParallelSpec(pp=2, dp=3)}
    layout = Layout.from_specs(three, unequal)
    assert [ranks_of(layout, "vision", replica) for replica in range(2)] == [[[(0, 1)]], [[(2, 3)]]]
    assert ranks_of(layout, "audio", 0) == [[(4,)]]
    assert [ranks_of(layout, LLM, r) for r in range(3)] == [[[(5,)], [(6,)]], [[(7,)], [(8,)]], [[(9,)], [(10,)]]]

    merged = {"vision": ParallelSpec(pp=2, dp=2), "audio": ParallelSpec(pp=2, dp=2), LLM: ParallelSpec()}
    layout = Layout.from_specs(three, merged, placement="colocated")
    for name in ("vision", "audio"):
        assert [ranks_of(layout, name, replica) for replica in range(2)] == [[[(0,)], [(1,)]], [[(2,)], [(3,)]]]
    assert ranks_of(layout, LLM, 0) == [[(4,)]]

    shared = {"vision": ParallelSpec(dp=4), "audio": ParallelSpec(pp=2, dp=2), LLM: ParallelSpec(tp=2, cp=2)}
    layout = Layout.from_specs(three, shared, placement="shared", ranks=4)
    assert [ranks_of(layout, "vision", replica) for replica in range(4)] == [[[(0,)]], [[(1,)]], [[(2,)]], [[(3,)]]]
    assert [ranks_of(layout, "audio", replica) for replica in range(2)] == [[[(0,)], [(1,)]], [[(2,)], [(3,)]]]
    assert ranks_of(layout, LLM, 0) == [[(0, 1, 2, 3)]]

    specs = {"vision": ParallelSpec(dp=2), "audio": ParallelSpec(dp=2), LLM: ParallelSpec(pp=3, dp=2)}
    layout = Layout.from_specs(three, specs, placement="replicated")
    assert ranks_of(layout, "vision", 1) == ranks_of(layout, "audio", 1) == [[(3,), (4,), (5,)]]
    assert ranks_of(layout, LLM, 1) == [[(3,)], [(4,)], [(5,)]]

    # One dp, lanes of several ranks: ranks that work together are close together.
    specs = {"vision": ParallelSpec(dp=2), "audio": ParallelSpec(dp=2), LLM: ParallelSpec(tp=2, dp=2)}
    layout = Layout.from_specs(three, specs)
    assert [layout.pipelines(n)[1].stages[0].lane.ranks for n in three.modules_order()] == [(4,), (5,), (6, 7)]


def test_given_costs_count_instead_of_flops():
    asked = model(language_model=4)
    assert [s.stop for s in Layout.from_specs(asked, {LLM: ParallelSpec(pp=2)}).stages()] == [2, 4]
    times = plan.LayerTimes(*(np.array([9.0, 1, 1, 1]) for _ in range(4)))
    costs = {LLM: plan.ModuleCosts(np.arange(4), times, np.ones(4, bool))}
    assert [s.stop for s in Layout.from_specs(asked, {LLM: ParallelSpec(pp=2)}, costs=costs).stages()] == [1, 4]
    assert [s.stop for s in Layout.balanced(asked, 2, costs=costs).stages()] == [1, 4]


def specs(vision=None, audio=None, llm=None):
    return {
        "vision": ParallelSpec(**vision or {}),
        "audio": ParallelSpec(**audio or {}),
        LLM: ParallelSpec(**llm or {}),
    }


REFUSED = [
    (
        specs() | {"visoin": ParallelSpec()},
        {},
        "unknown module 'visoin': the model has vision, audio, language_model; did",
    ),
    ({LLM: ParallelSpec()}, {}, "no ParallelSpec for 'vision', 'audio': every module needs one"),
    (
        specs(),
        {"placement": "chain"},
        "unknown placement 'chain': use 'parallel', 'colocated', 'shared', 'replicated' (a",
    ),
    (specs({"pp": 5}), {}, "vision: pp=5 stages, but only 4 layers: set pp to at most 4"),
    (
        specs({"pp": 2}, {"pp": 1}),
        {"placement": "colocated"},
        "colocated encoders are merged stage by stage, so they need one pp; got vision: pp=2, audio: pp=1",
    ),
    (specs({"dp": 2}), {"placement": "colocated"}, "so they need one dp; got vision: dp=2, audio: dp=1"),
    (specs({"tp": 2}), {"placement": "colocated"}, "so they need one tp; got vision: tp=2, audio: tp=1"),
    (
        specs({"pp": 2}),
        {"placement": "replicated"},
        "'vision' on every language model rank: set its pp and virtual to 1, not 2 stages",
    ),
    (
        specs(llm={"dp": 2}),
        {"placement": "replicated"},
        "needs one dp for all modules and tp = cp = 1; got vision: dp=1 tp=1 cp=1, audio: dp=1 tp=1 cp=1, "
        "language_model: dp=2 tp=1 cp=1",
    ),
    (specs(llm={"tp": 2}), {"placement": "replicated"}, "language_model: dp=1 tp=2 cp=1"),
    (
        specs({"dp": 2}),
        {"ranks": 4},
        "ranks = 4 makes stages of a replica share ranks, which needs one dp for all modules and tp = cp = 1; got "
        "vision: dp=2 tp=1 cp=1, audio: dp=1 tp=1 cp=1, language_model: dp=1 tp=1 cp=1: leave ranks out",
    ),
    (specs(llm={"cp": 2}), {"ranks": 4}, "language_model: dp=1 tp=1 cp=2: leave ranks out"),
    (
        specs(llm={"pp": 2}),
        {"ranks": 5},
        "5 ranks do not match the specs, which give 4 stages to place (parallel: vision: pp=1, audio: pp=1, "
        "language_model: pp=2): use 1 to 4 ranks per replica, or raise pp",
    ),
    (specs(), {"ranks": 0}, "0 ranks do not match the specs"),
    (
        specs({"dp": 2}, {"pp": 2}, {"tp": 4}),
        {"placement": "shared"},
        "tp * cp * pp * dp must be equal for all; got vision: 2, audio: 2, language_model: 4",
    ),
    (
        specs(),
        {"placement": "shared", "ranks": 2},
        "must be equal for all and equal to ranks = 2; got vision: 1, audio",
    ),
]


@pytest.mark.parametrize(("given_specs", "options", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_cannot_be_placed_is_named(given_specs, options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Layout.from_specs(model(vision=4, audio=4, language_model=4), given_specs, **options)


@pytest.mark.parametrize("ranks", [0, 7])
def test_a_chain_has_a_layer_for_every_rank(ranks):
    with pytest.raises(ValueError, match=f"cannot cut 6 layers into {ranks} ranges: use 1 to 6 ranks"):
        Layout.balanced(model(vision=2, language_model=4), ranks)


def test_virtual_stages_take_their_lanes_in_turn():
    """Ranks of each stage, by hand; units that share ranks are cut by their combined cost."""

    def ranks(placement, *, dp=1, **options):
        given = {"vision": ParallelSpec(pp=2, virtual=2, dp=dp), LLM: ParallelSpec(pp=2, virtual=2, order="v", dp=dp)}
        layout = Layout.from_specs(model(vision=4, language_model=5), given, placement=placement, **options)
        return {name: [stage.ranks for p in layout.pipelines(name) for stage in p.stages] for name in given}

    apart = {"vision": [(0,), (1,), (0,), (1,)], LLM: [(2,), (3,), (3,), (2,)]}
    assert ranks("parallel") == ranks("colocated") == apart
    assert ranks("shared") == {"vision": [(0,), (1,), (0,), (1,)], LLM: [(0,), (1,), (1,), (0,)]}
    twice = {"vision": [(0,), (1,), (0,), (1,)] + [(4,), (5,), (4,), (5,)]}
    assert ranks("parallel", dp=2) == twice | {LLM: [(2,), (3,), (3,), (2,), (6,), (7,), (7,), (6,)]}
    assert ranks("parallel", ranks=2) == {"vision": [(0,)] * 4, LLM: [(1,)] * 4}
    three = {"vision": ParallelSpec(), LLM: ParallelSpec(tp=2, pp=2, virtual=3)}
    layout = Layout.from_specs(model(vision=1, language_model=6), three)
    assert [stage.ranks for stage in layout.pipelines(LLM)[0].stages] == [(1, 2), (3, 4)] * 3
    assert [(stage.start, stage.stop) for stage in layout.pipelines(LLM)[0].stages] == [(i, i + 1) for i in range(6)]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"pp": 2, "virtual": 3}, "pp=2 * virtual=3 stages, but only 5 layers: set pp to at most 1"),
        ({"virtual": 7}, "pp=1 * virtual=7 stages, but only 5 layers: set virtual to at most 5"),
    ],
)
def test_more_virtual_stages_than_layers_are_refused(spec, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Layout.from_specs(model(language_model=5), {LLM: ParallelSpec(**spec)})
