"""The event simulation of `events` in Python, written independently of the compiled one: its oracle.

Since every list is fixed, no choice is ever open: each rank is played until it lacks a message, and the times do
not depend on the order in which ranks are visited. Cost: 1 to 2 microseconds per action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from interlace.schedule.actions import COMPUTE, Action, Op
from interlace.schedule.check import ScheduleError, check
from interlace.schedule.costs import Durations, duration_of
from interlace.schedule.schedule import Schedule, reductions
from interlace.simulate.timeline import Timeline


def simulate_in_python(
    schedule: Schedule,
    durations: Durations,
    *,
    transfer: float | Callable[[Action, int, int], float] = 0.0,
    overhead: float = 0.0,
    reduce_grad: float | Callable[[Action], float] = 0.0,
) -> Timeline:
    """`events.simulate`, which see, without compiled code."""
    lists = schedule.actions
    graph = schedule.graph
    cost = duration_of(durations)
    travel = transfer if callable(transfer) else None
    seconds = 0.0 if callable(transfer) else _non_negative("transfer", transfer)
    _non_negative("overhead", overhead)

    at = [0] * len(lists)
    clocks = [0.0] * len(lists)
    starts: list[list[float]] = [[0.0] * len(actions) for actions in lists]
    finishes: list[list[float]] = [[0.0] * len(actions) for actions in lists]
    arrivals: list[dict[int, deque[float]]] = [{} for _ in lists]  # target -> source -> times of arrival
    links: list[dict[int, float]] = [{} for _ in lists]  # source -> target -> time at which the link is free
    waits_for = [-1] * len(lists)
    barriers: dict[Action, list[int]] = {}
    reduce_ranks = {reduction.action: reduction.ranks for reduction in reductions(graph, schedule.active)}

    todo = list(range(len(lists)))
    while todo:
        rank = todo.pop()
        actions, start, finish, mail, link = lists[rank], starts[rank], finishes[rank], arrivals[rank], links[rank]
        clock = clocks[rank]
        i = at[rank]
        while i < len(actions):
            action = actions[i]
            op = action.op
            start[i] = clock
            if op is Op.RECV:
                box = mail.get(action.peer)
                if not box:
                    waits_for[rank] = action.peer
                    break
                arrival = box.popleft()
                clock = (arrival if arrival > clock else clock) + overhead
            elif op is Op.SEND:
                clock += overhead
                peer = action.peer
                if travel is not None:
                    seconds = _non_negative("transfer", travel(action, rank, peer))
                free = link.get(peer, 0.0)
                arrival = (free if free > clock else clock) + seconds
                link[peer] = arrival
                box = arrivals[peer].get(rank)
                if box is None:
                    box = arrivals[peer][rank] = deque()
                box.append(arrival)
                if waits_for[peer] == rank:
                    waits_for[peer] = -1
                    todo.append(peer)
            elif op in COMPUTE:
                clock += cost(op, action.module, action.stage, action.microbatch)
            elif op is Op.REDUCE_GRAD:
                reached = barriers.setdefault(action, [])
                reached.append(rank)
                clocks[rank] = clock
                at[rank] = i
                if len(reached) < len(reduce_ranks.get(action, ())):
                    break
                time = reduce_grad(action) if callable(reduce_grad) else reduce_grad
                clock = max(clocks[other] for other in reached) + _non_negative("reduce_grad", time)
                for other in reached:
                    if other != rank:
                        finishes[other][at[other]] = clocks[other] = clock
                        at[other] += 1
                        todo.append(other)
            finish[i] = clock
            i += 1
        at[rank] = i
        clocks[rank] = clock
    if any(i < len(actions) for i, actions in zip(at, lists)):
        check(schedule)  # says which ranks wait for what
        raise ScheduleError("the schedule never finishes")
    return Timeline(lists, starts, finishes, schedule.name)


def _non_negative(name: str, seconds: float) -> float:
    if not 0.0 <= seconds < inf:
        raise ValueError(f"{name} is {seconds} seconds; it must be a number from 0 upwards")
    return seconds
