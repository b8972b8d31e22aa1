"""Reference event simulator in Python, written independently of the compiled one, as its oracle. Bytes for both.

Lists are fixed, so the simulation has no choices. Each rank runs until it has to wait, round after round. The times do
not depend on the order in which ranks are visited. Cost: 1 to 2 microseconds per action.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
from numpy.typing import NDArray

from interlace.layout import Lane
from interlace.schedule.actions import CHUNK, CODES, COMPUTE, MODULE, OP, STAGE, Action, Op
from interlace.schedule.check import ScheduleError, check
from interlace.schedule.costs import ActivationBytes, Durations, bytes_held, duration_of
from interlace.schedule.schedule import Schedule
from interlace.simulate.timeline import Timeline


def simulate_in_python(
    schedule: Schedule,
    durations: Durations,
    *,
    transfer: float | Callable[[Action, int, int], float] = 0.0,
    overhead: float = 0.0,
    reduce_grad: float | Callable[[Action], float] = 0.0,
    unshard: float | Callable[[Action], float] = 0.0,
    dispatch: float | Callable[[Action], float] = 0.0,
) -> Timeline:
    """Same as `interlace.simulate.simulate`, without compiled code."""
    lists = schedule.actions
    lanes = schedule.graph.layout.lanes()
    cost = duration_of(durations)
    _non_negative("overhead", overhead)
    own_lane = _lane_finder(schedule)
    meeting_of = _meeting_finder(schedule, own_lane)

    next_index = [0] * len(lists)
    clocks = [0.0] * len(lists)
    starts: list[list[float]] = [[0.0] * len(actions) for actions in lists]
    finishes: list[list[float]] = [[0.0] * len(actions) for actions in lists]
    arrivals: dict[tuple[Lane, Lane, int], list[float]] = {}  # (from, to, sending rank) -> arrival times, in order
    received: dict[tuple[Lane, Lane, int], int] = {}  # (from, to, receiving rank) -> messages

    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(lists):
            while next_index[rank] < len(actions):
                action = actions[next_index[rank]]
                begin, end = clocks[rank], clocks[rank]
                if action.op is Op.RECV:
                    source, target = lanes[action.peer], own_lane(rank, action)
                    n = received.get((source, target, rank), 0)
                    parts = [arrivals.get((source, target, sender), []) for sender in source.ranks]
                    if any(len(part) <= n for part in parts):
                        break
                    received[source, target, rank] = n + 1
                    end = max(begin, *(part[n] for part in parts)) + overhead
                elif action.op is Op.SEND:
                    end = begin + overhead
                    seconds = transfer(action, rank, action.peer) if callable(transfer) else transfer
                    sent = arrivals.setdefault((own_lane(rank, action), lanes[action.peer], rank), [])
                    sent.append(max(end, sent[-1] if sent else 0.0) + _non_negative("transfer", seconds))
                elif action.op is Op.UNSHARD:
                    end = begin + _non_negative("unshard", unshard(action) if callable(unshard) else unshard)
                elif action.op in COMPUTE:
                    meeting, members = meeting_of(rank, action)
                    current = {r: lists[r][next_index[r]] for r in members if next_index[r] < len(lists[r])}
                    if len(members) > 1:
                        if len(current) < len(members) or any(a.op is not action.op for a in current.values()):
                            break
                        if any(meeting_of(r, a)[0] != meeting for r, a in current.items()):
                            break
                        if any(current[r] != a for peer, a in current.items() for r in own_lane(peer, a).ranks):
                            break
                        begin = max(clocks[r] for r in members)
                    end = begin + max(cost(a.op, a.module, a.stage, a.chunk) for a in current.values())
                    for peer in members:
                        if peer != rank:
                            starts[peer][next_index[peer]], finishes[peer][next_index[peer]] = begin, end
                            clocks[peer] = end
                            next_index[peer] += 1
                starts[rank][next_index[rank]], finishes[rank][next_index[rank]] = begin, end
                clocks[rank] = end
                next_index[rank] += 1
                moving = True
    finished = all(i == len(actions) for i, actions in zip(next_index, lists, strict=True))
    if (
        not finished
        or not _reduce(schedule, starts, finishes, reduce_grad)
        or not _exchange_items(schedule, starts, finishes, dispatch)
    ):
        check(schedule)  # raises with the waiting ranks
        raise ScheduleError("the schedule never finishes")
    return Timeline(lists, starts, finishes, schedule.name, schedule.table)


def _lane_finder(schedule: Schedule) -> Callable[[int, Action], Lane]:
    """(rank, action) -> lane of the rank in which it computes, sends or receives."""
    layout, chunks = schedule.graph.layout, schedule.table.chunks
    cache: dict[tuple[int, str, int, int], Lane] = {}

    def find(rank: int, action: Action) -> Lane:
        chunk, stage = chunks[action.chunk], action.stage
        if action.op not in COMPUTE and (action.op is Op.SEND) == action.grad:  # on the consumer's side
            chunk, stage = (chunk, stage + 1) if action.other == action.chunk else (chunks[action.other], 0)
        key = (rank, chunk.module, chunk.replica, stage)
        if key not in cache:
            cache[key] = layout.pipelines(chunk.module)[chunk.replica].stages[stage].lane_of(rank)
        return cache[key]

    return find


def _meeting_finder(
    schedule: Schedule, own_lane: Callable[[int, Action], Lane]
) -> Callable[[int, Action], tuple[object, tuple[int, ...]]]:
    """(rank, compute action) -> key and ranks of the set that computes together.

    The set is the rank's lane, or all lanes connected with it by weights that are gathered layer by layer.
    """
    layout, graph, chunks = schedule.graph.layout, schedule.graph, schedule.table.chunks
    layered = {a.other for actions in schedule.actions for a in actions if a.op is Op.UNSHARD_LAYERS}
    meetings: dict[tuple[str, int], list[set[int]]] = {}  # (module, first layer of the stages) -> sets of ranks
    for shard in (graph.shards[number] for number in sorted(layered)):
        lanes = [s.lanes for p in layout.pipelines(shard.module) for s in p.stages if s.start == shard.start]
        ranks = {
            r
            for stage_lanes in lanes
            for lane in stage_lanes
            if set(lane.ranks) & set(shard.owners)
            for r in lane.ranks
        }
        known_sets = meetings.setdefault((shard.module, shard.start), [])
        disjoint = [known for known in known_sets if ranks.isdisjoint(known)]
        meetings[shard.module, shard.start] = [*disjoint, ranks.union(*(o for o in known_sets if o not in disjoint))]

    def find(rank: int, action: Action) -> tuple[object, tuple[int, ...]]:
        chunk = chunks[action.chunk]
        start = layout.pipelines(chunk.module)[chunk.replica].stages[action.stage].start
        for ranks in meetings.get((chunk.module, start), ()):
            if rank in ranks:
                return (chunk.module, start), tuple(sorted(ranks))
        lane = own_lane(rank, action)
        return lane, lane.ranks

    return find


def _reduce(
    schedule: Schedule,
    starts: list[list[float]],
    finishes: list[list[float]],
    reduce_grad: float | Callable[[Action], float],
) -> bool:
    """Fills in the ends of reductions; False if a rank of a reduction does not have it in its list."""
    listed = [  # per rank: reduction -> index in its list
        {action.other: index for index, action in enumerate(actions) if action.op is Op.REDUCE_GRAD}
        for actions in schedule.actions
    ]
    reductions = schedule.graph.reductions
    step = [r for r in range(len(reductions)) if any(r in indices for indices in listed)]
    if any(r not in listed[rank] for r in step for rank in reductions[r].ranks):
        return False
    ends: dict[int, float] = {}

    def follows(r: int, before: int) -> bool:
        """True if reduction r must wait for the end of `other`."""
        a, b = reductions[r], reductions[before]
        if (a.tied >= 0) != (b.tied >= 0):
            return a.tied >= 0 and not set(a.ranks).isdisjoint(b.ranks)
        return a.ranks == b.ranks and listed[a.ranks[0]][before] < listed[a.ranks[0]][r]

    def end(r: int) -> float:
        if r not in ends:
            begin, longest = max((end(before) for before in step if follows(r, before)), default=0.0), 0.0
            for rank in reductions[r].ranks:
                index = listed[rank][r]
                begin = max(begin, starts[rank][index])
                time = reduce_grad(schedule.actions[rank][index]) if callable(reduce_grad) else reduce_grad
                longest = max(longest, _non_negative("reduce_grad", time))
            ends[r] = begin + longest
        return ends[r]

    for r in step:
        for rank in reductions[r].ranks:
            finishes[rank][listed[rank][r]] = end(r)
    return True


def _exchange_items(
    schedule: Schedule,
    starts: list[list[float]],
    finishes: list[list[float]],
    dispatch: float | Callable[[Action], float],
) -> bool:
    """Fills in the end of the item exchange; False if only some ranks have a DISPATCH."""
    dispatches = [
        (r, i) for r, actions in enumerate(schedule.actions) for i, a in enumerate(actions) if a.op is Op.DISPATCH
    ]
    if not dispatches:
        return True
    begin = max(starts[rank][index] for rank, index in dispatches)
    times = [dispatch(schedule.actions[r][i]) if callable(dispatch) else dispatch for r, i in dispatches]
    for rank, index in dispatches:
        finishes[rank][index] = begin + max(_non_negative("dispatch", time) for time in times)
    return len(dispatches) == len(schedule.actions)


def _non_negative(name: str, seconds: float) -> float:
    if not 0.0 <= seconds < inf:
        raise ValueError(f"{name} is {seconds} seconds; it must be a number >= 0")
    return seconds


def memory_and_scratch(
    schedule: Schedule, activation_bytes: ActivationBytes
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(memory, scratch), float64 [n] each in bytes, for `simulate_arrays`; same rules as `check`.

    activation_bytes: (module, stage, chunk) or (module, stage) -> bytes held from a FORWARD to the end of its BACKWARD
        or BACKWARD_WEIGHT; a FORWARD without a backward on its rank holds them only while it runs.
    """
    rows, modules = schedule.rows, schedule.graph.modules
    op = rows[:, OP]
    frees, forward = np.isin(op, [CODES[Op.BACKWARD], CODES[Op.BACKWARD_WEIGHT]]), op == CODES[Op.FORWARD]
    selected = np.flatnonzero(frees | forward)
    kinds, kind = np.unique(rows[selected][:, [MODULE, STAGE, CHUNK]], axis=0, return_inverse=True)
    kind = kind.reshape(-1)
    names = [(modules[module], stage, chunk) for module, stage, chunk in kinds.tolist()]
    bytes_of = np.array([bytes_held(activation_bytes, *name) for name in names], float)
    size = np.zeros(len(rows))
    size[selected] = bytes_of[kind]

    rank = np.repeat(np.arange(len(schedule.first) - 1), np.diff(schedule.first))
    key = np.full(len(rows), -1, np.int64)
    key[selected] = rank[selected] * max(1, len(kinds)) + kind
    held = forward & np.isin(key, key[frees])
    memory = np.where(held, size, 0.0) - np.where(frees, size, 0.0)
    return memory, np.where(forward & ~held, size, 0.0)
