"""Assignment of samples to microbatches by the costs of encoders and language model (`train.assign`).

- "stratified": one assignment that balances both (`balance.assign_microbatches`, without its deferral)
- "entrain": pairwise deferral, if a simulation shows it to be the fastest of several methods (see `_entrain`)
- "as_printed": section 4.3 and algorithm 4 of the dissertation, unchanged

Samples are assigned to the replicas of the language model first (section 4.3), then to the microbatches of each.
Several encoders count as one. A joint assignment would gain almost nothing: replicas are equal to about 0.01 % if
samples allow, and over all microbatches of the batch the spread is near its bound
(tests/run/test_assign.py).

Every rank computes the same result by itself: compared values are sums of whole numbers below 2^53, exact in any order,
and depend only on lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from interlace import balance
from interlace.layout import Layout
from interlace.model import MultimodalModel
from interlace.run.tables.table import PORT, Assignment, Lengths
from interlace.run.tables.work import OPS, Work
from interlace.schedule import Chunk, Edge, Op, Options, StageGraph, StepTable, one_f_one_b
from interlace.schedule.actions import CHUNK, CODES, OP, STAGE
from interlace.simulate import simulate_arrays

Method = Literal["tokens", "stratified", "entrain", "as_printed"]
METHODS: tuple[Method, ...] = get_args(Method)
DEFERRING: tuple[Method, ...] = ("entrain", "as_printed")

Ints = NDArray[np.int64]
Slots = tuple[Ints, Ints]
"""The encoder's and the language model's microbatch of each sample of one replica."""

_NONE = np.zeros(0, np.int32)
_COMPUTES = np.isin(np.arange(max(CODES.values()) + 1), [CODES[op] for op in OPS])  # by number of the op
_ORDERS = 200  # orders of microbatches to evaluate


@dataclass(frozen=True)
class Assigner:
    """Assigns the samples of a run's batches. Raises ValueError for a layout in which nothing can be deferred."""

    method: Method
    layout: Layout
    work: Work

    def __post_init__(self) -> None:
        if self.method in DEFERRING and self.layout.placement == "shared":
            raise ValueError(
                f"assign = {self.method!r} defers samples to a later encoder microbatch, but with placement = 'shared' "
                "encoders run all samples of a step first: use assign = 'tokens' or 'stratified', or another placement"
            )

    def __call__(
        self, lengths: Lengths, microbatches: int | None = None, replica: Ints | None = None
    ) -> Assignment | None:
        """The assignment of a batch; None for "tokens", which needs none.

        microbatches: of each replica, at most one per sample; default: twice the stages of its pipeline. replica: int64
        [n], of the language model; by default samples are assigned to replicas by both costs (dissertation 4.3).
        """
        if self.method == "tokens":
            return None
        *encoders, language_model = self.layout.modules
        spec = self.layout.spec(language_model)
        work = _in_bits(self.work.of_samples(lengths))
        encoder = sum((work[name] for name in encoders), np.zeros(len(lengths), np.int64))
        llm = work[language_model]
        count = microbatches or 2 * spec.pp
        printed = self.method == "as_printed"
        if replica is None:
            dealt = balance.assign_replicas(encoder, llm, min(spec.dp, len(lengths)), as_printed=printed)
            replica = dealt.astype(np.int64)
        slots = np.zeros((2, len(lengths)), np.int64)
        for r in range(int(replica.max()) + 1):
            mine = np.flatnonzero(replica == r)
            if not len(mine):
                continue
            most = min(count, len(mine))
            if self.method == "entrain":
                own = {name: each[mine] for name, each in work.items()}
                slots[:, mine] = self._entrain(lengths.take(mine), own, encoder[mine], llm[mine], most)
            else:
                assigned = balance.assign_microbatches(
                    encoder[mine], llm[mine], most, shrink=printed, as_printed=printed
                )
                slots[:, mine] = assigned.encoder_of, assigned.llm_of if printed else assigned.encoder_of
        return Assignment(replica, slots[0], slots[1], work)

    def _entrain(self, lengths: Lengths, work: Mapping[str, Ints], encoder: Ints, llm: Ints, count: int) -> Slots:
        """The fastest of these candidates for one replica, each simulated with the lists of its table:

        - pairwise deferral with the requested number of microbatches, and with the effective number
        - no deferral: the language model's costs balanced, the encoder's not, microbatches in the order of
          `balance.reorder_microbatches`. If the first stage may run ahead, its own imbalance costs little.
        - the assignment of "tokens", so that the result is never slower than it
        """
        candidates = self._candidates(lengths, encoder, llm, count)
        return min(candidates, key=lambda slots: self.replica.span(lengths, work, slots))

    def _candidates(self, lengths: Lengths, encoder: Ints, llm: Ints, count: int) -> Iterator[Slots]:
        even = balance.assign(llm, count, method="even").astype(np.int64)
        even = self.replica.ordered(even, encoder, llm, count)
        yield even, even
        tokens = balance.assign(lengths.tokens, count, capacity=-(-len(llm) // count)).astype(np.int64)
        yield tokens, tokens
        paired = [balance.assign_microbatches(encoder, llm, count)]
        if paired[0].microbatches < count:
            paired.insert(0, balance.assign_microbatches(encoder, llm, count, shrink=False))
        for each in paired:
            yield each.encoder_of.astype(np.int64), each.llm_of.astype(np.int64)

    def durations(self, table: StepTable) -> Callable[[Op, str, int, int], float]:
        """Durations of a table's actions, in FLOPs of a rank, for generators that order by them."""
        work, shares = table.work, self._shares
        if work is None:
            raise ValueError("the step table has no work: it was made without an assignment")

        def seconds(op: Op, module: str, stage: int, chunk: int) -> float:
            half = op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
            share = shares[Op.BACKWARD if half else op, module, table.chunks[chunk].replica, stage]
            return float(round(work[chunk] * share / (2 if half else 1)))

        return seconds

    def options(self, table: StepTable) -> Options:
        """Options of generators for a table: the durations of its actions, if samples are deferred.

        A chunk of deferred samples costs little and must fit between the others, so the order needs costs.
        """
        return {"durations": self.durations(table)} if len(table.deferred) else {}

    @cached_property
    def _shares(self) -> Mapping[tuple[Op, str, int, int], float]:
        return self.work.shares(self.layout)

    @cached_property
    def replica(self) -> Replica:
        """Simulated time of one replica, for comparisons."""
        return Replica(self.layout, self.work)


def assigner_of(method: Method, layout: Layout, mllm: MultimodalModel, *, recompute: bool = False) -> Assigner | None:
    """The Assigner for a model on a layout; None for "tokens". recompute: see `Work.of`.

    Raises ValueError, as `Assigner`.
    """
    return None if method == "tokens" else Assigner(method, layout, Work.of(mllm, recompute=recompute))


def _in_bits(work: Mapping[str, Ints], bits: int = 48) -> dict[str, Ints]:
    """The same work in a unit, a power of two, in which the total takes at most `bits` bits."""
    most = sum(int(each.max()) * len(each) for each in work.values())
    return {name: each >> max(0, most.bit_length() - bits) for name, each in work.items()}


class Replica:
    """The first replica of every module under 1F1B. Each lane counts as one rank; messages take no time.

    If an encoder has more or fewer replicas than the language model, they share its work.
    """

    def __init__(self, layout: Layout, work: Work) -> None:
        self.modules = tuple(layout.modules)
        *encoders, language_model = self.modules
        pipelines = {name: layout.pipelines(name)[0] for name in self.modules}
        lanes: dict[tuple[int, ...], int] = {}
        for pipeline in pipelines.values():
            for stage in pipeline.stages:
                for lane in stage.lanes:
                    lanes.setdefault(lane.ranks, len(lanes))
        self.graph = StageGraph.build(
            {
                name: [tuple(lanes[lane.ranks] for lane in stage.lanes) for stage in pipeline.stages]
                for name, pipeline in pipelines.items()
            },
            [(name, language_model) for name in encoders],
            trainable={
                name: [bool(work.modules[name].trainable[s.start : s.stop].any()) for s in pipeline.stages]
                for name, pipeline in pipelines.items()
            },
        )
        shares, dp = work.shares(layout), layout.spec(language_model).dp
        stages = max(len(pipeline.stages) for pipeline in pipelines.values())
        # [op, module, stage]: of a chunk's work.
        self.share = np.zeros((max(CODES.values()) + 1, len(self.modules), stages))
        for (op, name, replica, index), share in shares.items():
            if replica == 0:
                self.share[CODES[op], self.modules.index(name), index] = share * dp / layout.spec(name).dp

    def span(self, lengths: Lengths, work: Mapping[str, Ints], slots: Slots) -> float:
        """Duration of a step, in the unit of `work` over ranks."""
        table = self._outline(lengths, work, slots)
        assert table.work is not None
        number = [self.modules.index(chunk.module) for chunk in table.chunks]
        seconds = np.rint(self.share[:, number].transpose(0, 2, 1) * table.work)  # [op, stage, chunk]
        schedule = one_f_one_b(self.graph, table, reduce_grad=False, durations=seconds)
        took = np.zeros(len(schedule.rows))
        computes = _COMPUTES[schedule.rows[:, OP]]
        took[computes] = seconds[tuple(schedule.rows[computes][:, [OP, STAGE, CHUNK]].T)]
        return simulate_arrays(schedule, took).makespan

    def _outline(self, lengths: Lengths, work: Mapping[str, Ints], slots: Slots) -> StepTable:
        """The chunks of `step_table` with their costs and links, but without their samples."""
        encoder_slot, llm_slot = slots
        *encoders, language_model = self.modules
        chunks, costs, sources = list[Chunk](), list[Ints](), list[tuple[str, Ints, Ints]]()

        def add(name: str, samples: Ints, key: Ints) -> Ints:
            """Add a chunk of `samples` for each key; returns the chunk of each sample."""
            keys, number = np.unique(key, return_inverse=True)
            costs.append(np.bincount(number, work[name][samples]).astype(np.int64))  # exact: below 2^53
            first = len(chunks)
            chunks.extend(Chunk(name, 0, index, _NONE) for index in range(len(keys)))
            return np.asarray(first + number)

        for name in encoders:
            if len(samples := np.flatnonzero(lengths.rows[name])):
                late = llm_slot[samples] > encoder_slot[samples]
                sources.append((name, samples, add(name, samples, 2 * encoder_slot[samples] + late)))
        reader = add(language_model, np.arange(len(lengths)), llm_slot)
        edges = []
        for name, samples, chunk in sources:
            pairs = np.unique(chunk * len(chunks) + reader[samples])
            pieces = np.zeros((len(pairs), 5), np.int32)
            pieces[:, 0], pieces[:, 2], pieces[:, 4] = pairs // len(chunks), pairs % len(chunks), 1
            edges.append(Edge(name, language_model, PORT, pieces))
        return StepTable(tuple(chunks), tuple(edges), work=np.concatenate(costs))

    def ordered(self, slot: Ints, encoder: Ints, llm: Ints, count: int) -> Ints:
        """The same microbatches in an order that keeps the pipeline's ends short; encoders one after the other."""
        costs = []
        for op in (Op.FORWARD, Op.BACKWARD):
            stages = []
            for i, name in enumerate(self.modules):
                last = i == len(self.modules) - 1
                each = np.bincount(slot, llm if last else encoder, count) / (1 if last else len(self.modules) - 1)
                number = len(self.graph.layout.pipelines(name)[0].stages)
                stages += [np.rint(each * self.share[CODES[op], i, stage]) for stage in range(number)]
            costs.append(np.stack(stages, axis=1))
        order = balance.reorder_microbatches(*costs, evaluations=_ORDERS).order
        place = np.empty(count, np.int64)
        place[order] = np.arange(count)
        return place[slot]
