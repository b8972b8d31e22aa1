"""Oracle of the lists of a schedule, written from the definitions alone.

The oracle builds one graph of events from the lists of a schedule and checks it for cycles. Compute actions of all
ranks of a lane are joined into one event, also those of lanes that gather weights layer by layer. It uses no queues and
no replay, and nothing of the package except its data classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from interlace.layout import Reduction
from interlace.schedule import Action, Op, Schedule, StageGraph, StepTable

UNSHARDS = (Op.UNSHARD, Op.UNSHARD_LAYERS)
COMPUTE = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
Job = tuple[int, int]
"""(node, chunk)"""


@dataclass
class Demand:
    """Requirements of a step, from the definitions: jobs, their inputs, and all required actions of each rank."""

    graph: StageGraph
    table: StepTable
    backward: bool = True
    reduce_grad: bool = True
    forwards: set[Job] = field(init=False)

    def __post_init__(self) -> None:
        self.forwards = {(n, c) for c in range(len(self.table.chunks)) for n in self.nodes_of(c)}

    @cached_property
    def _nodes(self) -> dict[int, list[int]]:
        result: dict[int, list[int]] = {}
        for number, node in enumerate(self.graph.nodes):
            result.setdefault(node.pipeline, []).append(number)
        return result

    def nodes_of(self, chunk: int) -> list[int]:
        c = self.table.chunks[chunk]
        return self._nodes[self.graph.pipeline_number[c.module, c.replica]]

    def node(self, chunk: int, stage: int, copy: int = 0) -> int:
        return next(n for n in self.nodes_of(chunk) if self.graph.nodes[n][1::2] == (stage, copy))

    def last(self, chunk: int) -> int:
        return max(self.graph.nodes[n].stage for n in self.nodes_of(chunk))

    def lane(self, node: int) -> int:
        return self.graph.nodes[node].lane

    def ranks(self, lane: int) -> tuple[int, ...]:
        return self.graph.layout.lanes()[lane].ranks

    @cached_property
    def feeds(self) -> dict[Job, list[Job]]:
        """Job -> the jobs that supply its input."""
        result: dict[Job, list[Job]] = {job: [] for job in self.forwards}
        for n, c in self.forwards:
            if self.graph.nodes[n].stage > 0:
                result[n, c] = [(self.node(c, self.graph.nodes[n].stage - 1), c)]
                continue
            for producer, consumer in self.table.links.tolist():
                if consumer == c:
                    own = [m for m in self.nodes_of(producer) if self.graph.nodes[m].stage == self.last(producer)]
                    here = [m for m in own if self.lane(m) == self.lane(n)]
                    result[n, c].append(((here or own)[0], producer))
        return result

    @cached_property
    def readers(self) -> dict[Job, list[Job]]:
        result: dict[Job, list[Job]] = {job: [] for job in self.forwards}
        for job, sources in self.feeds.items():
            for source in sources:
                result[source].append(job)
        return result

    def trains(self, node: int) -> bool:
        where = self.graph.nodes[node]
        stage = self.graph.pipelines[where.pipeline].stages[where.stage]
        return any(self.graph.trainable[stage.module][stage.start : stage.stop])

    @cached_property
    def backwards(self) -> set[Job]:
        wanted: dict[Job, bool] = {}

        def wants(job: Job) -> bool:
            if job not in wanted:
                wanted[job] = self.trains(job[0]) or any(wants(source) for source in self.feeds[job])
            return wanted[job]

        def runs(n: int, c: int) -> bool:
            if not wants((n, c)) or not self.backward:
                return False
            copies = [m for m in self.nodes_of(c) if self.graph.nodes[m].stage == self.graph.nodes[n].stage]
            unread = not any(self.readers[m, c] for m in copies)
            return bool(self.readers[n, c]) or (unread and self.graph.nodes[n].copy == 0)

        return {(n, c) for n, c in self.forwards if runs(n, c)}

    def compute(self, op: Op, job: Job) -> Action:
        return Action(op, self.table.chunks[job[1]].module, self.graph.nodes[job[0]].stage, job[1])

    @cached_property
    def messages(self) -> set[tuple[Job, Job, bool]]:
        """(producer, consumer, True for a gradient in the backward direction)."""
        return {
            (source, job, grad)
            for job, sources in self.feeds.items()
            for source in sources
            for grad in (False, True)
            if self.lane(source[0]) != self.lane(job[0]) and (not grad or source in self.backwards)
        }

    def message(self, op: Op, source: Job, job: Job, grad: bool) -> Action:
        to_peer = (op is Op.SEND) != grad  # the peer has the consumer
        peer = self.lane(job[0] if to_peer else source[0])
        return replace(self.compute(op, source), other=job[1], peer=peer, grad=grad)

    def adds(self, node: int, reduction: Reduction) -> bool:
        """True if a backward of this node contributes to the sum: it has one of the layers on one of the ranks.

        A tied weight sums the sums over all replicas, so every node of it contributes, on any rank.
        """
        where = self.graph.nodes[node]
        stage = self.graph.pipelines[where.pipeline].stages[where.stage]
        layers = set(range(reduction.start, reduction.stop))
        if reduction.tied >= 0:
            layers = {layer for _, layer in self.graph.tied[reduction.tied]}
        held = stage.module == reduction.module and layers & set(range(stage.start, stage.stop))
        return bool(held) and (reduction.tied >= 0 or bool(set(self.ranks(where.lane)) & set(reduction.ranks)))

    @cached_property
    def reductions(self) -> dict[int, list[Job]]:
        """Active reductions -> the jobs whose backwards contribute to them."""
        result = {}
        for place, reduction in enumerate(self.graph.reductions if self.reduce_grad else ()):
            jobs = [job for job in self.backwards if self.trains(job[0]) and self.adds(job[0], reduction)]
            if jobs:
                result[place] = jobs
        return result

    def reduce_row(self, place: int, rank: int) -> Action:
        reduction = self.graph.reductions[place]
        mine = [n for n in range(len(self.graph.nodes)) if rank in self.ranks(self.lane(n)) and self.adds(n, reduction)]
        return Action(Op.REDUCE_GRAD, reduction.module, self.graph.nodes[mine[0]].stage, other=place)

    def uses(self, node: int, rank: int) -> list[int]:
        """The shards whose weights a rank uses at a node, under one of their names."""
        where = self.graph.nodes[node]
        stage = self.graph.pipelines[where.pipeline].stages[where.stage]
        layers = {(stage.module, layer) for layer in range(stage.start, stage.stop)}
        for group in self.graph.tied:
            if layers & set(group):
                layers |= set(group)
        return [
            place
            for place, shard in enumerate(self.graph.shards)
            if rank in shard.owners
            and rank in self.ranks(where.lane)
            and layers & {(shard.module, layer) for layer in range(shard.start, shard.stop)}
        ]

    @cached_property
    def shards(self) -> set[int]:
        """Active shards: some rank computes with their weights."""
        return {place for n, _ in self.forwards for rank in self.ranks(self.lane(n)) for place in self.uses(n, rank)}

    def shard_row(self, op: Op, place: int, rank: int) -> Action:
        first = next(n for n in range(len(self.graph.nodes)) if place in self.uses(n, rank))
        return Action(op, self.graph.shards[place].module, self.graph.nodes[first].stage, other=place)

    @cached_property
    def rows(self) -> list[Counter[Action]]:
        """Required list of each rank (every BACKWARD in one piece)."""
        result: list[Counter[Action]] = [Counter() for _ in range(self.graph.layout.world)]
        for op, jobs in ((Op.FORWARD, self.forwards), (Op.BACKWARD, self.backwards)):
            for job in jobs:
                for rank in self.ranks(self.lane(job[0])):
                    result[rank][self.compute(op, job)] += 1
        for source, job, grad in self.messages:
            for op in (Op.SEND, Op.RECV):
                lane = self.lane(source[0] if (op is Op.SEND) != grad else job[0])
                for rank in self.ranks(lane):
                    result[rank][self.message(op, source, job, grad)] += 1
        for place in self.reductions:
            for rank in self.graph.reductions[place].ranks:
                result[rank][self.reduce_row(place, rank)] += 1
        for place in self.shards:
            for rank in self.graph.shards[place].owners:
                result[rank][self.shard_row(Op.UNSHARD, place, rank)] += 1
                if self.graph.shards[place].full:
                    result[rank][self.shard_row(Op.RESHARD, place, rank)] += 1
        return result

    @cached_property
    def distances(self) -> dict[int, int]:
        """Node -> changes of lane on its longest path to a node without consumers."""
        after: dict[int, set[int]] = {}
        for (n, _), readers in self.readers.items():
            after.setdefault(n, set()).update(m for m, _ in readers)
        for p in self._nodes.values():  # stages are linked even if they have no chunk
            for n in p:
                after.setdefault(n, set()).update(
                    m for m in p if self.graph.nodes[m].stage == self.graph.nodes[n].stage + 1
                )
        known: dict[int, int] = {}

        def distance(n: int) -> int:
            if n not in known:
                known[n] = max((distance(m) + (self.lane(m) != self.lane(n)) for m in after[n]), default=0)
            return known[n]

        return {n: distance(n) for n in after}

    def places(self, chunk: int) -> tuple[int, int]:
        """First and last position of a chunk among those that read it."""
        readers = [consumer for producer, consumer in self.table.links.tolist() if producer == chunk]
        if not readers:
            return self.table.chunks[chunk].index, self.table.chunks[chunk].index
        result = [self.places(reader) for reader in readers]
        return min(first for first, _ in result), max(last for _, last in result)

    def time(self, op: Op, job: Job) -> int:
        """Virtual time of the event."""
        first, last = self.places(job[1])
        d = self.distances[job[0]]
        return 2 * first - d if op is Op.FORWARD else 2 * last + d + 1


class Unsound(Exception):
    """Error found by the oracle."""


@dataclass
class Events:
    """The lists of a schedule as one graph. Raises Unsound for lists that cannot run."""

    schedule: Schedule

    def __post_init__(self) -> None:
        schedule = self.schedule
        self.demand = Demand(schedule.graph, schedule.table, schedule.backward, schedule.reduce_grad)
        kinds = {(a.other, a.op) for actions in schedule.actions for a in actions if a.op in UNSHARDS}
        self.by_layer = {place for place, op in kinds if op is Op.UNSHARD_LAYERS}
        if len({place for place, _ in kinds}) < len(kinds):
            raise Unsound("two ways of gathering one shard")
        once = {op: Op.UNSHARD for op in UNSHARDS}
        self.lists = [[replace(a, op=once.get(a.op, a.op)) for a in actions] for actions in schedule.actions]
        self._complete()
        self._own_order()
        self.joined = self._meetings()
        self._reductions()
        self.before = self._edges()
        self.order = self._sorted()

    def _complete(self) -> None:
        if len(self.lists) != len(self.demand.rows):
            raise Unsound("another number of ranks")
        for actions, rows in zip(self.lists, self.demand.rows, strict=True):
            whole = Counter(a for a in actions if a.op not in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
            halves = [
                Counter(replace(a, op=Op.BACKWARD) for a in actions if a.op is op)
                for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
            ]
            if halves[0] != halves[1] or whole + halves[0] != rows:
                raise Unsound("not complete")

    def _needs(self, rank: int) -> Iterator[tuple[Action, list[Action]]]:
        """(action, its predecessors in the rank's own list), a BACKWARD represented by its first half."""
        d = self.demand
        mine = [job for job in d.forwards if rank in d.ranks(d.lane(job[0]))]
        for job in mine:
            here = [s for s in d.feeds[job] if d.lane(s[0]) == d.lane(job[0])]
            away = [s for s in d.feeds[job] if s not in here]
            yield (
                d.compute(Op.FORWARD, job),
                [d.compute(Op.FORWARD, s) for s in here] + [d.message(Op.RECV, s, job, False) for s in away],
            )
            for reader in d.readers[job]:
                if d.lane(reader[0]) != d.lane(job[0]):
                    yield d.message(Op.SEND, job, reader, False), [d.compute(Op.FORWARD, job)]
            for s in away:
                if s in d.backwards:
                    yield d.message(Op.SEND, s, job, True), [d.compute(Op.BACKWARD, job)]
            if job in d.backwards:
                needs = [d.compute(Op.FORWARD, job)]
                for reader in d.readers[job]:
                    same = d.lane(reader[0]) == d.lane(job[0])
                    needs.append(d.compute(Op.BACKWARD, reader) if same else d.message(Op.RECV, job, reader, True))
                yield d.compute(Op.BACKWARD, job), needs
                yield d.compute(Op.BACKWARD_WEIGHT, job), [d.compute(Op.BACKWARD, job)]
        for place in (p for p in d.shards if rank in d.graph.shards[p].owners):
            works = [
                d.compute(op, job)
                for op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT)
                for job in mine
                if place in d.uses(job[0], rank)
            ]
            for work in works:
                yield work, [d.shard_row(Op.UNSHARD, place, rank)]
            yield d.shard_row(Op.RESHARD, place, rank), [d.shard_row(Op.UNSHARD, place, rank), *works]
        tied = [place for place in d.reductions if d.graph.reductions[place].tied >= 0]
        for place, jobs in d.reductions.items():
            if rank not in d.graph.reductions[place].ranks:
                continue
            adding = [d.compute(op, job) for job in jobs if job in mine for op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)]
            if place in tied:
                others = [p for p in d.reductions if p not in tied and rank in d.graph.reductions[p].ranks]
                adding += [d.reduce_row(p, rank) for p in others]
            yield d.reduce_row(place, rank), adding

    def _own_order(self) -> None:
        for rank, actions in enumerate(self.lists):
            at: dict[Action, int] = {}
            for i, a in enumerate(actions):
                at[a] = i
                if a.op is Op.BACKWARD_INPUT:
                    at[replace(a, op=Op.BACKWARD)] = i
            for action, needs in self._needs(rank):
                for needed in needs:
                    if action in at and needed in at and at[needed] >= at[action]:
                        raise Unsound(f"rank {rank}: {action} before {needed}")
        for lane in self.schedule.graph.layout.lanes():
            number = self.schedule.graph.layout.lane_number(lane)
            mine = [
                [a for a in self.lists[rank] if a.op in COMPUTE and self._lane(rank, a) == number]
                for rank in lane.ranks
            ]
            if any(part != mine[0] for part in mine):
                raise Unsound(f"the ranks of lane {number} differ")

    def _lane(self, rank: int, action: Action) -> int:
        d = self.demand
        return next(
            d.lane(n)
            for n in d.nodes_of(action.chunk)
            if d.graph.nodes[n].stage == action.stage and rank in d.ranks(d.lane(n))
        )

    def _meetings(self) -> dict[object, object]:
        """Compute action of a lane -> the representative of all actions computed at the same time."""
        d, graph = self.demand, self.schedule.graph
        result: dict[object, object] = {}

        def first(event: object) -> object:
            while result.setdefault(event, event) != event:
                event = result[event]
            return event

        for place, shard in ((place, graph.shards[place]) for place in self.by_layer):
            runs = []
            for n, node in enumerate(graph.nodes):
                if not any(place in d.uses(n, rank) for rank in d.ranks(node.lane)):
                    continue
                stage = graph.pipelines[node.pipeline].stages[node.stage]
                if not shard.full or (stage.start, stage.stop) != (shard.start, shard.stop):
                    raise Unsound("weights of several stages, layer by layer")
                own = [a for a in self.lists[d.ranks(node.lane)[0]] if a.op in COMPUTE and n in d.nodes_of(a.chunk)]
                runs.append([("lane", node.lane, a) for a in own if a.stage == node.stage])
            if len({tuple(a.op for *_, a in each) for each in runs}) > 1:
                raise Unsound("ranks that gather layer by layer run differently")
            for together in zip(*runs, strict=True):
                for event in together:
                    result[first(event)] = first(together[0])
        return {event: first(event) for event in list(result)}

    def _reductions(self) -> None:
        graph, together = self.schedule.graph, (Op.REDUCE_GRAD, Op.UNSHARD)
        queues: list[list[object]] = [[] for _ in self.lists]
        for rank, actions in enumerate(self.lists):
            for a in actions:
                event = ("lane", self._lane(rank, a), a) if a.op in COMPUTE else None
                if a.op in together or event in self.joined:
                    queues[rank].append((a.op, a.other) if event is None else self.joined[event])
        left = set().union(*queues)

        def ranks(each: Any) -> Iterable[int]:
            if each in self.joined:
                return {r for event, one in self.joined.items() if one == each for r in self.demand.ranks(event[1])}
            return (graph.reductions if each[0] is Op.REDUCE_GRAD else graph.shards)[each[1]].ranks

        while left:
            free = [each for each in left if all(queues[r][0] == each for r in ranks(each))]
            if not free:
                raise Unsound("no common order of reductions and gathers")
            left.remove(free[0])
            for rank in ranks(free[0]):
                queues[rank].pop(0)

    def _edges(self) -> dict[object, set[object]]:
        """Event -> its predecessors. An event is (rank, place), or ("lane", lane, action) for all of its ranks."""
        d = self.demand
        sent: dict[tuple[int, int, int], list[tuple[Action, object]]] = {}  # (rank, its lane, to lane)
        got: dict[tuple[int, int, int], list[tuple[Action, object]]] = {}  # (rank, from lane, its lane)
        before: dict[object, set[object]] = {}
        self.name: dict[tuple[int, int], object] = {}
        owner = {}
        started: dict[int, list[object]] = {}  # shard -> its UNSHARDs
        awaited: list[tuple[object, int]] = []
        for source, job, grad in d.messages:
            for op in (Op.SEND, Op.RECV):
                node = source[0] if (op is Op.SEND) != grad else job[0]
                for rank in d.ranks(d.lane(node)):
                    owner[rank, d.message(op, source, job, grad)] = d.lane(node)
        for rank, actions in enumerate(self.lists):
            for i, a in enumerate(actions):
                event: object = (rank, i)
                if a.op in COMPUTE:
                    event = ("lane", self._lane(rank, a), a)
                    event = self.joined.get(event, event)
                self.name[rank, i] = event
                before.setdefault(event, set())
                if i:
                    before[event].add(self.name[rank, i - 1])
                if a.op is Op.UNSHARD:
                    started.setdefault(a.other, []).append(event)
                elif a.op is Op.RESHARD:
                    awaited.append((event, a.other))
                elif a.op is Op.FORWARD:
                    node = next(
                        n
                        for n in d.nodes_of(a.chunk)
                        if d.graph.nodes[n].stage == a.stage and rank in d.ranks(d.lane(n))
                    )
                    awaited += [(event, place) for place in d.uses(node, rank)]
                if a.op is Op.SEND:
                    sent.setdefault((rank, owner[rank, a], a.peer), []).append((a, event))
                if a.op is Op.RECV:
                    got.setdefault((rank, a.peer, owner[rank, a]), []).append((a, event))
        for event, place in awaited:
            before[event].update(started[place])
        for (_, source_lane, own), receives in got.items():
            for sender in d.ranks(source_lane):
                arrivals = sent[sender, source_lane, own]
                for (receive, event), (send, cause) in zip(receives, arrivals, strict=True):
                    if replace(receive, op=Op.SEND, peer=own) != send:
                        raise Unsound("messages in another order")
                    before[event].add(cause)
        return before

    def _sorted(self) -> list[object]:
        left = {event: set(causes) for event, causes in self.before.items()}
        after: dict[object, list[object]] = {}
        for event, causes in left.items():
            for cause in causes:
                after.setdefault(cause, []).append(event)
        todo = [event for event, causes in left.items() if not causes]
        order = []
        while todo:
            event = todo.pop()
            order.append(event)
            for follower in after.get(event, ()):
                left[follower].discard(event)
                if not left[follower]:
                    todo.append(follower)
        if len(order) < len(left):
            raise Unsound("a cycle")
        return order

    def span(self, seconds: Mapping[Op, float] | object) -> float:
        """Seconds until all actions end; seconds: op -> seconds, or a function of an action. Transfers take no time."""
        cost = seconds if callable(seconds) else lambda a: seconds[a.op]  # type: ignore[index]
        finish: dict[object, float] = {}
        for event in self.order:
            own = cost(event[2]) if event[0] == "lane" else 0.0  # type: ignore[index]
            finish[event] = max((finish[cause] for cause in self.before[event]), default=0.0) + own
        return max(finish.values(), default=0.0)


def runs(schedule: Schedule) -> bool:
    """True if the oracle accepts the lists."""
    try:
        Events(schedule)
    except Unsound:
        return False
    return True


def in_flight(actions: Sequence[Action], module: str, stage: int, held: set[int]) -> int:
    """The most chunks of `held` in flight on a stage at any place of a rank's list."""
    most = count = 0
    for a in actions:
        if (a.module, a.stage) == (module, stage) and a.chunk in held:
            count += (a.op is Op.FORWARD) - (a.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
            most = max(most, count)
    return most


def compute_text(schedule: Schedule, rank: int) -> str:
    """The compute actions of a rank, chunks by their index: 'F0 B0'."""
    chunks = schedule.table.chunks
    return " ".join(f"{a.op.value}{chunks[a.chunk].index}" for a in schedule.actions[rank] if a.op in COMPUTE)
