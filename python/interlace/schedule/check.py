"""Proves that a schedule can run: complete, in order, free of deadlock, within memory.

The checker knows nothing of how a schedule was made. It derives from the graph and the presence what has to
happen, compares, and then replays the lists the way the executor runs them: sends never block, a receive
takes the oldest message that its peer sent to this rank, a REDUCE_GRAD waits for all ranks that sum with this one.

With several replicas a REDUCE_GRAD waits for ranks of the others too, whose lists may hold other microbatches. It is
enough that all reduce in one order and that nobody sends anything after a REDUCE_GRAD: then every rank reaches its
first one whatever the others do, and of the reductions that are not finished the first has all its ranks waiting.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.schedule.actions import COMPUTE, Action, Op
from interlace.schedule.graph import Node
from interlace.schedule.memory import held_after, peak
from interlace.schedule.schedule import Reduction, Schedule, reductions
from interlace.schedule.work import Work, works


class ScheduleError(ValueError):
    """A schedule that cannot run, or not within its memory. `rank` and `action` say where (None: not at one place)."""

    def __init__(self, message: str, rank: int | None = None, action: Action | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.action = action


@dataclass(frozen=True)
class CheckReport:
    """What the checker found out about a sound schedule.

    peak_in_flight: per rank, the most forwards whose backward is still to come.
    peak_memory: per rank, the bytes they hold, by the given activation_bytes (0 without).
    actions, messages: how many in all.
    """

    peak_in_flight: tuple[int, ...]
    peak_memory: tuple[float, ...]
    actions: int
    messages: int


def check(
    schedule: Schedule,
    *,
    activation_bytes: Mapping[tuple[str, int], float] | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> CheckReport:
    """Raises ScheduleError, naming rank and action, unless the schedule is sound.

    activation_bytes: (module, stage) -> bytes that one microbatch holds from its forward to its backward.
    memory_limit: bytes that a rank may hold so, for all ranks or per rank; needs activation_bytes.
    """
    graph = schedule.graph
    if len(schedule.actions) != graph.num_ranks:
        raise ScheduleError(f"the schedule has lists for {len(schedule.actions)} ranks, its graph {graph.num_ranks}")
    if memory_limit is not None and activation_bytes is None:
        raise ValueError("memory_limit needs activation_bytes: bytes per (module, stage)")
    if activation_bytes is not None:
        unknown = [key for key in activation_bytes if key not in graph.position]
        if unknown:
            raise ValueError(f"activation_bytes names {unknown[0]}, which is no (module, stage) of the graph")
    step = works(graph, schedule.presence)
    sums = reductions(graph, schedule.active) if schedule.reduce_grad else []
    _check_complete(schedule, step, sums)
    _check_reductions(schedule, sums)
    _Replay(schedule, step, sums).run()

    peaks = [peak(actions, activation_bytes) for actions in schedule.actions]
    if memory_limit is not None:
        limits = [memory_limit] * graph.num_ranks if isinstance(memory_limit, (int, float)) else list(memory_limit)
        if len(limits) != graph.num_ranks:
            raise ValueError(f"memory_limit has {len(limits)} entries for {graph.num_ranks} ranks")
        for rank, limit in enumerate(limits):
            for place, count, size in held_after(schedule.actions[rank], activation_bytes):
                if size > limit:
                    action = schedule.actions[rank][place]
                    raise ScheduleError(
                        f"rank {rank} holds {size:.0f} bytes ({count} forwards in flight) at {action}, over its limit "
                        f"of {limit:.0f}; it would need {peaks[rank].bytes:.0f}: use more stages, smaller microbatches "
                        "or activation checkpointing",
                        rank,
                        action,
                    )
    return CheckReport(
        tuple(p.in_flight for p in peaks),
        tuple(p.bytes for p in peaks),
        sum(map(len, schedule.actions)),
        sum(action.op is Op.SEND for actions in schedule.actions for action in actions),
    )


def _check_complete(schedule: Schedule, step: Sequence[Work], sums: Sequence[Reduction]) -> None:
    """Every forward, backward, message and reduction exactly once, and nothing else of these."""
    graph = schedule.graph
    expected: list[Counter[Action]] = [Counter() for _ in range(graph.num_ranks)]
    names = [(stage.module, stage.index) for stage in graph.stages]
    for k, work in enumerate(step):
        for node in work.forward:
            expected[node[1]][Action(Op.FORWARD, *names[node[0]], k)] += 1
        for node in work.backward:
            expected[node[1]][Action(Op.BACKWARD, *names[node[0]], k)] += 1
        for (s, source), target, grad in _messages(work):
            expected[source][Action(Op.SEND, *names[s], k, 0, target, grad)] += 1
            expected[target][Action(Op.RECV, *names[s], k, 0, source, grad)] += 1
    for reduction in sums:
        for rank in reduction.ranks:
            expected[rank][reduction.action] += 1

    for rank, actions in enumerate(schedule.actions):
        found = Counter(_joined(rank, actions))
        for action, times in found.items():
            if action.op not in _VERIFIED or times == expected[rank][action]:
                continue
            if times > 1 and expected[rank][action]:
                raise ScheduleError(f"rank {rank} has {action} {times} times", rank, action)
            if expected[rank][action]:
                continue
            reason = _why_not(schedule, step, rank, action)
            raise ScheduleError(f"rank {rank} must not have {action}: {reason}", rank, action)
        for action in expected[rank]:
            if not found[action]:
                raise ScheduleError(f"rank {rank} lacks {action}", rank, action)


_VERIFIED = COMPUTE | {Op.SEND, Op.RECV, Op.REDUCE_GRAD}


def _joined(rank: int, actions: Sequence[Action]) -> list[Action]:
    """The list with each pair BACKWARD_INPUT, BACKWARD_WEIGHT counted as the one BACKWARD that it is."""
    halves = Counter(a for a in actions if a.op is Op.BACKWARD_INPUT or a.op is Op.BACKWARD_WEIGHT)
    for action, times in halves.items():
        other = Op.BACKWARD_WEIGHT if action.op is Op.BACKWARD_INPUT else Op.BACKWARD_INPUT
        partner = Action(other, action.module, action.stage, action.microbatch, action.part)
        if times > 1:
            raise ScheduleError(f"rank {rank} has {action} {times} times", rank, action)
        if not halves[partner]:
            raise ScheduleError(f"rank {rank} lacks {partner}, the other half of {action}", rank, partner)
    return [
        Action(Op.BACKWARD, a.module, a.stage, a.microbatch, a.part) if a.op is Op.BACKWARD_INPUT else a
        for a in actions
        if a.op is not Op.BACKWARD_WEIGHT
    ]


def _messages(work: Work) -> set[tuple[Node, int, bool]]:
    """(copy that sends, rank that receives, is it a gradient); the stage named is the producer in both cases."""
    found: set[tuple[Node, int, bool]] = set()
    for consumer, producers in work.inputs.items():
        for producer in producers:
            if producer[1] == consumer[1]:
                continue
            found.add((producer, consumer[1], False))
            if consumer in work.gradients.get(producer, ()):
                found.add(((producer[0], consumer[1]), producer[1], True))
    return found


def _why_not(schedule: Schedule, step: Sequence[Work], rank: int, action: Action) -> str:
    graph = schedule.graph
    position = graph.position.get((action.module, action.stage))
    if position is None:
        return f"its graph has no stage {action.module}/{action.stage}"
    if not 0 <= action.microbatch < len(step):
        return f"the step has microbatches 0 to {len(step) - 1}"
    if action.op is Op.REDUCE_GRAD:
        return "that stage has no gradients to reduce here"
    if action.module not in schedule.presence[action.microbatch]:
        return f"{action.module} is absent from microbatch {action.microbatch}"
    stage = graph.stages[position]
    if action.op in COMPUTE:
        if rank not in stage.ranks:
            return f"{stage} is on {'rank' if len(stage.ranks) == 1 else 'ranks'} {', '.join(map(str, stage.ranks))}"
        return f"{stage} has no backward there in this microbatch"
    return "no stage needs that message"


def _check_reductions(schedule: Schedule, sums: Sequence[Reduction]) -> None:
    """REDUCE_GRAD comes after the rank's last backward of its stages, and in one common order."""
    stages = schedule.graph.stages
    place = {reduction.action: i for i, reduction in enumerate(sums)}
    for rank, actions in enumerate(schedule.actions):
        before: Action | None = None
        finished: set[tuple[str, int]] = set()
        for action in actions:
            key = (action.module, action.stage)
            if action.op is Op.REDUCE_GRAD:
                if before is not None and place[before] > place[action]:
                    raise ScheduleError(
                        f"rank {rank} runs {action} after {before}; all ranks must reduce in one common order",
                        rank,
                        action,
                    )
                before = action
                finished |= {(stages[s].module, stages[s].index) for s in sums[place[action]].stages}
            elif action.op in COMPUTE and action.op is not Op.FORWARD and key in finished:
                raise ScheduleError(f"rank {rank} runs {action} after the REDUCE_GRAD of its stage", rank, action)
            elif action.op is Op.SEND and before is not None and schedule.graph.replicas > 1:
                raise ScheduleError(
                    f"rank {rank} runs {action} after {before}, which waits for other replicas: send first",
                    rank,
                    action,
                )


class _Replay:
    """Runs the lists, one rank at a time, as far as each gets."""

    def __init__(self, schedule: Schedule, step: Sequence[Work], sums: Sequence[Reduction]) -> None:
        self.graph, self.lists, self.step = schedule.graph, schedule.actions, step
        self.reduce_ranks = {reduction.action: reduction.ranks for reduction in sums}
        ranks = range(self.graph.num_ranks)
        self.at = [0 for _ in ranks]
        self.done: list[set[tuple[Op, int, int]]] = [set() for _ in ranks]  # (op, stage, microbatch) on this rank
        self.got: list[set[tuple[int, int, bool, int]]] = [set() for _ in ranks]  # (stage, microbatch, grad, source)
        self.wires: dict[tuple[int, int], deque[Action]] = {}
        self.arrived: Counter[Action] = Counter()  # ranks waiting in a REDUCE_GRAD
        self.waiting: list[Action | None] = [None for _ in ranks]

    def run(self) -> None:
        progress = True
        while progress:
            progress = False
            for rank, actions in enumerate(self.lists):
                while self.at[rank] < len(actions) and self.advance(rank, actions[self.at[rank]]):
                    self.at[rank] += 1
                    progress = True
        stuck = [rank for rank, actions in enumerate(self.lists) if self.at[rank] < len(actions)]
        if stuck:
            lines = "\n".join(f"  rank {rank}: {self.explain(rank)}" for rank in stuck)
            first = self.lists[stuck[0]][self.at[stuck[0]]]
            raise ScheduleError(f"deadlock: these ranks wait for ever\n{lines}", stuck[0], first)

    def advance(self, rank: int, action: Action) -> bool:
        """Runs the action if it need not wait. Raises ScheduleError if it never could."""
        op = action.op
        if op is Op.RECV:
            wire = self.wires.get((action.peer, rank))
            if not wire:
                return False
            sent = wire[0]
            if (sent.module, sent.stage, sent.microbatch, sent.part, sent.grad) != (
                action.module, action.stage, action.microbatch, action.part, action.grad,
            ):  # fmt: skip
                raise ScheduleError(
                    f"rank {rank} expects {action} but the next message from rank {action.peer} is {sent}: receives "
                    "must stand in the order of the sends between two ranks",
                    rank,
                    action,
                )
            wire.popleft()
            self.got[rank].add((self.graph.position[sent.module, sent.stage], sent.microbatch, sent.grad, action.peer))
        elif op is Op.SEND:
            self.need_sent(rank, action)
            self.wires.setdefault((rank, action.peer), deque()).append(action)
        elif op is Op.REDUCE_GRAD:
            return self.reduce(rank, action)
        elif op in COMPUTE:
            self.need_compute(rank, action)
            self.done[rank].add((op, self.graph.position[action.module, action.stage], action.microbatch))
        return True

    def reduce(self, rank: int, action: Action) -> bool:
        if self.waiting[rank] != action:
            self.waiting[rank] = action
            self.arrived[action] += 1
        return self.arrived[action] == len(self.reduce_ranks[action])

    def need_sent(self, rank: int, action: Action) -> None:
        s, k = self.graph.position[action.module, action.stage], action.microbatch
        if not action.grad:
            if (Op.FORWARD, s, k) not in self.done[rank]:
                raise ScheduleError(f"rank {rank} runs {action} before the forward that makes it", rank, action)
            return
        for consumer in self.step[k].gradients[s, action.peer]:
            if consumer[1] == rank and not self.gradient_done(rank, consumer[0], k):
                name = self.graph.stages[consumer[0]]
                raise ScheduleError(f"rank {rank} runs {action} before the backward of {name}", rank, action)

    def need_compute(self, rank: int, action: Action) -> None:
        s, k = self.graph.position[action.module, action.stage], action.microbatch
        work = self.step[k]
        if action.op is Op.FORWARD:
            for producer in work.inputs[s, rank]:
                if producer[1] == rank:
                    ready = (Op.FORWARD, producer[0], k) in self.done[rank]
                else:
                    ready = (producer[0], k, False, producer[1]) in self.got[rank]
                if not ready:
                    name = self.graph.stages[producer[0]]
                    raise ScheduleError(f"rank {rank} runs {action} before it has the output of {name}", rank, action)
            return
        if (Op.FORWARD, s, k) not in self.done[rank]:
            raise ScheduleError(f"rank {rank} runs {action} before its forward", rank, action)
        if action.op is Op.BACKWARD_WEIGHT:
            if (Op.BACKWARD_INPUT, s, k) not in self.done[rank]:
                raise ScheduleError(f"rank {rank} runs {action} before its BACKWARD_INPUT", rank, action)
            return
        for consumer in work.gradients[s, rank]:
            if consumer[1] == rank:
                ready = self.gradient_done(rank, consumer[0], k)
            else:
                ready = (s, k, True, consumer[1]) in self.got[rank]
            if not ready:
                name = self.graph.stages[consumer[0]]
                raise ScheduleError(f"rank {rank} runs {action} before it has the gradient from {name}", rank, action)

    def gradient_done(self, rank: int, s: int, k: int) -> bool:
        return (Op.BACKWARD, s, k) in self.done[rank] or (Op.BACKWARD_INPUT, s, k) in self.done[rank]

    def explain(self, rank: int) -> str:
        action = self.lists[rank][self.at[rank]]
        if action.op is Op.REDUCE_GRAD:
            missing = [str(other) for other in self.reduce_ranks[action] if self.waiting[other] != action]
            return f"{action} (action {self.at[rank]}) waits for rank {', '.join(missing)} to reduce with it"
        peer = action.peer
        if self.at[peer] == len(self.lists[peer]):
            state = "which has finished its list"
        else:
            state = f"which is at {self.lists[peer][self.at[peer]]}"
        return f"{action} (action {self.at[rank]}) waits for rank {peer}, {state}"
