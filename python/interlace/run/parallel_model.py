"""`parallelize(mllm, plan)`: this process's share of a model, and `step(samples)` that trains it.

    parallel = parallelize(mllm, plan)           # transport "local": one process plays every rank
    loss = parallel.step(samples)                # gradients are in .grad of parallel.named_parameters()

Every rank of a replica is given the same samples; each collates what its own stages read, and media that it does not
run may be undecoded (`Media.data is None`). The loss is normalised by the number of valid targets of the whole batch,
over all replicas, so the gradients equal those of ``mllm(**mllm.collate(samples))`` in one process.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from interlace import balance
from interlace.model import MultimodalModel
from interlace.plan import ParallelPlan
from interlace.run.channel import Channel, LocalChannel, LocalNetwork, PipelineError
from interlace.run.executor import Executor, Key, StageRuntime, Step
from interlace.run.gradients import sum_over_ranks
from interlace.run.graph import ParameterMap, forward_only, stage_graph
from interlace.schedule import Action, Op, Schedule, check, gpipe, one_f_one_b
from interlace.simulate import Timeline

_GENERATORS: dict[str, Callable[..., Schedule]] = {"1f1b": one_f_one_b, "gpipe": gpipe}


class StepResult(float):
    """The loss of a step (mean cross entropy over the valid targets of the whole batch, nats), with its circumstances.

    The same on every rank. tokens: valid targets of all replicas; microbatches: of this replica.
    """

    tokens: int
    microbatches: int

    def __new__(cls, loss: float, tokens: int, microbatches: int) -> StepResult:
        result = super().__new__(cls, loss)
        result.tokens, result.microbatches = tokens, microbatches
        return result

    @property
    def loss(self) -> float:
        """The loss as a plain number."""
        return float(self)


def parallelize(
    mllm: MultimodalModel,
    plan: ParallelPlan,
    *,
    schedule: str = "1f1b",
    transport: str = "local",
    checkpointing: bool = False,
    autocast: torch.dtype | None = None,
    timeout: float = 300.0,
) -> ParallelModel:
    """Place ``mllm`` as ``plan`` says.

    ``transport="local"`` plays all ranks in this process: with one rank on ``mllm``'s own parameters, with several
    on a copy of the model for each. ``"distributed"`` is one rank of the default process group, on ``mllm``'s own
    parameters. ``checkpointing`` recomputes each layer's activations in backward; ``autocast`` (e.g.
    torch.bfloat16) runs forwards under autocast; ``timeout`` (seconds) bounds every wait for a peer.
    Raises ValueError when the world's size is not the plan's.
    """
    if schedule not in _GENERATORS:
        raise ValueError(f"unknown schedule {schedule!r}: use one of {', '.join(map(repr, sorted(_GENERATORS)))}")
    if transport == "local":
        network = LocalNetwork()
        ranks = list(range(plan.world_size))
        models = [mllm] if len(ranks) == 1 else [copy.deepcopy(mllm) for _ in ranks]
        channels: list[Channel] = [LocalChannel(rank, network) for rank in ranks]
    elif transport == "distributed":
        import torch.distributed as dist

        from interlace.run.distributed import DistributedChannel

        if not dist.is_initialized():
            raise PipelineError("torch.distributed is not initialised: call init_process_group before parallelize")
        if dist.get_world_size() != plan.world_size:
            raise ValueError(
                f"{dist.get_world_size()} ranks run but the plan is for {plan.world_size} "
                f"({plan.num_ranks} per replica x {plan.dp} replicas): start that many, or change the specs"
            )
        ranks = [dist.get_rank()]
        models = [mllm]
        channel = DistributedChannel(mllm.modules_order(), timeout)
        channel.add_groups(ParameterMap(mllm, plan).groups())
        channels = [channel]
    else:
        raise ValueError(f"unknown transport {transport!r}: use 'local' or 'distributed'")
    return ParallelModel(mllm, plan, _GENERATORS[schedule], ranks, models, channels, checkpointing, autocast)


class ParallelModel:
    """The ranks of a plan that this process plays (one, or all with the in-process channel)."""

    def __init__(
        self,
        mllm: MultimodalModel,
        plan: ParallelPlan,
        generator: Callable[..., Schedule],
        ranks: Sequence[int],
        models: Sequence[MultimodalModel],
        channels: Sequence[Channel],
        checkpointing: bool,
        autocast: torch.dtype | None,
    ):
        self.plan = plan
        self.mllm = mllm
        self.ranks = list(ranks)
        self.graph = stage_graph(mllm, plan)
        self._generator = generator
        self._autocast = autocast
        self._channels = dict(zip(ranks, channels, strict=True))
        self._schedules: dict[tuple[bool, tuple[frozenset[str], ...]], Schedule] = {}
        self._records: list[tuple[int, Action, float, float]] = []
        self._last: Schedule | None = None
        self.stages: dict[int, dict[Key, nn.Module]] = {}
        self._executors: dict[int, Executor] = {}
        for rank, model in zip(ranks, models, strict=True):
            self.stages[rank] = {
                (stage.module, stage.index): model.slice(
                    stage.module, stage.start, stage.stop, checkpointing=checkpointing
                )
                for stage in plan.of_rank(rank)
            }
            self._executors[rank] = Executor(
                rank, self._runtimes(rank), self._channels[rank], partial(self._reduce, rank)
            )
        self._map = ParameterMap(mllm, plan)

    # -- what lives here -------------------------------------------------------------------------------------

    @property
    def hosts(self) -> set[str]:
        """Modules whose stages run in this process: the modalities among them must be decoded here."""
        return {module for stages in self.stages.values() for module, _ in stages}

    def parameters_of(self, rank: int) -> dict[str, nn.Parameter]:
        """Parameters on ``rank`` by their name in the whole model; tied weights on one rank appear once."""
        found: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for stage in self.stages[rank].values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[name] = parameter
        return found

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of this process; a name repeats where several in-process ranks hold copies."""
        for rank in self.ranks:
            yield from self.parameters_of(rank).items()

    def train(self, mode: bool = True) -> None:
        """Switch the stages between training and evaluation (frozen modules stay in evaluation)."""
        for stages in self.stages.values():
            for stage in stages.values():
                stage.train(mode)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for _, parameter in self.named_parameters():
            parameter.grad = None

    # -- steps -----------------------------------------------------------------------------------------------

    def step(self, samples: Sequence[Any], microbatches: int | None = None) -> StepResult:
        """Forward and backward of one batch; gradients add up in ``.grad``.

        ``samples``: this replica's samples, or a list of lists to fix the microbatches. Otherwise they are spread
        over ``microbatches`` (default: twice the ranks of a replica, at most one per sample) by LLM tokens.
        """
        return self._run(samples, microbatches, train=True)

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Any], microbatches: int | None = None) -> StepResult:
        """Mean loss of a batch without gradients, over the same pipeline."""
        return self._run(samples, microbatches, train=False)

    def _run(self, samples: Sequence[Any], microbatches: int | None, train: bool) -> StepResult:
        replicas = sorted({rank // self.plan.num_ranks for rank in self.ranks})
        groups = {replica: self._split(samples[i :: len(replicas)], microbatches) for i, replica in enumerate(replicas)}
        # Whether a module runs anywhere in this step is known before it starts, so that all replicas reduce alike.
        *encoders, language_model = self.mllm.modules_order()
        facts = {}
        for rank in self.ranks:
            samples_here = [sample for group in groups[rank // self.plan.num_ranks] for sample in group]
            first = rank % self.plan.num_ranks == 0
            counts = [float((sample.labels != -100).sum()) for sample in samples_here]
            uses = [float(any(sample.media.get(name) for sample in samples_here)) for name in encoders]
            facts[rank] = [sum(counts) if first else 0.0, *uses]
        tokens, *uses = self._sum_over_world(facts, "step facts")
        active = {language_model, *(name for name, use in zip(encoders, uses, strict=True) if use)}
        if tokens == 0:
            raise ValueError("no sample of the batch has a valid target (every label is -100): nothing to train on")
        steps: dict[int, Step] = {}
        runs: dict[int, Iterator[str]] = {}
        for rank in self.ranks:
            replica_groups = groups[rank // self.plan.num_ranks]
            presence = tuple(self._presence(group) for group in replica_groups)
            schedule = self._schedule(train, presence)
            steps[rank] = Step(
                microbatches=replica_groups,
                presence=presence,
                inputs=self._collator(rank, replica_groups),
                scale=1.0 / tokens,
                autocast=self._autocast_context,
            )
            actions = list(schedule.actions[rank % self.plan.num_ranks])
            if train:
                actions += self._reductions(rank, active)
            runs[rank] = self._executors[rank].run(self._to_global(rank, actions), steps[rank])
            self._last = schedule
        _play(runs)
        self._records = [record for step in steps.values() for record in step.records]
        (loss_sum,) = self._sum_over_world({rank: [step.loss_sum] for rank, step in steps.items()}, "loss")
        return StepResult(loss_sum / tokens, int(tokens), len(groups[replicas[0]]))

    def _split(self, samples: Sequence[Any], microbatches: int | None) -> list[list[Any]]:
        if not samples:
            raise ValueError("a step needs at least one sample (or one microbatch) for each replica")
        if isinstance(samples[0], (list, tuple)):
            return [list(group) for group in samples if group]
        count = min(len(samples), microbatches or 2 * self.plan.num_ranks)
        weights = np.array([len(sample.input_ids) for sample in samples], dtype=np.float64)
        bins = balance.assign(weights, count, capacity=-(-len(samples) // count))
        groups: list[list[Any]] = [[] for _ in range(count)]
        for sample, b in zip(samples, bins, strict=True):
            groups[int(b)].append(sample)
        return [group for group in groups if group]

    def _presence(self, group: Sequence[Any]) -> frozenset[str]:
        *encoders, language_model = self.mllm.modules_order()
        return frozenset(
            [name for name in encoders if any(sample.media.get(name) for sample in group)] + [language_model]
        )

    def _schedule(self, train: bool, presence: tuple[frozenset[str], ...]) -> Schedule:
        key = (train, presence)
        if key not in self._schedules:
            graph = self.graph if train else forward_only(self.graph)
            schedule = self._generator(graph, presence, reduce_grad=False)
            check(schedule)
            if len(self._schedules) >= 256:  # presence patterns recur; a long run must not collect them without end
                self._schedules.clear()
            self._schedules[key] = schedule
        return self._schedules[key]

    def _to_global(self, rank: int, actions: Sequence[Action]) -> list[Action]:
        offset = rank - rank % self.plan.num_ranks
        if offset == 0:
            return list(actions)
        return [replace(a, peer=a.peer + offset) if a.peer >= 0 else a for a in actions]

    def _collator(self, rank: int, groups: Sequence[Sequence[Any]]) -> Callable[[str, int], dict[str, Any]]:
        cache: dict[tuple[str, int], dict[str, Any]] = {}

        def inputs(module: str, microbatch: int) -> dict[str, Any]:
            key = (module, microbatch)
            if key not in cache:
                cache[key] = self.mllm.collate_module(module, groups[microbatch])
            return cache[key]

        return inputs

    def _autocast_context(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        # A parameter that lives here: those of other ranks may be on the meta device.
        return torch.autocast(next(self.named_parameters())[1].device.type, dtype=self._autocast)

    # -- gradients that several ranks share ------------------------------------------------------------------

    def _runtimes(self, rank: int) -> dict[Key, StageRuntime]:
        local = rank % self.plan.num_ranks
        stages = self.graph.stages
        runtimes = {}
        for i, stage in enumerate(stages):
            if local not in stage.ranks:
                continue
            runtimes[stage.module, stage.index] = StageRuntime(
                module=self.stages[rank][stage.module, stage.index],
                producers=tuple((stages[a].module, stages[a].index) for a, b in self.graph.edges if b == i),
                sink=not any(a == i for a, _ in self.graph.edges),
            )
        return runtimes

    def _reduce(self, rank: int, action: Action) -> Iterator[str]:
        offset = rank - rank % self.plan.num_ranks
        if action.part > 0:
            tied = self._map.tied[action.part - 1]
            held = self.parameters_of(rank)
            parameter = next(held[name] for name in tied.names if name in held)
            ranks = [r + offset for r in tied.ranks]
            yield from sum_over_ranks([parameter], ranks, self._channels[rank], f"tied {tied.names[0]}")
            return
        ranks = self._map.stage_ranks(action.module, action.stage)
        parameters = list(self.stages[rank][action.module, action.stage].parameters())
        key = f"{action.module}[{action.stage}]"
        yield from sum_over_ranks(parameters, ranks, self._channels[rank], key)

    def _reductions(self, rank: int, active: set[str]) -> list[Action]:
        """REDUCE_GRAD of what this rank shares with others, in an order that is the same on all ranks."""
        local = rank % self.plan.num_ranks
        shared = [
            Action(Op.REDUCE_GRAD, stage.module, stage.index)
            for stage in reversed(self.graph.stages)
            if local in stage.ranks
            and stage.backward
            and stage.module in active
            and len(self._map.stage_ranks(stage.module, stage.index)) > 1
        ]
        language_model = self.mllm.modules_order()[-1]
        tied = [
            Action(Op.REDUCE_GRAD, language_model, 0, part=i + 1)
            for i, group in enumerate(self._map.tied)
            if local in group.ranks
        ]
        return shared + tied

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``; returns the norm.

        Each parameter counts once, however many ranks hold it.
        """
        squares = {}
        for rank in self.ranks:
            own = [
                parameter.grad
                for name, parameter in self.parameters_of(rank).items()
                if parameter.grad is not None and self._map.owner[name] == rank
            ]
            squares[rank] = [float(sum(gradient.double().pow(2).sum() for gradient in own)) if own else 0.0]
        norm = self._sum_over_world(squares, "gradient norm")[0] ** 0.5
        if norm > max_norm:
            for _, parameter in self.named_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def _sum_over_world(self, values: dict[int, list[float]], what: str) -> list[float]:
        """Sum a few numbers per rank over all ranks of all replicas, added in rank order."""
        world = range(self.plan.world_size)
        if len(self.ranks) == len(world):
            return np.sum([values[rank] for rank in world], axis=0).tolist()
        (rank,) = self.ranks
        table = torch.zeros(len(world), len(values[rank]), dtype=torch.float64)
        table[rank] = torch.tensor(values[rank], dtype=torch.float64)
        self._channels[rank].all_reduce(table, list(world), what)
        return table.numpy().sum(axis=0).tolist()

    # -- what was measured -----------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """Measured timeline of the last step over all ranks. Collective; every rank returns the same."""
        if self._last is None:
            raise PipelineError("no step has run yet: call step() before timeline()")
        records = self._records
        if len(self.ranks) < self.plan.world_size:
            import torch.distributed as dist

            gathered: list[Any] = [None] * self.plan.world_size
            dist.all_gather_object(gathered, records)
            records = [record for part in gathered for record in part]
        return Timeline.from_records(records, num_ranks=self.plan.world_size)


def _play(runs: dict[int, Iterator[str]]) -> None:
    """Drive the executors of this process in turn until all are done."""
    waiting: dict[int, str] = {}
    while runs:
        moved = False
        for rank in list(runs):
            try:
                reason = next(runs[rank])
                moved = moved or waiting.get(rank) != reason
                waiting[rank] = reason
            except StopIteration:
                del runs[rank]
                waiting.pop(rank, None)
                moved = True
        if runs and not moved:
            raise PipelineError("deadlock: " + "; ".join(waiting[rank] for rank in runs))
