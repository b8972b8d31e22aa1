"""Layout against its definitions, rank by rank and layer by layer, on random layouts; and refused inputs."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Reduction, Stage


def pipeline(module, replica, *stages):
    """Stages as (start, stop, ranks) or (start, stop, ranks, ranks of the copies)."""
    made = [
        Stage(module, i, start, stop, Lane(ranks), tuple(Lane(copy) for copy in copies))
        for i, (start, stop, ranks, *copies) in enumerate(stages)
    ]
    return Pipeline(module, replica, tuple(made))


def one_module(*pipelines, world, **spec):
    return Layout({"m": (ParallelSpec(dp=len(pipelines), **spec), pipelines)}, world)


@st.composite
def layouts(draw):
    """Up to three modules on separate or shared ranks, cut differently in every replica.

    Neighbouring stages may share a lane.
    """
    modules, first, blocks = {}, 0, []
    for name in ("vision", "audio", "language_model")[: draw(st.integers(1, 3))]:
        tp, cp, dp, layers = (draw(st.integers(1, most)) for most in (2, 2, 3, 5))
        inner = st.sets(st.integers(1, layers - 1), max_size=2) if layers > 1 else st.just(set())
        cuts = [[0, *sorted(draw(inner)), layers] for _ in range(dp)]
        copies = draw(st.integers(0, 2)) if all(len(cut) == 2 for cut in cuts) else 0
        # Lane of each stage and copy, as an index into the module's lanes.
        number, taken = -1, []
        for cut in cuts:
            taken.append([])
            for index in range(len(cut) - 1):
                number += 0 if index and draw(st.booleans()) else 1
                taken[-1].append([number, *range(number + 1, number + 1 + copies)])
                number += copies
        size = tp * cp
        # "shared": on the ranks of an earlier module with the same number of ranks.
        start = next((at for at, ranks in blocks if ranks == (number + 1) * size and draw(st.booleans())), first)
        blocks.append((start, (number + 1) * size))
        first = max(first, start + (number + 1) * size)
        modules[name] = (ParallelSpec(tp=tp, cp=cp, dp=dp), cuts, taken, start, size)
    names = draw(st.permutations(range(first)))

    def lane(number, start, size):
        return Lane(tuple(names[start + number * size + place] for place in range(size)))

    made = {}
    for name, (spec, cuts, taken, start, size) in modules.items():
        pipelines = []
        for replica, (cut, numbers) in enumerate(zip(cuts, taken, strict=True)):
            stages = []
            for i, (a, b) in enumerate(itertools.pairwise(cut)):
                own, *copies = (lane(number, start, size) for number in numbers[i])
                stages.append(Stage(name, i, a, b, own, tuple(copies)))
            pipelines.append(Pipeline(name, replica, tuple(stages)))
        made[name] = (spec, tuple(pipelines))
    return Layout(made, first)


def held(layout):
    """(module, layer, replica, place in the lane, rank) of everything that a rank holds."""
    for name, (_, pipelines) in layout.modules.items():
        for replica, one in enumerate(pipelines):
            for stage in one.stages:
                for lane in (stage.lane, *stage.copies):
                    for layer in range(stage.start, stage.stop):
                        for place, rank in enumerate(lane.ranks):
                            yield name, layer, replica, place, rank


@settings(max_examples=150)
@given(layouts())
def test_what_is_where(layout):
    everything = list(held(layout))
    for name in layout.modules:
        for layer in range(layout.pipelines(name)[0].num_layers):
            ranks = [rank for lane in layout.holders(name, layer) for rank in lane.ranks]
            assert ranks == [rank for module, at, _, _, rank in everything if (module, at) == (name, layer)]
            tp, same = layout.spec(name).tp, layout.same_weights(name, layer)
            assert same == tuple(
                tuple(rank for module, at, _, p, rank in everything if (module, at, p % tp) == (name, layer, place))
                for place in range(tp)
            )
    for rank in range(layout.world):
        mine = {(s.module, layer) for s in layout.of_rank(rank) for layer in range(s.start, s.stop)}
        assert mine == {(name, layer) for name, layer, _, _, other in everything if other == rank}
        for name in layout.modules:
            replicas = {r for module, _, r, _, other in everything if (module, other) == (name, rank)} or {None}
            assert {layout.replica(rank, name)} == replicas
    result = [lane for stage in layout.stages() for lane in stage.lanes]
    assert set(layout.lanes()) == set(result) and len(set(layout.lanes())) == len(layout.lanes())
    assert [layout.lane_number(lane) for lane in layout.lanes()] == list(range(len(layout.lanes())))
    assert layout.pipelines() == tuple(p for name in layout.modules for p in layout.pipelines(name))
    assert layout.data_parallel == {name: len(layout.pipelines(name)) for name in layout.modules}


@settings(max_examples=150)
@given(layouts())
def test_ranks_with_the_same_part_of_a_layer_reduce_together(layout):
    parts = {}
    for name, layer, _, place, rank in held(layout):
        parts.setdefault((name, layer, place % layout.spec(name).tp), set()).add(rank)
    summed = []
    for reduction in layout.reduce_groups():
        assert reduction.start < reduction.stop and reduction.tied == -1
        assert len(reduction.ranks) > 1 and list(reduction.ranks) == sorted(set(reduction.ranks))
        summed += [(reduction.module, layer, reduction.ranks) for layer in range(reduction.start, reduction.stop)]
    expected = [(name, layer, tuple(sorted(ranks))) for (name, layer, _), ranks in parts.items() if len(ranks) > 1]
    assert sorted(summed) == sorted(expected)


@settings(max_examples=150)
@given(layouts())
def test_groups_of_a_rank(layout):
    for rank, name in itertools.product(range(layout.world), layout.modules):
        mine = [stage for stage in layout.of_rank(rank) if stage.module == name]
        if not mine:
            with pytest.raises(ValueError, match=f"rank {rank} has no stage of {name}"):
                layout.group(rank, name, "tp")
            other = layout.pipelines(name)[0].stages[0]
            with pytest.raises(ValueError, match=rf"{other} is on ranks [0-9, ]+, not on rank {rank}$"):
                other.lane_of(rank)
            continue
        spec = layout.spec(name)
        tp, cp, dp = (layout.group(rank, name, kind) for kind in ("tp", "cp", "dp"))
        (lane,) = (lane for lane in mine[0].lanes if rank in lane.ranks)
        assert mine[0].lane_of(rank) == lane and rank in mine[0].ranks
        assert rank in tp and rank in cp and rank in dp
        assert (len(tp), len(cp)) == (spec.tp, spec.cp) and set(tp) & set(cp) == {rank}
        rows = {layout.group(other, name, "tp") for other in lane.ranks}
        assert sorted(itertools.chain(*rows)) == sorted(lane.ranks)
        columns = {layout.group(other, name, "cp") for other in lane.ranks}
        assert sorted(itertools.chain(*columns)) == sorted(lane.ranks)
        # Tensor-parallel ranks are neighbours in the lane, context-parallel ones tp apart.
        at = lane.ranks.index(rank)
        assert lane.indices(rank, spec.tp) == (at % spec.tp, at // spec.tp)
        assert tp == tuple(lane.ranks[i] for i in range(len(lane.ranks)) if i // spec.tp == at // spec.tp)
        assert cp == tuple(lane.ranks[i] for i in range(len(lane.ranks)) if i % spec.tp == at % spec.tp)
        same_place = {r for m, layer, _, p, r in held(layout) if (m, layer, p) == (name, mine[0].start, at)}
        assert dp == tuple(sorted(same_place))
        assert layout.group(rank, name, "shard") == (rank,)


def test_replicas_that_are_cut_differently_sum_piece_by_piece():
    layout = one_module(
        pipeline("m", 0, (0, 2, (0,)), (2, 4, (1,))), pipeline("m", 1, (0, 3, (2,)), (3, 4, (3,))), world=4, pp=2
    )
    assert layout.reduce_groups() == (
        Reduction("m", 0, 2, (0, 2)),
        Reduction("m", 2, 3, (1, 2)),
        Reduction("m", 3, 4, (1, 3)),
    )
    assert layout.holders("m", 2) == (Lane((1,)), Lane((2,)))
    assert [layout.group(rank, "m", "dp") for rank in range(4)] == [(0, 2), (1, 2), (0, 2), (1, 3)]
    assert layout.describe() == "rank 0: m[0:2]\nrank 1: m[2:4]\nrank 2: m[0:3]\nrank 3: m[3:4]"


def test_tp_ranks_reduce_apart_and_cp_ranks_together():
    layout = one_module(
        pipeline("m", 0, (0, 2, (0, 1, 2, 3))), pipeline("m", 1, (0, 2, (4, 5, 6, 7))), world=8, tp=2, cp=2
    )
    assert layout.reduce_groups() == (Reduction("m", 0, 2, (0, 2, 4, 6)), Reduction("m", 0, 2, (1, 3, 5, 7)))
    assert [layout.group(5, "m", kind) for kind in ("tp", "cp", "dp")] == [(4, 5), (5, 7), (1, 5)]
    assert layout.reduce_groups({"m"})[2:] == (Reduction("m", 0, 2, tuple(range(8)), in_part=True),)
    with pytest.raises(ValueError, match=r"kind is 'pp': use \"tp\", \"cp\", \"dp\" or \"shard\""):
        layout.group(0, "m", "pp")


def test_in_part_weights_reduce_over_whole_lanes_for_any_cut():
    layout = one_module(
        pipeline("m", 0, (0, 2, (0, 1)), (2, 3, (2, 3))), pipeline("m", 1, (0, 1, (4, 5)), (1, 3, (4, 5))),
        world=6, tp=2, pp=2,
    )  # fmt: skip
    result = [reduction for reduction in layout.reduce_groups({"m"}) if reduction.in_part]
    assert [(r.start, r.stop, r.ranks) for r in result] == [
        (0, 1, (0, 1, 4, 5)),
        (1, 2, (0, 1, 4, 5)),
        (2, 3, (2, 3, 4, 5)),
    ]


def test_who_shares_slices():
    """By default all ranks with the same weights; otherwise sets, in which those of a lane are neighbours."""
    pipelines = [
        pipeline("m", 0, (0, 2, (0, 1, 2, 3))),
        pipeline("m", 1, (0, 2, (8, 9, 10, 11))),
        pipeline("m", 2, (0, 2, (4, 5, 6, 7))),
        pipeline("m", 3, (0, 2, (12, 13, 14, 15))),
    ]
    every = one_module(*pipelines, world=16, tp=2, cp=2, shard="optimizer")
    assert [(s.owners, s.full) for s in every.shard_groups()] == [
        ((0, 2, 8, 10, 4, 6, 12, 14), False),
        ((1, 3, 9, 11, 5, 7, 13, 15), False),
    ]
    assert every.group(5, "m", "shard") == (1, 3, 5, 7, 9, 11, 13, 15)
    sets = one_module(*pipelines, world=16, tp=2, cp=2, shard="full", shard_ranks=4)
    first, second, *_ = sets.shard_groups()
    assert (first.owners, second.owners, first.full) == ((0, 2, 8, 10), (4, 6, 12, 14), True)
    assert first.sets == second.sets and first.replicas(8) == (8, 12)
    assert sets.group(12, "m", "shard") == (4, 6, 12, 14)
    # A stage of a replica has the replica's place in every set, so tied weights of different stages are placed equally.
    crossed = one_module(
        pipeline("m", 0, (0, 1, (0,)), (1, 2, (3,))), pipeline("m", 1, (0, 1, (2,)), (1, 2, (1,))), world=4, pp=2,
        shard="full",
    )  # fmt: skip
    assert [s.owners for s in crossed.shard_groups()] == [(0, 2), (3, 1)]
    assert [s.ranks for s in crossed.shard_groups()] == [(0, 2), (1, 3)]


def test_copies_of_an_encoder_sum_with_it():
    layout = Layout(
        {
            "vision": (ParallelSpec(), (pipeline("vision", 0, (0, 2, (0,), (1,))),)),
            "language_model": (ParallelSpec(pp=2), (pipeline("language_model", 0, (0, 1, (0,)), (1, 2, (1,))),)),
        },
        2,
    )
    assert layout.reduce_groups() == (Reduction("vision", 0, 2, (0, 1)),)
    assert layout.describe() == "rank 0: vision[0:2], language_model[0:1]\nrank 1: vision[0:2], language_model[1:2]"
    assert layout.stages()[0].lanes == layout.lanes() == (Lane((0,)), Lane((1,)))
    assert (str(layout.stages()[2]), str(Lane((3, 4)))) == ("language_model/1", "3+4")


BAD = [
    (lambda: Lane(()), "a lane needs distinct ranks >= 0, got ()"),
    (lambda: Lane((1, 1)), "a lane needs distinct ranks >= 0, got (1, 1)"),
    (lambda: Lane((0, -1)), "a lane needs distinct ranks >= 0, got (0, -1)"),
    (lambda: Pipeline("m", 1, ()), "m, replica 1 has no stages"),
    (
        lambda: Pipeline("m", 0, (Stage("m", 1, 0, 1, Lane((0,))),)),
        "m, replica 0 has the stages m/1: they must be stages of m, numbered from 0",
    ),
    (
        lambda: Pipeline("m", 0, (Stage("n", 0, 0, 1, Lane((0,))),)),
        "m, replica 0 has the stages n/0: they must be stages of m",
    ),
    (lambda: pipeline("m", 0, (0, 0, (0,))), "m, replica 0: a stage needs at least one layer"),
    (
        lambda: pipeline("m", 0, (1, 2, (0,))),
        "m, replica 0: stages must cover consecutive layers from 0, got [1, 2)",
    ),
    (lambda: pipeline("m", 0, (0, 1, (0,)), (2, 3, (1,))), "consecutive layers from 0, got [0, 1), [2, 3)"),
    (lambda: Layout({}, 1), "a layout needs at least one module and one rank"),
    (lambda: one_module(pipeline("m", 0, (0, 1, (0,))), world=0), "a layout needs at least one module and one rank"),
    (
        lambda: Layout({"m": (ParallelSpec(dp=2), (pipeline("m", 0, (0, 1, (0,))),))}, 1),
        "m has dp = 2, but 1 pipelines: give one per replica",
    ),
    (
        lambda: one_module(pipeline("m", 0, (0, 1, (0,))), pipeline("m", 1, (0, 2, (1,))), world=2),
        "the replicas of m have different numbers of layers",
    ),
    (
        lambda: one_module(pipeline("m", 1, (0, 1, (0,))), pipeline("m", 0, (0, 1, (1,))), world=2),
        "pipeline 0 of m is labelled m, replica 1",
    ),
    (
        lambda: one_module(pipeline("m", 0, (0, 1, (0,), (1,)), (1, 2, (2,))), world=3),
        "m/0 has copies: use one stage for a module with copies",
    ),
    (
        lambda: one_module(pipeline("m", 0, (0, 1, (0,), (0,))), world=1),
        "m/0 has several copies on one rank: use separate ranks for all copies",
    ),
    (
        lambda: one_module(pipeline("m", 0, (0, 1, (0, 1))), world=2, tp=2, cp=2),
        "m/0 is on ranks 0+1, but tp = 2 and cp = 2 need lanes of 4",
    ),
    (lambda: one_module(pipeline("m", 0, (0, 1, (2,))), world=2), "m/0 is on rank 2, but ranks go from 0 to 1"),
    (
        lambda: one_module(pipeline("m", 0, (0, 1, (0,))), pipeline("m", 1, (0, 1, (0,))), world=1),
        "rank 0 has stages of replicas 0 and 1 of m: use one replica of a module per rank",
    ),
    (lambda: one_module(pipeline("m", 0, (0, 1, (1,))), world=2), "rank 0 of 2 has no stage: every rank needs one"),
    (lambda: ParallelSpec(cp=0), "cp must be at least 1, got 0"),
    (lambda: ParallelSpec(virtual=0), "virtual must be at least 1, got 0"),
    (lambda: ParallelSpec(order="wave"), "unknown order 'wave': use one of 'loop', 'v'"),
    (lambda: ParallelSpec(order="v"), "order = 'v' needs virtual = 2, got 1"),
    (lambda: ParallelSpec(shard="weights"), "unknown shard 'weights': use one of 'none', 'optimizer', 'full'"),
    (
        lambda: ParallelSpec(shard_ranks=2),
        "shard_ranks = 2 with shard = 'none': use shard_ranks >= 2 with shard = 'opti",
    ),
    (
        lambda: ParallelSpec(dp=2, shard="full", shard_ranks=1),
        "shard_ranks = 1 with shard = 'full': use shard_ranks >= 2",
    ),
    (
        lambda: one_module(*(pipeline("m", r, (0, 1, (r,))) for r in range(3)), world=3, shard="full", shard_ranks=2),
        "m has shard_ranks = 2, but 3 ranks hold the same weights of it: use a divisor of that number",
    ),
]


@pytest.mark.parametrize(("make", "words"), BAD, ids=[words for _, words in BAD])
def test_what_does_not_fit_together_is_named(make, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_a_spec_counts_its_ranks():
    spec = ParallelSpec(tp=2, cp=3, pp=4, dp=5)
    assert (spec.lane_size, spec.ranks) == (6, 120)
