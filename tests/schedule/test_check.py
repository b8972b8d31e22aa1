"""The checker: every kind of damage is found and named."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from interlace.schedule import Action, Op, Schedule, ScheduleError, StageGraph, check, gpipe, one_f_one_b
from tests.schedule.graphs import Case, cases, fixpoint_times

LLM = "language_model"


def schedule(microbatches: int = 3) -> Schedule:
    graph = StageGraph.build({"vision": [0], LLM: [1, 2]}, [("vision", LLM)])
    return one_f_one_b(graph, graph.everything(microbatches))


def refused(damaged: Schedule, says: str, **limits: object) -> ScheduleError:
    with pytest.raises(ScheduleError, match=says) as caught:
        check(damaged, **limits)  # type: ignore[arg-type]
    return caught.value


def move(damaged: Schedule, rank: int, text: str, before: str) -> None:
    actions = damaged.actions[rank]
    action = actions.pop(actions.index(Action.parse(text)))
    actions.insert(actions.index(Action.parse(before)), action)


def test_a_deadlock_names_every_rank_that_waits_and_for_what() -> None:
    graph = StageGraph.build({"m": [0, 1]})
    damaged = gpipe(graph, graph.everything(2))
    # Rank 0 wants a gradient before it sends what that gradient depends on.
    lists = [[str(a) for a in actions] for actions in damaged.actions]
    order = ["F:m/0@0", "RECV_GRAD:m/0@0<1", "SEND:m/0@0>1"]
    rest = [text for text in lists[0] if text not in order]
    damaged.actions[0] = [Action.parse(text) for text in order + rest]
    error = refused(damaged, "deadlock")
    assert str(error).splitlines()[1:] == [
        "  rank 0: RECV_GRAD:m/0@0<1 (action 1) waits for rank 1, which is at RECV:m/0@0<0",
        "  rank 1: RECV:m/0@0<0 (action 0) waits for rank 0, which is at RECV_GRAD:m/0@0<1",
    ]
    assert (error.rank, str(error.action)) == (0, "RECV_GRAD:m/0@0<1")


def test_messages_out_of_order_are_found() -> None:
    damaged = schedule()
    actions = damaged.actions[0]
    first, second = (actions.index(Action.parse(f"SEND:vision/0@{k}>1")) for k in (0, 1))
    actions[first], actions[second] = actions[second], actions[first]
    refused(damaged, r"rank 0 runs SEND:vision/0@1>1 before the forward that makes it")
    damaged = schedule()
    # Swap two receives: both ends are present, but the channel delivers in the order of the sends.
    actions = damaged.actions[1]
    first, second = (actions.index(Action.parse(f"RECV:vision/0@{k}<0")) for k in (0, 1))
    actions[first], actions[second] = actions[second], actions[first]
    error = refused(damaged, r"rank 1 expects RECV:vision/0@1<0 but the next message from rank 0 is SEND:vision/0@0>1")
    assert error.rank == 1


@pytest.mark.parametrize(
    ("rank", "text", "before", "says"),
    [
        (0, "B:vision/0@0", "RECV_GRAD:vision/0@0<1", "before it has the gradient from language_model/0"),
        (0, "F:vision/0@1", "F:vision/0@0", None),
        (1, "F:language_model/0@0", "RECV:vision/0@0<0", "before it has the output of vision/0"),
        (2, "B:language_model/1@0", "F:language_model/1@0", "before its forward"),
        (1, "SEND_GRAD:vision/0@0>0", "B:language_model/0@0", "before the backward of language_model/0"),
        (0, "REDUCE_GRAD:vision/0", "B:vision/0@2", "after the REDUCE_GRAD of its stage"),
    ],
)
def test_actions_out_of_order_are_found(rank: int, text: str, before: str, says: str | None) -> None:
    damaged = schedule()
    move(damaged, rank, text, before)
    if says is None:
        check(damaged)  # another order of forwards is sound as long as messages match
    else:
        error = refused(damaged, says)
        assert error.rank == rank


@pytest.mark.parametrize(
    ("rank", "text", "says"),
    [
        (1, "F:vision/0@0", "rank 1 must not have F:vision/0@0: vision/0 is on rank 0"),
        (0, "F:vision/1@0", "its graph has no stage vision/1"),
        (0, "F:vision/0@9", "the step has microbatches 0 to 2"),
        (0, "SEND:vision/0@0>2", "no stage needs that message"),
        (0, "REDUCE_GRAD:language_model/0", "no gradients to reduce here"),
    ],
)
def test_actions_that_do_not_belong_are_found(rank: int, text: str, says: str) -> None:
    damaged = schedule()
    damaged.actions[rank].append(Action.parse(text))
    refused(damaged, says)


def test_actions_of_absent_modules_are_found() -> None:
    graph = StageGraph.build({"vision": [0], LLM: [1]}, [("vision", LLM)])
    damaged = one_f_one_b(graph, [{"vision", LLM}, {LLM}])
    damaged.actions[0].append(Action(Op.FORWARD, "vision", 0, 1))
    refused(damaged, "vision is absent from microbatch 1")


def test_reductions_keep_one_order() -> None:
    graph = StageGraph.build({"a": [(0, 1)], "b": [(0, 1)], LLM: [0]}, [("a", LLM), ("b", LLM)])
    damaged = one_f_one_b(graph, graph.everything(1))
    actions = damaged.actions[1]
    actions[-1], actions[-2] = actions[-2], actions[-1]
    refused(damaged, "all ranks must reduce in one common order")


def tied_schedule(**more: int) -> Schedule:
    graph = StageGraph.build({"vision": [0], LLM: [1, 2]}, [("vision", LLM)], tied=[[(LLM, 0), (LLM, 1)]], **more)
    return one_f_one_b(graph, [{LLM}] * 2, active={"vision"})


def test_tied_weights_and_modules_of_other_replicas_are_reduced_in_the_checked_lists() -> None:
    sound = tied_schedule()
    check(sound)
    tails = [[str(a) for a in actions if a.op is Op.REDUCE_GRAD] for actions in sound.actions]
    tied = f"REDUCE_GRAD:{LLM}/0+1"
    assert tails == [["REDUCE_GRAD:vision/0"], [f"REDUCE_GRAD:{LLM}/0", tied], [f"REDUCE_GRAD:{LLM}/1", tied]]
    assert Schedule.parse_actions(sound.to_text()) == sound.actions

    lacking = tied_schedule()
    lacking.actions[2].pop()
    refused(lacking, f"rank 2 lacks REDUCE_GRAD:{LLM}/0\\+1")
    early = tied_schedule()
    move(early, 2, tied, f"B:{LLM}/1@1")
    refused(early, "all ranks must reduce in one common order|after the REDUCE_GRAD of its stage")
    with pytest.raises(ValueError, match="active names 'audio'"):
        one_f_one_b(sound.graph, [{LLM}], active={"audio"})
    with pytest.raises(ValueError, match="a group is two or more"):
        replace(sound.graph, tied=((1,),))
    with pytest.raises(ValueError, match="replicas is 0"):
        replace(sound.graph, replicas=0)


def test_nothing_is_sent_after_a_reduction_that_waits_for_other_replicas() -> None:
    for replicas in (1, 2):
        late = tied_schedule(replicas=replicas)
        check(late)
        move(late, 2, f"REDUCE_GRAD:{LLM}/1", f"SEND_GRAD:{LLM}/0@1>1")
        if replicas == 1:
            check(late)
        else:
            refused(
                late, f"rank 2 runs SEND_GRAD:{LLM}/0@1>1 after REDUCE_GRAD:{LLM}/1, which waits for other replicas"
            )


def test_split_backwards_are_understood() -> None:
    def split(old: Schedule) -> Schedule:
        lists = [
            [
                half
                for a in actions
                for half in (
                    [replace(a, op=Op.BACKWARD_INPUT), replace(a, op=Op.BACKWARD_WEIGHT)]
                    if a.op is Op.BACKWARD
                    else [a]
                )
            ]
            for actions in old.actions
        ]
        return replace(old, actions=lists)

    assert check(split(schedule())).peak_in_flight == check(schedule()).peak_in_flight
    damaged = split(schedule())
    weight = next(a for a in damaged.actions[0] if a.op is Op.BACKWARD_WEIGHT)
    damaged.actions[0].remove(weight)
    refused(damaged, f"rank 0 lacks {weight}, the other half of")
    damaged = split(schedule())
    move(damaged, 0, str(weight), str(replace(weight, op=Op.BACKWARD_INPUT)))
    refused(damaged, "before its BACKWARD_INPUT")


def test_memory_is_bounded_by_the_in_flight_microbatches() -> None:
    sizes = {("vision", 0): 10.0, (LLM, 0): 100.0, (LLM, 1): 1000.0}
    report = check(schedule(8), activation_bytes=sizes)
    assert report.peak_in_flight == (3, 2, 1)
    assert report.peak_memory == (30.0, 200.0, 1000.0)
    check(schedule(8), activation_bytes=sizes, memory_limit=1000)
    error = refused(
        schedule(8),
        "rank 1 holds 200 bytes .* over its limit of 199",
        activation_bytes=sizes,
        memory_limit=[30, 199, 1000],
    )
    assert error.rank == 1 and error.action == Action(Op.FORWARD, LLM, 0, 1)
    graph = schedule().graph
    assert check(gpipe(graph, graph.everything(8)), activation_bytes=sizes).peak_memory == (80.0, 800.0, 8000.0)


def test_forwards_without_backward_hold_nothing_afterwards() -> None:
    graph = StageGraph.build({"vision": [0], LLM: [1]}, [("vision", LLM)], trainable={"vision": False})
    report = check(one_f_one_b(graph, graph.everything(5)), activation_bytes={("vision", 0): 7.0, (LLM, 0): 1.0})
    assert report.peak_in_flight == (0, 1) and report.peak_memory == (7.0, 1.0)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="memory_limit needs activation_bytes"):
        check(schedule(), memory_limit=1)
    with pytest.raises(ValueError, match="which is no"):
        check(schedule(), activation_bytes={("vision", 3): 1.0})
    with pytest.raises(ValueError, match="2 entries for 3 ranks"):
        check(schedule(), activation_bytes={("vision", 0): 1.0}, memory_limit=[1, 1])
    damaged = schedule()
    damaged.actions.pop()
    refused(damaged, "lists for 2 ranks, its graph 3")


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_missing_or_doubled_action_is_always_found(case: Case, data: st.DataObject) -> None:
    damaged = one_f_one_b(case.graph, case.presence)
    places = [(rank, i) for rank, actions in enumerate(damaged.actions) for i in range(len(actions))]
    assume(places)
    rank, i = data.draw(st.sampled_from(places))
    action = damaged.actions[rank][i]
    if data.draw(st.booleans()):
        del damaged.actions[rank][i]
        error = refused(damaged, "lacks")
    else:
        damaged.actions[rank].insert(data.draw(st.integers(0, len(damaged.actions[rank]))), action)
        error = refused(damaged, "times")
    assert (error.rank, error.action) == (rank, action)


@given(cases(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_shuffled_schedule_is_refused_unless_it_still_runs(case: Case, data: st.DataObject) -> None:
    damaged = gpipe(case.graph, case.presence)
    ranks = [rank for rank, actions in enumerate(damaged.actions) if len(actions) > 1]
    assume(ranks)
    for _ in range(data.draw(st.integers(1, 2))):
        actions = damaged.actions[data.draw(st.sampled_from(ranks))]
        i, j = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        actions[i], actions[j] = actions[j], actions[i]
    try:
        check(damaged)
    except ScheduleError:
        assert not runs(damaged)
    else:
        assert runs(damaged)


def runs(damaged: Schedule) -> bool:
    """Whether the lists respect every dependency, by finish times that count one second per action."""
    graph = damaged.graph
    for rank, actions in enumerate(damaged.actions):
        for peer, other in enumerate(damaged.actions):
            out = [replace(a, op=Op.RECV, peer=rank) for a in actions if a.op is Op.SEND and a.peer == peer]
            if out != [a for a in other if a.op is Op.RECV and a.peer == rank]:
                return False
        seen = {s: i for i, s in enumerate(a for a in actions)}
        reductions = [
            graph.topological.index(graph.position[a.module, a.stage]) for a in actions if a.op is Op.REDUCE_GRAD
        ]
        if reductions != sorted(reductions, reverse=True):
            return False
        for action, i in seen.items():
            for needed in needs(graph, rank, action, seen):
                if needed in seen and seen[needed] > i:
                    return False
    ones = {
        (a.op, a.module, a.stage, a.microbatch): 1.0 for actions in damaged.actions for a in actions if a.op in "FB"
    }
    try:
        fixpoint_times(damaged, ones, 1.0, 1.0)
    except AssertionError:
        return False
    return True


def needs(graph: StageGraph, rank: int, action: Action, own: dict[Action, int]) -> list[Action]:
    """What must stand before `action` in the same list, among what the list has."""
    position = graph.position.get((action.module, action.stage))
    k = action.microbatch
    consumers = [graph.stages[c] for p, c in graph.edges if p == position]
    producers = [graph.stages[p] for p, c in graph.edges if c == position]
    out: list[Action] = []
    if action.op is Op.FORWARD:
        for stage in producers:
            out += [
                a for a in own if a.op is Op.RECV and not a.grad and (a.module, a.stage) == (stage.module, stage.index)
            ]
            if rank in stage.ranks:
                out.append(Action(Op.FORWARD, stage.module, stage.index, k))
    elif action.op is Op.BACKWARD:
        out.append(replace(action, op=Op.FORWARD))
        out += [
            Action(Op.BACKWARD, c.module, c.index, k) for c in consumers if feeds(graph, rank, rank, position, c.ranks)
        ]
        out += [a for a in own if a.op is Op.RECV and a.grad and (a.module, a.stage) == (action.module, action.stage)]
    elif action.op is Op.SEND and not action.grad:
        out.append(Action(Op.FORWARD, action.module, action.stage, k))
    elif action.op is Op.SEND:
        out += [
            Action(Op.BACKWARD, c.module, c.index, k)
            for c in consumers
            if feeds(graph, action.peer, rank, position, c.ranks)
        ]
    elif action.op is Op.REDUCE_GRAD:
        out += [a for a in own if a.op is Op.BACKWARD and (a.module, a.stage) == (action.module, action.stage)]
        return out
    return [a for a in out if a.microbatch == k]


def feeds(graph: StageGraph, source: int, reader: int, position: int | None, ranks: tuple[int, ...]) -> bool:
    """Whether the copy of `position` on rank `source` is read on rank `reader` by a stage that runs on `ranks`."""
    assert position is not None
    copies = graph.stages[position].ranks
    return reader in ranks and (reader if reader in copies else copies[0]) == source
