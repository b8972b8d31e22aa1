"""Reference event simulator in Python, written independently of the compiled one, as its oracle.

Lists are fixed, so the simulation has no choices. Each rank runs until it has to wait, round after round. The times do
not depend on the order in which ranks are visited. Cost: 1 to 2 microseconds per action.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from interlace.layout import Lane
from interlace.schedule.actions import COMPUTE, Action, Op
from interlace.schedule.check import ScheduleError, check
from interlace.schedule.costs import Durations, duration_of
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
    """Same as `events.simulate`, without compiled code."""
    lists = schedule.actions
    lanes = schedule.graph.layout.lanes()
    cost = duration_of(durations)
    _non_negative("overhead", overhead)
    own_lane = _lane_finder(schedule)
    met = _meeting_finder(schedule, own_lane)

    at = [0] * len(lists)
    clocks = [0.0] * len(lists)
    starts: list[list[float]] = [[0.0] * len(actions) for actions in lists]
    finishes: list[list[float]] = [[0.0] * len(actions) for actions in lists]
    arrivals: dict[tuple[Lane, Lane, int], list[float]] = {}  # (from, to, sending rank) -> arrival times, in order
    taken: dict[tuple[Lane, Lane, int], int] = {}  # (from, to, receiving rank) -> messages

    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                begin, end = clocks[rank], clocks[rank]
                if action.op is Op.RECV:
                    source, target = lanes[action.peer], own_lane(rank, action)
                    n = taken.get((source, target, rank), 0)
                    parts = [arrivals.get((source, target, sender), []) for sender in source.ranks]
                    if any(len(part) <= n for part in parts):
                        break
                    taken[source, target, rank] = n + 1
                    end = max(begin, *(part[n] for part in parts)) + overhead
                elif action.op is Op.SEND:
                    end = begin + overhead
                    seconds = transfer(action, rank, action.peer) if callable(transfer) else transfer
                    sent = arrivals.setdefault((own_lane(rank, action), lanes[action.peer], rank), [])
                    sent.append(max(end, sent[-1] if sent else 0.0) + _non_negative("transfer", seconds))
                elif action.op is Op.UNSHARD:
                    end = begin + _non_negative("unshard", unshard(action) if callable(unshard) else unshard)
                elif action.op in COMPUTE:
                    where, together = met(rank, action)
                    doing = {r: lists[r][at[r]] for r in together if at[r] < len(lists[r])}
                    if len(together) > 1:
                        if len(doing) < len(together) or any(a.op is not action.op for a in doing.values()):
                            break
                        if any(met(r, a)[0] != where for r, a in doing.items()):
                            break
                        if any(doing[r] != a for other, a in doing.items() for r in own_lane(other, a).ranks):
                            break
                        begin = max(clocks[r] for r in together)
                    end = begin + max(cost(a.op, a.module, a.stage, a.chunk) for a in doing.values())
                    for other in together:
                        if other != rank:
                            starts[other][at[other]], finishes[other][at[other]] = begin, end
                            clocks[other] = end
                            at[other] += 1
                starts[rank][at[rank]], finishes[rank][at[rank]] = begin, end
                clocks[rank] = end
                at[rank] += 1
                moving = True
    finished = all(i == len(actions) for i, actions in zip(at, lists, strict=True))
    if (
        not finished
        or not _reduce(schedule, starts, finishes, reduce_grad)
        or not _meet(schedule, starts, finishes, dispatch)
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
        ranks = {r for found in lanes for lane in found if set(lane.ranks) & set(shard.owners) for r in lane.ranks}
        before = meetings.setdefault((shard.module, shard.start), [])
        apart = [other for other in before if ranks.isdisjoint(other)]
        meetings[shard.module, shard.start] = [*apart, ranks.union(*(o for o in before if o not in apart))]

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
        {action.other: place for place, action in enumerate(actions) if action.op is Op.REDUCE_GRAD}
        for actions in schedule.actions
    ]
    reductions = schedule.graph.reductions
    step = [r for r in range(len(reductions)) if any(r in own for own in listed)]
    if any(r not in listed[rank] for r in step for rank in reductions[r].ranks):
        return False
    ends: dict[int, float] = {}

    def follows(r: int, other: int) -> bool:
        """True if reduction r must wait for the end of `other`."""
        a, b = reductions[r], reductions[other]
        if (a.tied >= 0) != (b.tied >= 0):
            return a.tied >= 0 and not set(a.ranks).isdisjoint(b.ranks)
        return a.ranks == b.ranks and listed[a.ranks[0]][other] < listed[a.ranks[0]][r]

    def end(r: int) -> float:
        if r not in ends:
            begin, longest = max((end(other) for other in step if follows(r, other)), default=0.0), 0.0
            for rank in reductions[r].ranks:
                place = listed[rank][r]
                begin = max(begin, starts[rank][place])
                time = reduce_grad(schedule.actions[rank][place]) if callable(reduce_grad) else reduce_grad
                longest = max(longest, _non_negative("reduce_grad", time))
            ends[r] = begin + longest
        return ends[r]

    for r in step:
        for rank in reductions[r].ranks:
            finishes[rank][listed[rank][r]] = end(r)
    return True


def _meet(
    schedule: Schedule,
    starts: list[list[float]],
    finishes: list[list[float]],
    dispatch: float | Callable[[Action], float],
) -> bool:
    """Fills in the end of the item exchange; False if only some ranks have a DISPATCH."""
    places = [
        (r, i) for r, actions in enumerate(schedule.actions) for i, a in enumerate(actions) if a.op is Op.DISPATCH
    ]
    if not places:
        return True
    begin = max(starts[rank][place] for rank, place in places)
    times = [dispatch(schedule.actions[r][i]) if callable(dispatch) else dispatch for r, i in places]
    for rank, place in places:
        finishes[rank][place] = begin + max(_non_negative("dispatch", time) for time in times)
    return len(places) == len(schedule.actions)


def _non_negative(name: str, seconds: float) -> float:
    if not 0.0 <= seconds < inf:
        raise ValueError(f"{name} is {seconds} seconds; it must be a number from 0 upwards")
    return seconds
