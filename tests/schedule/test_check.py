"""The checker: every kind of damage is found and named, and it agrees with an independent oracle."""

import random
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.schedule import Action, Op, Schedule, ScheduleError, StageGraph, StepTable, check, gpipe, one_f_one_b
from interlace.schedule.memory import peak
from tests.schedule.graphs import random_case, table_of
from tests.schedule.oracle import runs
from tests.schedule.text import parse, text_of

LLM = "language_model"
LINKS = [("vision", LLM)]
COUNT = 800
"""Random cases of each property test."""


def schedule(chunks: int = 3) -> Schedule:
    """Chunk 2k is vision's k-th, chunk 2k + 1 the language model's."""
    graph = StageGraph.build({"vision": [0], LLM: [1, 2]}, LINKS)
    return one_f_one_b(graph, StepTable.aligned(LINKS, [graph.modules] * chunks))


def in_lanes() -> Schedule:
    """Two replicas of one stage on lanes of two ranks, then a second stage on another lane."""
    pipelines = tuple(
        Pipeline("m", r, tuple(Stage("m", i, i, i + 1, Lane((4 * r + 2 * i, 4 * r + 2 * i + 1))) for i in range(2)))
        for r in range(2)
    )
    layout = Layout({"m": (ParallelSpec(tp=2, pp=2, dp=2), pipelines)}, 8)
    graph = StageGraph(layout, (), {"m": (True, True)}, ((("m", 0), ("m", 1)),))
    return one_f_one_b(graph, StepTable.aligned([], [{"m"}] * 2, replicas=2))


def changed(sound: Schedule, change: Callable[[list[list[Action]]], object]) -> Schedule:
    lists = [list(actions) for actions in sound.actions]
    change(lists)
    return Schedule.of_actions(
        sound.name, sound.graph, sound.table, lists, backward=sound.backward, reduce_grad=sound.reduce_grad
    )


def refused(damaged: Schedule, says: str, **limits: object) -> ScheduleError:
    with pytest.raises(ScheduleError, match=says) as caught:
        check(damaged, **limits)  # type: ignore[arg-type]
    return caught.value


def move(actions: list[Action], text: str, before: str) -> None:
    action = actions.pop(actions.index(parse(text)))
    actions.insert(actions.index(parse(before)), action)


def swap(actions: list[Action], one: str, other: str) -> None:
    i, j = (actions.index(parse(text)) for text in (one, other))
    actions[i], actions[j] = actions[j], actions[i]


def test_a_deadlock_names_every_rank_that_waits_and_for_what() -> None:
    graph = StageGraph.build({"m": [0, 1]})
    # Rank 0 waits for a gradient before it sends the input of that gradient.
    damaged = changed(
        gpipe(graph, StepTable.aligned([], [{"m"}] * 2)),
        lambda lists: move(lists[0], "RECV_GRAD:m/0@0<1", "SEND:m/0@0>1"),
    )
    error = refused(damaged, "deadlock: these ranks wait forever")
    assert str(error).splitlines()[1:] == [
        "  rank 0: RECV_GRAD:m/0@0<1 (action 1) waits for rank 1, which is at RECV:m/0@0<0",
        "  rank 1: RECV:m/0@0<0 (action 0) waits for rank 0, which is at RECV_GRAD:m/0@0<1",
    ]
    assert (error.rank, str(error.action)) == (0, "RECV_GRAD:m/0@0<1")


def test_a_deadlock_of_lanes_that_share_ranks_is_found() -> None:
    lanes = {"a": Lane((0, 1)), "b": Lane((1, 0))}  # two lanes: the ranks have other places in them
    modules = {
        name: (ParallelSpec(tp=2), (Pipeline(name, 0, (Stage(name, 0, 0, 1, lane),)),)) for name, lane in lanes.items()
    }
    graph = StageGraph(Layout(modules, 2), (), {"a": (True,), "b": (True,)})
    sound = one_f_one_b(graph, StepTable.aligned([], [{"a", "b"}]), backward=False)
    assert text_of(sound) == "F:a/0@0,F:b/0@1\n" * 2
    error = refused(changed(sound, lambda lists: swap(lists[1], "F:a/0@0", "F:b/0@1")), "deadlock")
    assert str(error).splitlines()[1:] == [
        "  rank 0: F:a/0@0 (action 0) waits for rank 1, which is at F:b/0@1",
        "  rank 1: F:b/0@1 (action 0) waits for rank 0, which is at F:a/0@0",
    ]


def test_messages_out_of_order_are_found() -> None:
    sends = changed(schedule(), lambda lists: swap(lists[0], "SEND:vision/0@0+1>1", "SEND:vision/0@2+3>1"))
    refused(sends, r"rank 0 runs SEND:vision/0@2\+3>1 before the forward that produces it")
    # Swap two receives: both ends are present, but the channel delivers in the order of the sends.
    receives = changed(schedule(), lambda lists: swap(lists[1], "RECV:vision/0@0+1<0", "RECV:vision/0@2+3<0"))
    error = refused(
        receives,
        r"rank 1 expects RECV:vision/0@2\+3<0, but the next message from lane 0 is SEND:vision/0@0\+1>1: receives must",
    )
    assert error.rank == 1


@pytest.mark.parametrize(
    ("rank", "text", "before", "says"),
    [
        (0, "B:vision/0@0", "RECV_GRAD:vision/0@0+1<1", "before it has the gradient from language_model/0, chunk 1"),
        (0, "F:vision/0@2", "F:vision/0@0", None),
        (1, "F:language_model/0@1", "RECV:vision/0@0+1<0", "before it has the output of vision/0, chunk 0"),
        (2, "B:language_model/1@1", "F:language_model/1@1", "before its forward"),
        (1, "SEND_GRAD:vision/0@0+1>0", "B:language_model/0@1", "before the backward of language_model/0, chunk 1"),
    ],
)
def test_actions_out_of_order_are_found(rank: int, text: str, before: str, says: str | None) -> None:
    damaged = changed(schedule(), lambda lists: move(lists[rank], text, before))
    if says is None:
        check(damaged)  # another order of forwards is valid as long as messages match
    else:
        assert refused(damaged, f"rank {rank} runs .* {says}").rank == rank


@pytest.mark.parametrize(
    ("rank", "text", "says"),
    [
        (1, "F:vision/0@0", "rank 1 must not have F:vision/0@0: vision/0 of replica 0 is on rank 0"),
        (0, "F:vision/1@0", "its graph has no stage vision/1"),
        (0, "F:vision/0@9", "the step has chunks 0 to 5"),
        (0, "F:vision/0@1", "chunk 1 is of language_model"),
        (0, "F:vision/0@0>1", "a forward has no other chunk, peer or gradient"),
        (0, "SEND:vision/0@0+1>2", "no stage needs that message"),
        (0, "SEND:vision/0@0+3>1", "no stage needs that message"),
        (0, "REDUCE_GRAD:vision/0+0", "the rank has no such reduction"),
        (0, "UNSHARD:vision/0+0", "the rank has no shard of such weights"),
        (0, "DISPATCH:vision/0@0", "the schedule was made without dispatch, which only steps of streams have"),
    ],
)
def test_actions_that_do_not_belong_are_found(rank: int, text: str, says: str) -> None:
    action = parse(text.replace(">", "=") if text[0] == "F" else text)
    error = refused(changed(schedule(), lambda lists: lists[rank].append(action)), says)
    assert (error.rank, error.action) == (rank, action)


def test_a_stage_without_backward_has_none() -> None:
    graph = StageGraph.build({"vision": [0], LLM: [1]}, LINKS, trainable={"vision": False})
    damaged = changed(
        one_f_one_b(graph, StepTable.aligned(LINKS, [graph.modules])),
        lambda lists: lists[0].append(parse("B:vision/0@0")),
    )
    refused(damaged, "rank 0 must not have B:vision/0@0: vision/0 has no backward for this chunk on that rank")


def test_the_ranks_of_a_lane_go_in_one_order() -> None:
    sound = in_lanes()
    check(sound)

    def swapped(lists: list[list[Action]]) -> None:
        for one, other in (("F:m/0@0", "F:m/0@1"), ("SEND:m/0@0>1", "SEND:m/0@1>1")):
            swap(lists[1], one, other)

    refused(
        changed(sound, swapped),
        "rank 1 runs F:m/0@1, but rank 0 of its lane runs F:m/0@0: the ranks of a lane must run",
    )


def test_sums_come_after_what_they_sum_and_tied_weights_last() -> None:
    sound = in_lanes()
    tails = [[str(a) for a in actions if a.op is Op.REDUCE_GRAD] for actions in sound.actions[:4]]
    assert tails == [
        ["REDUCE_GRAD:m/0+0", "REDUCE_GRAD:m/0+4"],
        ["REDUCE_GRAD:m/0+1", "REDUCE_GRAD:m/0+5"],
        ["REDUCE_GRAD:m/1+2", "REDUCE_GRAD:m/1+4"],
        ["REDUCE_GRAD:m/1+3", "REDUCE_GRAD:m/1+5"],
    ]
    early = changed(sound, lambda lists: move(lists[0], "REDUCE_GRAD:m/0+0", "B:m/0@1"))
    refused(early, r"rank 0 runs B:m/0@1 after the REDUCE_GRAD of its stage, REDUCE_GRAD:m/0\+0")
    tied = changed(sound, lambda lists: swap(lists[2], "REDUCE_GRAD:m/1+2", "REDUCE_GRAD:m/1+4"))
    refused(tied, "tied weights must be summed after all others")
    lacking = changed(sound, lambda lists: lists[2].remove(parse("REDUCE_GRAD:m/1+4")))
    refused(lacking, r"rank 2 lacks REDUCE_GRAD:m/1\+4")


def test_reductions_keep_one_order() -> None:
    links = [("a", LLM), ("b", LLM)]
    graph = StageGraph.build({"a": [0], "b": [0], LLM: [1]}, links, replicas=2)
    sound = one_f_one_b(graph, StepTable.aligned(links, [graph.modules], replicas=2))
    assert [str(a) for a in sound.actions[0][-3:]] == ["REDUCE_GRAD:b/0+1", "B:a/0@0", "REDUCE_GRAD:a/0+0"]

    def later(lists: list[list[Action]], *ranks: int) -> None:
        for rank in ranks:
            lists[rank].append(lists[rank].pop(-3))

    error = refused(
        changed(sound, lambda lists: later(lists, 0)), "but other ranks after it: all ranks must sum and gather in one"
    )
    assert error.action is not None and error.action.op is Op.REDUCE_GRAD
    check(changed(sound, lambda lists: later(lists, 0, 2)))  # another order, but the same on all ranks


def test_weights_are_whole_where_they_are_used() -> None:
    pipelines = tuple(
        Pipeline("m", r, tuple(Stage("m", i, i, i + 1, Lane((2 * r + i,))) for i in range(2))) for r in range(2)
    )
    layout = Layout({"m": (ParallelSpec(pp=2, dp=2, shard="full"), pipelines)}, 4)
    graph = StageGraph(layout, (), {"m": (True, True)})
    sound = one_f_one_b(graph, StepTable.aligned([], [{"m"}] * 3, replicas=2))
    check(sound)
    assert text_of(sound).splitlines()[1] == (
        "UNSHARD_LAYERS:m/1+1,RECV:m/0@0<0,F:m/1@0,B:m/1@0,SEND_GRAD:m/0@0>0,RECV:m/0@1<0,F:m/1@1,B:m/1@1,SEND_GRAD:m/0@1>0,"
        "RECV:m/0@2<0,F:m/1@2,B:m/1@2,SEND_GRAD:m/0@2>0,RESHARD:m/1+1,REDUCE_GRAD:m/1+1"
    )
    for rank, text, before, says in (
        (
            2,
            "UNSHARD_LAYERS:m/0+0",
            "SEND:m/0@3>3",
            "rank 2 runs F:m/0@3 before UNSHARD_LAYERS:m/0+0, which gathers weights that it needs",
        ),
        (
            1,
            "RESHARD:m/1+1",
            "B:m/1@2",
            "rank 1 runs B:m/1@2 after RESHARD:m/1+1, which releases weights that it needs",
        ),
        (0, "RESHARD:m/0+0", "UNSHARD_LAYERS:m/0+0", "rank 0 runs RESHARD:m/0+0 before UNSHARD_LAYERS:m/0+0"),
    ):
        refused(changed(sound, lambda lists, r=rank, t=text, b=before: move(lists[r], t, b)), re.escape(says))
    for rank, text in ((3, "RESHARD:m/1+1"), (0, "UNSHARD_LAYERS:m/0+0")):
        drop = changed(sound, lambda lists, r=rank, t=text: lists[r].remove(parse(t)))
        refused(drop, rf"rank {rank} lacks {text.replace('+', '.')}")
    evaluation = one_f_one_b(graph, StepTable.aligned([], [{"m"}], replicas=1), backward=False)
    check(evaluation)  # the second replica has no chunk, but slices that the first needs
    assert text_of(evaluation).splitlines()[2] == "UNSHARD:m/0+0,RESHARD:m/0+0"


def two_full_modules() -> StageGraph:
    """Two modules of a layer each, whose two replicas share their weights, on the same two ranks."""
    modules = {
        name: (
            ParallelSpec(dp=2, shard="full"),
            tuple(Pipeline(name, r, (Stage(name, 0, 0, 1, Lane((r,))),)) for r in range(2)),
        )
        for name in ("a", "b")
    }
    return StageGraph(Layout(modules, 2), (), {"a": (True,), "b": (True,)})


def test_a_gather_that_two_ranks_start_at_odds_is_found() -> None:
    graph = two_full_modules()
    sound = one_f_one_b(graph, StepTable.aligned([], [{"a", "b"}], replicas=2), backward=False)
    assert text_of(sound).splitlines()[0] == (
        "UNSHARD_LAYERS:a/0+0,UNSHARD_LAYERS:b/0+1,F:a/0@0,RESHARD:a/0+0,F:b/0@1,RESHARD:b/0+1"
    )
    sound = changed(sound, lambda lists: gather(lists, Op.UNSHARD))
    check(sound)
    swapped = changed(sound, lambda lists: swap(lists[1], "UNSHARD:a/0+0", "UNSHARD:b/0+1"))
    refused(swapped, "all ranks must sum and gather in one common order")

    def late(lists: list[list[Action]]) -> None:  # one order of gathers, but ranks that compute in between wait forever
        for actions, module in zip(lists, "ab", strict=True):
            for text in (f"UNSHARD:{module}/0", f"F:{module}/0", f"RESHARD:{module}/0"):
                actions.append(actions.pop(next(i for i, a in enumerate(actions) if str(a).startswith(text))))

    refused(changed(sound, late), "common order")


def gather(lists: list[list[Action]], op: Op, shards: Collection[int] | None = None) -> None:
    """Makes all ranks gather `shards`, or all shards, by `op`."""
    for actions in lists:
        for i, action in enumerate(actions):
            if action.op in (Op.UNSHARD, Op.UNSHARD_LAYERS) and (shards is None or action.other in shards):
                actions[i] = replace(action, op=op)


def test_who_gathers_layer_by_layer_meets_in_one_order() -> None:
    """Two modules of two replicas on the same ranks; no rank waits for their chunks."""
    graph = two_full_modules()
    sound = gpipe(graph, StepTable.aligned([], [{"a", "b"}] * 2, replicas=2))
    assert {a.op for a in sound.actions[0]} >= {Op.UNSHARD_LAYERS}
    check(sound)

    def forwards(lists: list[list[Action]]) -> None:  # each rank begins with another module
        mine = [i for i, a in enumerate(lists[1]) if a.op is Op.FORWARD]
        first, second = (next(i for i in mine if lists[1][i].module == name) for name in "ab")
        lists[1][first], lists[1][second] = lists[1][second], lists[1][first]

    refused(changed(sound, forwards), "all ranks must sum and gather in one common order")
    once = changed(sound, lambda lists: gather(lists, Op.UNSHARD))
    check(changed(once, forwards))

    def late(lists: list[list[Action]]) -> None:  # a sum of the same ranks before the gathers, and after them
        move(lists[1], "REDUCE_GRAD:b/0+1", "RESHARD:a/0+0")

    refused(changed(sound, late), "all ranks must sum and gather in one common order")
    check(changed(once, late))

    def backwards(lists: list[list[Action]]) -> None:  # one forward and backward after the other, on one rank alone
        mine = [a for a in lists[1] if a.module == "a" and a.op in (Op.FORWARD, Op.BACKWARD)]
        places = [i for i, a in enumerate(lists[1]) if a in mine]
        for place, i in zip(places, (0, 2, 1, 3), strict=True):
            lists[1][place] = mine[i]

    refused(
        changed(sound, backwards), "layer by layer must run equally many forwards and backwards with them in one order"
    )
    check(changed(once, backwards))

    def mixed(lists: list[list[Action]]) -> None:
        gather(lists[1:], Op.UNSHARD)

    refused(changed(sound, mixed), "either all ranks gather weights once, or all of them layer by layer")

    def both(lists: list[list[Action]]) -> None:
        lists[0].insert(0, replace(lists[0][0], op=Op.UNSHARD))

    refused(changed(sound, both), "either all ranks gather weights once, or all of them layer by layer")
    cuts = [[0, 1, 2], [0, 2]]
    pipelines = tuple(
        Pipeline("m", r, tuple(Stage("m", i, *ends, Lane((2 * r + i,))) for i, ends in enumerate(pairwise(cuts[r]))))
        for r in range(2)
    )
    spec = ParallelSpec(pp=2, dp=2, shard="full")
    uneven = StageGraph(Layout({"m": (spec, pipelines)}, 3), (), {"m": (True, True)})
    once = gpipe(uneven, StepTable.aligned([], [{"m"}], replicas=2))
    check(once)
    refused(changed(once, lambda lists: gather(lists, Op.UNSHARD_LAYERS)), "other stages too, .* gather them once")


def test_checker_and_oracle_agree_on_gathers_layer_by_layer() -> None:
    """Also for gathers that generators would not make: some of these would hang."""
    result = {False: 0, True: 0}
    for seed in range(3 * COUNT):
        rng = random.Random(seed)
        case = random_case(seed)
        shards = [place for place, shard in enumerate(case.graph.shards) if case.graph.by_layer(shard)]
        if shards:
            made = rng.choice([gpipe, one_f_one_b])(case.graph, case.table)
            some = rng.sample(shards, rng.randint(1, len(shards)))
            result[verdict(changed(made, lambda lists, some=some: gather(lists, Op.UNSHARD_LAYERS, some)))] += 1
    assert min(result.values()) >= 10, result


def test_split_backwards_are_understood() -> None:
    def split(lists: list[list[Action]]) -> None:
        for rank, actions in enumerate(lists):
            lists[rank] = [
                half
                for a in actions
                for half in (
                    [replace(a, op=Op.BACKWARD_INPUT), replace(a, op=Op.BACKWARD_WEIGHT)]
                    if a.op is Op.BACKWARD
                    else [a]
                )
            ]

    halves = changed(schedule(), split)
    assert check(halves).peak_in_flight == check(schedule()).peak_in_flight
    weight = next(a for a in halves.actions[0] if a.op is Op.BACKWARD_WEIGHT)
    half = replace(weight, op=Op.BACKWARD_INPUT)
    refused(changed(halves, lambda lists: lists[0].remove(weight)), f"rank 0 lacks {weight}, the other half of {half}")
    refused(changed(halves, lambda lists: move(lists[0], str(weight), str(half))), "before its BACKWARD_INPUT")
    both = changed(schedule(), lambda lists: lists[0].append(weight))
    refused(both, f"rank 0 has both {weight} and {replace(weight, op=Op.BACKWARD)}, which contains it")


def test_memory_is_bounded_by_the_chunks_in_flight() -> None:
    sizes = {("vision", 0): 10.0, (LLM, 0): 100.0, (LLM, 1): 1000.0}
    report = check(schedule(8), activation_bytes=sizes)
    assert report.peak_in_flight == (3, 2, 1)
    assert report.peak_memory == (30.0, 200.0, 1000.0)
    check(schedule(8), activation_bytes=sizes, memory_limit=1000)
    error = refused(
        schedule(8),
        "rank 1 holds 200 bytes .2 forwards in flight. at F:language_model/0@3, over its limit of 199; it would",
        activation_bytes=sizes,
        memory_limit=[30, 199, 1000],
    )
    assert error.rank == 1 and error.action == Action(Op.FORWARD, LLM, 0, 3)
    assert check(schedule(8), activation_bytes={**sizes, ("vision", 0, 4): 15.0}).peak_memory == (35.0, 200.0, 1000.0)
    whole = gpipe(schedule().graph, schedule(8).table)
    assert check(whole, activation_bytes=sizes).peak_memory == (80.0, 800.0, 8000.0)


def test_forwards_without_backward_hold_nothing_afterwards() -> None:
    graph = StageGraph.build({"vision": [0], LLM: [1]}, LINKS, trainable={"vision": False})
    table = StepTable.aligned(LINKS, [graph.modules] * 5)
    report = check(one_f_one_b(graph, table), activation_bytes={("vision", 0): 7.0, (LLM, 0): 1.0})
    assert report.peak_in_flight == (0, 1) and report.peak_memory == (7.0, 1.0)


def test_peaks_are_those_read_off_the_lists() -> None:
    for seed in range(COUNT // 4):
        case = random_case(seed)
        sizes = {(s.module, s.index): 1.0 + i for i, s in enumerate(case.graph.layout.stages())}
        chunk = case.table.chunks[0]
        sizes[chunk.module, 0, 0] = 50.0  # type: ignore[index]
        sound = one_f_one_b(case.graph, case.table)
        report = check(sound, activation_bytes=sizes)
        peaks = [peak(actions, sizes) for actions in sound.actions]
        assert report.peak_in_flight == tuple(p.in_flight for p in peaks)
        assert report.peak_memory == tuple(p.bytes for p in peaks)


def test_reports_count_rows() -> None:
    report = check(in_lanes())
    assert report.messages == 2 * 2 * 2 * 2  # replicas, chunks, directions, ranks of a lane
    assert report.actions == len(in_lanes().rows)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="memory_limit needs activation_bytes"):
        check(schedule(), memory_limit=1)
    for key in (("vision", 3), ("x", 0), ("vision", 0, 6)):
        with pytest.raises(ValueError, match="which is no"):
            check(schedule(), activation_bytes={key: 1.0})
    with pytest.raises(ValueError, match="memory_limit has 2 entries, expected one or 3"):
        check(schedule(), activation_bytes={("vision", 0): 1.0}, memory_limit=[1, 1])
    refused(changed(schedule(), lambda lists: lists.pop()), "lists for 2 ranks, but its graph has 3 ranks")
    sound = schedule()
    for column, value, says in ((0, 99, "has the op 99, which is none"), (1, 7, "names module 7 of 2")):
        rows = sound.rows.copy()
        rows[0, column] = value
        with pytest.raises(ValueError, match=says):
            check(replace(sound, rows=rows))
    with pytest.raises(ValueError, match="dtype int64"):
        check(replace(sound, rows=sound.rows.astype(np.int64)))


def test_a_forward_that_only_another_lane_needs_is_still_due() -> None:
    graph = StageGraph.build({"vision": [(0, 1)], LLM: [0, 1]}, LINKS)
    sound = one_f_one_b(graph, table_of({("vision", 0): 1, (LLM, 0): 1}, [("vision", 0, 0, LLM, 0, 0)]))
    damaged = changed(sound, lambda lists: lists[1].remove(parse("F:vision/0@0")))
    refused(damaged, "rank 1 lacks F:vision/0@0")


def damage(rng: random.Random, lists: list[list[Action]]) -> None:
    """One error, or a change that only looks like one."""
    rank = rng.choice([r for r, actions in enumerate(lists) if actions])
    actions = lists[rank]
    i, j = rng.randrange(len(actions)), rng.randrange(len(actions))
    match rng.choice(["drop", "swap", "neighbours", "double", "move", "give", "retarget", "split"]):
        case "drop":
            del actions[i]
        case "swap":
            actions[i], actions[j] = actions[j], actions[i]
        case "neighbours" if i:
            actions[i - 1], actions[i] = actions[i], actions[i - 1]
        case "double":
            actions.insert(j, actions[i])
        case "move":
            actions.insert(j, actions.pop(i))
        case "give":
            other = rng.choice(lists)
            other.insert(rng.randint(0, len(other) - (other is actions)), actions.pop(i))
        case "retarget":
            name = rng.choice(["op", "stage", "chunk", "other", "peer", "grad"])
            old = getattr(actions[i], name)
            value = rng.choice(list(Op)) if name == "op" else not old if name == "grad" else old + rng.choice([-1, 1])
            actions[i] = replace(actions[i], **{name: value})
        case "split":
            whole = [k for k, a in enumerate(actions) if a.op is Op.BACKWARD]
            if whole:
                k = rng.choice(whole)
                weight = replace(actions[k], op=Op.BACKWARD_WEIGHT)
                actions[k] = replace(actions[k], op=Op.BACKWARD_INPUT)
                actions.insert(rng.randint(k if rng.random() < 0.2 else k + 1, len(actions)), weight)


def verdict(damaged: Schedule) -> bool:
    """The checker's verdict, which must equal the oracle's."""
    sound = runs(damaged)
    if sound:
        check(damaged)
    else:
        with pytest.raises(ScheduleError):
            check(damaged)
    return sound


def test_checker_and_oracle_agree_on_damaged_schedules() -> None:
    sound = 0
    for seed in range(COUNT):
        rng = random.Random(seed)
        case = random_case(seed)
        whole = rng.choice([gpipe, one_f_one_b])(case.graph, case.table)
        times = rng.choice([1, 1, 2])
        sound += verdict(changed(whole, lambda lists, rng=rng, times=times: [damage(rng, lists) for _ in range(times)]))
    assert COUNT // 10 < sound < COUNT // 2  # the test needs verdicts of both kinds


def test_shuffled_lists_run_or_are_refused() -> None:
    def shuffle(rng: random.Random, lists: list[list[Action]]) -> None:
        for actions in rng.sample(lists, rng.randint(1, len(lists))):
            rng.shuffle(actions)

    result = set()
    for seed in range(COUNT):
        rng = random.Random(seed)
        case = random_case(seed, max_ranks=3, max_chunks=rng.choice([1, 2]))
        result.add(verdict(changed(one_f_one_b(case.graph, case.table), lambda lists, rng=rng: shuffle(rng, lists))))
    assert result == {False, True}
