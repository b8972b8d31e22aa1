"""GPipe and 1F1B: textbook orders, and invariants for every layout, freezing and table."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.layout import Lane, Layout, ParallelSpec, Pipeline, Stage
from interlace.schedule import Op, Schedule, StageGraph, StepTable, check, gpipe, one_f_one_b
from tests.schedule.graphs import random_case, table_of
from tests.schedule.oracle import Demand, Events, compute_text, in_flight
from tests.schedule.text import text_of

LLM = "language_model"
BOTH = [("vision", LLM), ("audio", LLM)]
COSTS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}
COUNT = 500
"""Random cases of each property test."""


def chain(stages: int) -> StageGraph:
    return StageGraph.build({"m": list(range(stages))})


def aligned(graph: StageGraph, chunks: int, replicas: int = 1) -> StepTable:
    return StepTable.aligned(graph.links, [graph.modules] * chunks, replicas=replicas)


def texts(schedule: Schedule) -> list[str]:
    return [compute_text(schedule, rank) for rank in range(schedule.graph.layout.world)]


def test_textbook_1f1b() -> None:
    graph = chain(4)
    assert texts(one_f_one_b(graph, aligned(graph, 6))) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_textbook_gpipe() -> None:
    graph = chain(2)
    schedule = gpipe(graph, aligned(graph, 3))
    assert texts(schedule) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert [str(action) for action in schedule.actions[1]] == [
        "RECV:m/0@0<0", "F:m/1@0", "RECV:m/0@1<0", "F:m/1@1", "RECV:m/0@2<0", "F:m/1@2",
        "B:m/1@0", "SEND_GRAD:m/0@0>0", "B:m/1@1", "SEND_GRAD:m/0@1>0", "B:m/1@2", "SEND_GRAD:m/0@2>0",
    ]  # fmt: skip


def test_evaluation_runs_forwards_only() -> None:
    graph = StageGraph.build({"m": [0, 1]}, replicas=2)
    for generate in (gpipe, one_f_one_b):
        schedule = generate(graph, aligned(graph, 2, 2), backward=False)
        check(schedule)
        assert text_of(schedule).splitlines()[:2] == [
            "F:m/0@0,SEND:m/0@0>1,F:m/0@1,SEND:m/0@1>1",
            "RECV:m/0@0<0,F:m/1@0,RECV:m/0@1<0,F:m/1@1",
        ]


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_uniform_chain_takes_the_textbook_time_and_memory(p: int, m: int, forward: int, backward: int) -> None:
    graph = chain(p)
    for generate in (gpipe, one_f_one_b):
        schedule = generate(graph, aligned(graph, m))
        assert Events(schedule).span({Op.FORWARD: forward, Op.BACKWARD: backward}) == (m + p - 1) * (forward + backward)
        want = (m,) * p if generate is gpipe else tuple(min(m, p - stage) for stage in range(p))
        assert check(schedule).peak_in_flight == want


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_1f1b_is_the_classical_order_written_out(p: int, m: int, lane: int, replicas: int) -> None:
    pipelines = tuple(
        Pipeline(
            "m",
            r,
            tuple(
                Stage("m", i, i, i + 1, Lane(tuple(range((r * p + i) * lane, (r * p + i + 1) * lane))))
                for i in range(p)
            ),
        )
        for r in range(replicas)
    )
    layout = Layout({"m": (ParallelSpec(cp=lane, pp=p, dp=replicas), pipelines)}, p * lane * replicas)
    graph = StageGraph(layout, (), {"m": (True,) * p})
    result = texts(one_f_one_b(graph, aligned(graph, m, replicas)))
    for rank, text in enumerate(result):
        warm_up = min(m, p - 1 - rank // lane % p)
        want = [f"F{k}" for k in range(warm_up)]
        for k in range(m - warm_up):
            want += [f"F{k + warm_up}", f"B{k}"]
        want += [f"B{k}" for k in range(m - warm_up, m)]
        assert text.split() == want


def test_parallel_encoders_run_ahead_by_cornstarchs_counts() -> None:
    graph = StageGraph.build({"vision": [0, 1], "audio": [2], LLM: [3, 4]}, BOTH)
    schedule = one_f_one_b(graph, aligned(graph, 8))
    assert [text.split().index("B0") - 1 for text in texts(schedule)] == [3, 2, 2, 1, 0]
    # Balanced stages pipeline as one chain as long as the longest path.
    assert Events(schedule).span(COSTS) == (8 + 4 - 1) * 3


def test_everything_on_one_rank() -> None:
    graph = StageGraph.build({"vision": [0], "audio": [0], LLM: [0, 0]}, BOTH)
    table = table_of(
        {("vision", 0): 2, ("audio", 0): 2, (LLM, 0): 2},
        [(name, 0, k, LLM, 0, k) for name in ("vision", "audio") for k in range(2)],
    )
    once = "F:vision/0@{0} F:audio/0@{1} F:language_model/0@{2} F:language_model/1@{2} " \
        "B:language_model/1@{2} B:language_model/0@{2} B:audio/0@{1} B:vision/0@{0}"  # fmt: skip
    result = one_f_one_b(graph, table).actions[0]
    assert list(map(str, result)) == [*once.format(0, 2, 4).split(), *once.format(1, 3, 5).split()]


def test_merged_encoders_share_a_rank_and_its_depth() -> None:
    graph = StageGraph.build({"vision": [0, 1], "audio": [0, 1], LLM: [2]}, BOTH)
    schedule = one_f_one_b(graph, aligned(graph, 4))
    rank = [a for a in schedule.actions[1] if a.op in (Op.FORWARD, Op.BACKWARD)]
    assert [f"{a.op.value}:{a.module}" for a in rank][:6] == [
        "F:vision", "F:audio", "F:vision", "F:audio", "B:audio", "B:vision",
    ]  # fmt: skip


def test_replicated_encoders_run_backward_only_where_read() -> None:
    graph = StageGraph.build({"vision": [(0, 1, 2)], LLM: [0, 1, 2]}, BOTH[:1])
    schedule = one_f_one_b(graph, aligned(graph, 2))
    for rank, actions in enumerate(schedule.actions):
        ops = [a.op for a in actions if a.module == "vision"]
        assert ops.count(Op.FORWARD) == 2 and ops.count(Op.BACKWARD) == (2 if rank == 0 else 0)
        assert ops.count(Op.SEND) == ops.count(Op.RECV) == 0
        assert ops.count(Op.REDUCE_GRAD) == 1
    check(schedule)


def test_frozen_encoders_send_no_gradients() -> None:
    graph = StageGraph.build({"vision": [0, 1], LLM: [2]}, BOTH[:1], trainable={"vision": [False, True]})
    schedule = one_f_one_b(graph, aligned(graph, 3))
    assert {a.op for a in schedule.actions[0]} == {Op.FORWARD, Op.SEND}
    assert not any(a.grad and a.stage == 0 for a in schedule.actions[1])
    assert any(a.grad and a.stage == 1 for a in schedule.actions[1])


def test_frozen_llm_has_a_backward_only_for_trainable_inputs() -> None:
    graph = StageGraph.build({"vision": [0], LLM: [1, 2]}, BOTH[:1], trainable={LLM: False})
    table = StepTable.aligned(BOTH[:1], [{LLM}, {"vision", LLM}])
    schedule = one_f_one_b(graph, table)
    assert texts(schedule) == ["F0 B0", "F0 F1 B1", "F0 F1 B1"]
    check(schedule)


def test_absent_modules_have_no_actions() -> None:
    graph = StageGraph.build({"vision": [0], "audio": [1], LLM: [2, 3]}, BOTH, replicas=2)
    table = StepTable.aligned(BOTH, [{LLM}, {LLM}], replicas=2)
    schedule = one_f_one_b(graph, table)
    assert schedule.actions[0] == schedule.actions[1] == []
    check(schedule)


def test_replicas_without_a_chunk_join_gradient_reductions() -> None:
    graph = StageGraph.build({"vision": [0], LLM: [1]}, BOTH[:1], replicas=2)
    table = table_of({("vision", 0): 1, (LLM, 0): 1, (LLM, 1): 1}, [("vision", 0, 0, LLM, 0, 0)])
    schedule = one_f_one_b(graph, table)
    assert [str(a) for a in schedule.actions[2]] == ["REDUCE_GRAD:vision/0+0"]
    check(schedule)
    without = one_f_one_b(graph, table, reduce_grad=False)
    assert without.actions[2] == []
    check(without)


def test_replica_without_a_chunk_reduces_its_tied_weights() -> None:
    """At that point it has the sum over replicas of each weight, in two parts on two ranks."""
    graph = StageGraph.build({LLM: [0, 1]}, tied=[((LLM, 0), (LLM, 1))], replicas=2)
    for generate in (gpipe, one_f_one_b):
        schedule = generate(graph, aligned(graph, 2, 1))
        check(schedule)
        assert text_of(schedule).splitlines()[2:] == [
            f"REDUCE_GRAD:{LLM}/0+0,REDUCE_GRAD:{LLM}/0+3", f"REDUCE_GRAD:{LLM}/1+1,REDUCE_GRAD:{LLM}/1+3",
        ]  # fmt: skip


def test_rare_encoders_run_ahead_within_their_memory() -> None:
    # Read by the chunks 0, 5, 6 only: the chunk for 5 need not wait for the backward of the one for 0.
    graph = StageGraph.build({"vision": [0], LLM: [1]}, BOTH[:1])
    table = StepTable.aligned(BOTH[:1], [{"vision", LLM} if k in (0, 5, 6) else {LLM} for k in range(8)])
    assert compute_text(one_f_one_b(graph, table), 0) == "F0 F1 B0 F2 B1 B2"


def test_one_encoder_chunk_feeds_several_chunks_of_two_replicas() -> None:
    modules = {
        "vision": (ParallelSpec(), (Pipeline("vision", 0, (Stage("vision", 0, 0, 1, Lane((0,))),)),)),
        LLM: (
            ParallelSpec(dp=2),
            tuple(Pipeline(LLM, r, (Stage(LLM, 0, 0, 1, Lane((1 + r,))),)) for r in range(2)),
        ),
    }
    graph = StageGraph(Layout(modules, 3), tuple(BOTH[:1]), {"vision": (True,), LLM: (True,)})
    pairs = [("vision", 0, k // 2, LLM, r, k) for k in range(4) for r in range(2)]
    schedule = one_f_one_b(graph, table_of({("vision", 0): 2, (LLM, 0): 4, (LLM, 1): 4}, pairs))
    check(schedule)
    # Chunk 0 is held until chunk 1 of both replicas has gone back; chunk 1 is due when chunk 2 is, which is earlier.
    assert texts(schedule) == ["F0 F1 B0 B1", "F0 B0 F1 B1 F2 B2 F3 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    sends = [str(a) for a in schedule.actions[0] if a.op is Op.SEND]
    assert sends == [f"SEND:vision/0@{k // 4}+{c}>{lane}" for k, (c, lane) in enumerate(
        [(2, 1), (3, 1), (6, 2), (7, 2), (4, 1), (5, 1), (8, 2), (9, 2)]
    )]  # fmt: skip


def test_a_deferral_longer_than_the_pipeline_does_not_get_stuck() -> None:
    # The first encoder chunk is read last: a limit of d + 1 chunks would block the others forever.
    graph = StageGraph.build({"vision": [0], LLM: [1]}, BOTH[:1])
    pairs = [("vision", 0, 0, LLM, 0, 7), *(("vision", 0, k, LLM, 0, k - 1) for k in range(1, 8))]
    pairs += [("vision", 0, 0, LLM, 0, 0)]
    schedule = one_f_one_b(graph, table_of({("vision", 0): 8, (LLM, 0): 8}, pairs))
    assert check(schedule).peak_in_flight == (3, 1)
    assert compute_text(schedule, 0).endswith("B7 B0")


def test_shared_ranks_take_turns() -> None:
    """Encoder replicas of one rank each on the two ranks of the language model's lane."""
    modules = {
        "vision": (
            ParallelSpec(dp=2),
            tuple(Pipeline("vision", r, (Stage("vision", 0, 0, 1, Lane((r,))),)) for r in range(2)),
        ),
        LLM: (ParallelSpec(tp=2), (Pipeline(LLM, 0, (Stage(LLM, 0, 0, 1, Lane((0, 1))),)),)),
    }
    graph = StageGraph(Layout(modules, 2), tuple(BOTH[:1]), {"vision": (True,), LLM: (True,)})
    pairs = [("vision", r, k, LLM, 0, k) for k in range(2) for r in range(2)]
    schedule = one_f_one_b(graph, table_of({("vision", 0): 2, ("vision", 1): 2, (LLM, 0): 2}, pairs))
    check(schedule)
    assert [str(a) for a in schedule.actions[1]][:6] == [
        "F:vision/0@2", "SEND:vision/0@2+4>2", "RECV:vision/0@0+4<0", "RECV:vision/0@2+4<1",
        "F:language_model/0@4", "B:language_model/0@4",
    ]  # fmt: skip


def step_of(shares: dict[str, float]) -> dict[tuple[Op, str], float]:
    return {(op, module): share * COSTS[op] for module, share in shares.items() for op in COSTS}


@pytest.mark.parametrize(
    ("homes", "shares", "span"),
    [
        ({"vision": [0, 1], "audio": [0, 1], LLM: [2, 3]}, {"vision": 0.5, "audio": 0.5, LLM: 1.0}, 43.5),
        ({"vision": [0], "audio": [0], LLM: [1, 2, 3]}, {"vision": 0.3, "audio": 0.1, LLM: 1.0}, 43.2),
        ({"vision": [0], LLM: [1, 2, 1, 2]}, {"vision": 1.0, LLM: 0.5}, 43.5),
        ({"vision": [0], LLM: [0, 1, 2, 3]}, {"vision": 0.5, LLM: 1.0}, 58.5),
    ],
)
def test_stages_that_share_a_rank_share_a_round(
    homes: dict[str, list[int]], shares: dict[str, float], span: float
) -> None:
    """Without durations, a rank with several stages does not run its forwards and backwards in bursts."""
    graph = StageGraph.build(homes, [(module, LLM) for module in homes if module != LLM])
    schedule = one_f_one_b(graph, aligned(graph, 12))
    check(schedule)
    seconds = step_of(shares)
    assert Events(schedule).span(lambda a: seconds[a.op, a.module]) == pytest.approx(span)


def test_exact_durations_do_not_prevent_a_better_order() -> None:
    """Lists from the exact durations alone would end after 75.6, since the slowest lane gets them in bursts."""
    graph = StageGraph.build({"vision": [0], "audio": [0], LLM: [1, 2, 3]}, BOTH)
    seconds = step_of({"vision": 1.0, "audio": 0.8, LLM: 1.0})
    spans = [
        Events(one_f_one_b(graph, aligned(graph, 12), durations=durations)).span(lambda a: seconds[a.op, a.module])
        for durations in (seconds, None)
    ]
    assert spans == pytest.approx([68.4, 68.4])


@pytest.mark.parametrize(("chunks", "spans"), [(8, [43.6, 40.2]), (16, [77.2, 71.4])])
def test_encoders_on_shared_ranks_come_last(chunks: int, spans: list[float]) -> None:
    """Four replicas, each encoding once, on the four ranks of a language model.

    If a backward of an encoder ran as early as possible, it would delay the pipeline by its whole duration.
    """
    modules = {
        "vision": (
            ParallelSpec(dp=4),
            tuple(Pipeline("vision", r, (Stage("vision", 0, 0, 1, Lane((r,))),)) for r in range(4)),
        ),
        LLM: (ParallelSpec(pp=4), (Pipeline(LLM, 0, tuple(Stage(LLM, i, i, i + 1, Lane((i,))) for i in range(4))),)),
    }
    graph = StageGraph(Layout(modules, 4), tuple(BOTH[:1]), {"vision": (True,), LLM: (True,) * 4})
    pairs = [("vision", k % 4, 0, LLM, 0, k) for k in range(chunks)]
    table = table_of({**{("vision", r): 1 for r in range(4)}, (LLM, 0): chunks}, pairs)
    seconds = step_of({"vision": 0.3 * chunks, LLM: 1.0})
    for generate, span in zip((gpipe, one_f_one_b), spans, strict=True):
        assert Events(generate(graph, table)).span(lambda a: seconds[a.op, a.module]) == pytest.approx(span)
    held = {(stage.module, stage.index): 1.0 for stage in graph.layout.stages()}
    for limit in (3, 4, 5):
        kept = one_f_one_b(graph, table, memory_limit=limit, activation_bytes=held)
        assert max(check(kept, activation_bytes=held).peak_memory) == limit


def test_interleaved_stages_halve_the_bubble() -> None:
    interleaved = StageGraph.build({"m": [0, 1, 2, 3, 0, 1, 2, 3]})
    folded = StageGraph.build({"m": [0, 0, 1, 1, 2, 2, 3, 3]})
    for generate in (gpipe, one_f_one_b):
        schedule = generate(interleaved, aligned(interleaved, 12))
        check(schedule)
        # Two stages per rank halve the bubble at best (Megatron-LM, arXiv 2104.04473, section 2.2).
        whole = Events(generate(folded, aligned(folded, 12))).span(COSTS)
        assert whole == (12 + 3) * 6 and (24 + 3) * 3 <= Events(schedule).span(COSTS) < whole


def test_every_schedule_is_sound() -> None:
    for seed in range(COUNT):
        rng = random.Random(seed)
        case = random_case(seed)
        generate: Callable[..., Schedule] = rng.choice([gpipe, one_f_one_b])
        options = {"backward": rng.random() < 0.9, "reduce_grad": rng.random() < 0.9}
        schedule = generate(case.graph, case.table, **options)
        report = check(schedule)
        assert report.actions == sum(map(len, schedule.actions))
        Events(schedule)  # raises an error if invalid


def test_known_durations_never_make_it_slower() -> None:
    better = 0
    for seed in range(COUNT // 5):
        rng = random.Random(seed)
        case = random_case(seed)
        stages = [(s.module, s.index) for s in case.graph.layout.stages()]
        seconds = {(op, *stage): rng.randint(0, 5) for stage in stages for op in COSTS}
        guided = one_f_one_b(case.graph, case.table, durations=seconds)
        check(guided)
        spans = [
            Events(s).span(lambda a, seconds=seconds: seconds[a.op, a.module, a.stage])
            for s in (guided, one_f_one_b(case.graph, case.table))
        ]
        assert spans[0] <= spans[1]
        better += spans[0] < spans[1]
    assert better > 0


def late_chunks(graph: StageGraph, table: StepTable) -> set[int]:
    """Chunks that are alone in their pipeline, on a rank of a module without consumers, and all chunks they read."""
    feeders = {producer for producer, _ in graph.links}
    modules, lanes = [pipeline.module for pipeline in graph.pipelines], graph.layout.lanes()
    ends = {r for node in graph.nodes if modules[node.pipeline] not in feeders for r in lanes[node.lane].ranks}
    late = set()
    for node in graph.nodes:
        pipeline = graph.pipelines[node.pipeline]
        mine = [
            c
            for c, chunk in enumerate(table.chunks)
            if (chunk.module, chunk.replica) == (pipeline.module, pipeline.replica)
        ]
        if pipeline.module in feeders and len(mine) == 1 and ends.intersection(lanes[node.lane].ranks):
            late.update(mine)
    for _ in table.chunks:
        late.update(int(piece[0]) for edge in table.edges for piece in edge.pieces if int(piece[2]) in late)
    return late


def test_gpipe_follows_virtual_time_and_1f1b_bounds_in_flight() -> None:
    for seed in range(COUNT // 2):
        case = random_case(seed)
        demand = Demand(case.graph, case.table)
        number = {name: i for i, name in enumerate(case.graph.module_order)}
        modules = [case.graph.pipelines[node.pipeline].module for node in case.graph.nodes]
        depth = {n: (number[modules[n]], *node[:2], node.copy) for n, node in enumerate(case.graph.nodes)}
        first = sorted(demand.forwards, key=lambda job: (demand.time(Op.FORWARD, job), depth[job[0]], job[1]))
        last = sorted(
            demand.backwards,
            key=lambda job: (demand.time(Op.BACKWARD, job), [-x for x in depth[job[0]]], job[1]),
        )
        late = late_chunks(case.graph, case.table)
        orders = [[*first, *last], [*first, *sorted(last, key=lambda job: job[1] in late)]]
        ops = [Op.FORWARD] * len(first) + [Op.BACKWARD] * len(last)
        lists = gpipe(case.graph, case.table).actions
        result = [[a for a in actions if a.op in COSTS] for actions in lists]
        assert result in [
            [
                [demand.compute(op, job) for op, job in zip(ops, order) if rank in demand.ranks(demand.lane(job[0]))]
                for rank in range(len(lists))
            ]
            for order in orders
        ]

        merged = [(demand.time(Op.FORWARD, job), 1, job) for job in first if job in demand.backwards]
        merged += [(demand.time(Op.BACKWARD, job), 0, job) for job in last]
        lists = one_f_one_b(case.graph, case.table).actions
        for n, node in enumerate(case.graph.nodes):
            most = count = 0
            for _, forward, job in sorted(merged):
                if job[0] == n:
                    count += 1 if forward else -1
                    most = max(most, count)
            cap = max(most, demand.distances[n] + 1)
            held = {c for m, c in demand.backwards if m == n}
            for rank in demand.ranks(node.lane):
                assert in_flight(lists[rank], modules[n], node.stage, held) <= cap


def test_messages_stand_next_to_what_makes_and_needs_them() -> None:
    for seed in range(COUNT // 5):
        case = random_case(seed)
        for actions in one_f_one_b(case.graph, case.table, reduce_grad=False).actions:
            for before, action in pairwise(actions):
                if action.op is Op.SEND:
                    assert before.op in (Op.FORWARD, Op.BACKWARD, Op.SEND)
                    own = action.other if action.grad else action.chunk
                    assert before.op is Op.SEND or before.chunk == own
                if before.op is Op.RECV:
                    assert action.op in (Op.FORWARD, Op.BACKWARD, Op.RECV)
            assert not actions or actions[-1].op is not Op.RECV


def test_sums_begin_as_early_as_their_order_allows() -> None:
    for seed in range(COUNT // 5):
        case = random_case(seed)
        schedule = one_f_one_b(case.graph, case.table)
        demand = Demand(case.graph, case.table)
        for rank, actions in enumerate(schedule.actions):
            for i, action in enumerate(actions):
                if action.op is not Op.REDUCE_GRAD:
                    continue
                adding = {
                    demand.compute(Op.BACKWARD, job)
                    for job in demand.reductions[action.other]
                    if rank in demand.ranks(demand.lane(job[0]))
                }
                earlier = [a for a in actions[:i] if a.op not in (Op.SEND, Op.UNSHARD, Op.RESHARD)]
                assert not earlier or earlier[-1] in adding or earlier[-1].op is Op.REDUCE_GRAD


def test_gathers_begin_first_and_weights_are_given_up_at_once() -> None:
    for seed in range(COUNT // 5):
        case = random_case(seed)
        for backward in (True, False):
            schedule = gpipe(case.graph, case.table, backward=backward)
            demand = Demand(case.graph, case.table, backward)
            for rank, actions in enumerate(schedule.actions):
                gathers = [a.other for a in actions if a.op is Op.UNSHARD]
                assert gathers == sorted(gathers)
                assert all(a.op is Op.UNSHARD for a in actions[: len(gathers)])
                for i, action in enumerate(actions):
                    if action.op is Op.RESHARD:
                        using = {
                            demand.compute(op, job)
                            for op, jobs in ((Op.FORWARD, demand.forwards), (Op.BACKWARD, demand.backwards))
                            for job in jobs
                            if action.other in demand.uses(job[0], rank)
                        }
                        earlier = [a for a in actions[:i] if a.op not in (Op.SEND, Op.RESHARD)]
                        assert earlier[-1] in using or (not using & set(actions) and earlier[-1].op is Op.UNSHARD)


def test_bad_tables_are_refused() -> None:
    graph = StageGraph.build({"a": [0], "b": [1]}, [("a", "b")])
    with pytest.raises(
        ValueError, match="b, replica 1, chunk 0, which no pipeline of the layout runs; replicas of the layout: a has 1"
    ):
        one_f_one_b(graph, StepTable.aligned([], [{"b"}], replicas=2))
    with pytest.raises(ValueError, match="the step has c, replica 0"):
        gpipe(graph, StepTable.aligned([], [{"c"}]))
    backwards = table_of({("a", 0): 1, ("b", 0): 1}, [("b", 0, 0, "a", 0, 0)])
    with pytest.raises(
        ValueError, match=r"chunk 0 reads b, replica 0, chunk 0: add the link \('b', 'a'\) to the graph"
    ):
        gpipe(graph, backwards)
    with pytest.raises(ValueError, match="no entry for BACKWARD of b/0, chunk 1"):
        one_f_one_b(graph, aligned(graph, 1), durations={Op.FORWARD: 1.0, (Op.BACKWARD, "a"): 2.0})
    with pytest.raises(ValueError, match=r"costs -1\.0 seconds"):
        one_f_one_b(graph, aligned(graph, 1), durations=lambda *_: -1.0)
