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
import torch.distributed as dist
from torch import Tensor, nn

from interlace import balance
from interlace.model import MultimodalModel
from interlace.plan import ParallelPlan, StagePlan
from interlace.run import agreement, copies
from interlace.run.channel import Channel, LocalChannel, LocalNetwork, PipelineError
from interlace.run.distributed import DistributedChannel
from interlace.run.executor import Executor, Key, StageRuntime, Step
from interlace.run.gradients import sum_over_ranks
from interlace.run.graph import ParameterMap, forward_only, stage_graph
from interlace.schedule import Action, Schedule, check, gpipe, one_f_one_b
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

    def __getnewargs__(self) -> tuple[float, int, int]:  # type: ignore[override]
        return float(self), self.tokens, self.microbatches

    @property
    def loss(self) -> float:
        """The loss as a plain number."""
        return float(self)


def parallelize(
    mllm: MultimodalModel,
    plan: ParallelPlan,
    *,
    schedule: str = "1f1b",
    transport: str | None = None,
    checkpointing: bool = False,
    autocast: torch.dtype | None = None,
    timeout: float = 300.0,
) -> ParallelModel:
    """Place ``mllm`` as ``plan`` says. What is frozen is fixed here: freeze before.

    transport: "local" plays all ranks in this process, one rank on ``mllm``'s own parameters, several on a copy of the
        model each: optimize ``parallel.named_parameters()``, as a step of an optimizer over ``mllm.parameters()``
        raises, and bring back what they learned with `ParallelModel.copy_to`. "distributed" is one rank of the default
        process group, on ``mllm``'s own parameters; the default where such a group of more than one rank exists.
    schedule: "1f1b" or "gpipe". checkpointing: recompute each layer's activations in backward. autocast: run forwards
        under autocast to this dtype, e.g. torch.bfloat16. timeout: seconds that bound every wait for a peer
        (for rank 0 at the start and end of a step up to half as long again: it may be waiting for a lost one itself).

    Raises ValueError when the world's size is not the plan's, or for a plan that splits a stage (tp * cp > 1).
    """
    plan.check_executable()
    if schedule not in _GENERATORS:
        raise ValueError(f"unknown schedule {schedule!r}: use one of {', '.join(map(repr, sorted(_GENERATORS)))}")
    if transport is None:
        grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        transport = "distributed" if grouped else "local"
    if transport == "local":
        network = LocalNetwork()
        ranks = list(range(plan.world_size))
        models = [mllm] if len(ranks) == 1 else [copy.deepcopy(mllm) for _ in ranks]
        channels: list[Channel] = [LocalChannel(rank, network) for rank in ranks]
    elif transport == "distributed":
        if not dist.is_initialized():
            raise PipelineError("torch.distributed is not initialised: call init_process_group before parallelize")
        if dist.get_world_size() != plan.world_size:
            raise ValueError(
                f"{dist.get_world_size()} ranks run but the plan is for {plan.world_size} "
                f"({plan.num_ranks} per replica x {plan.dp} replicas): start that many, or change the specs"
            )
        ranks = [dist.get_rank()]
        models = [mllm]
        held = (p.device for stage in plan.of_rank(ranks[0]) for p in _stage(mllm, stage).parameters())
        channel = DistributedChannel(mllm.modules_order(), timeout, next(held))
        channel.add_groups(ParameterMap(mllm, plan).groups())
        channels = [channel]
    else:
        raise ValueError(f"unknown transport {transport!r}: use 'local' or 'distributed'")
    parallel = ParallelModel(mllm, plan, _GENERATORS[schedule], ranks, models, channels, checkpointing, autocast)
    if models != [mllm]:
        copies.watch(parallel, mllm)
    return parallel


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
        self._agreed = agreement.of_model(mllm, plan, schedule=generator.__name__, autocast=autocast)
        self._autocast = autocast
        self._channels = dict(zip(ranks, channels, strict=True))
        self._schedules: dict[tuple[bool, tuple[frozenset[str], ...], frozenset[str]], Schedule] = {}
        self._records: list[tuple[int, Action, float, float]] = []
        self._last: Schedule | None = None
        self._trainable = _trainable(mllm)
        self._failed = ""
        self.stages: dict[int, dict[Key, nn.Module]] = {}
        self._executors: dict[int, Executor] = {}
        for rank, model in zip(ranks, models, strict=True):
            self.stages[rank] = {
                (stage.module, stage.index): _stage(model, stage, checkpointing) for stage in plan.of_rank(rank)
            }
            self._executors[rank] = Executor(
                rank, self._runtimes(rank), self._channels[rank], partial(self._reduce, rank)
            )
        self._map = ParameterMap(mllm, plan)
        self._homes = {
            rank: {id(p): key for key, stage in reversed(stages.items()) for p in stage.parameters()}
            for rank, stages in self.stages.items()
        }

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

    def state_dict(self) -> dict[str, Tensor]:
        """This process's weights by their names in the whole model; a weight that several ranks hold is there once."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            found.setdefault(name, parameter.detach())
        return found

    @torch.no_grad()
    def copy_to(self, mllm: nn.Module) -> None:
        """Write this process's weights into ``mllm``: what several in-process ranks have learned on their copies."""
        parameters = dict(mllm.named_parameters(remove_duplicate=False))
        for name, weight in self.state_dict().items():
            parameters[name].copy_(weight)

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
        """Forward and backward of one batch; gradients add up in ``.grad`` until `zero_grad`.

        ``samples``: this replica's samples, or a list of lists to fix the microbatches. Otherwise they are spread
        over ``microbatches`` (default: twice the ranks of a replica, at most one per sample) by LLM tokens. With
        several replicas in this process, sample or microbatch i goes to replica i modulo their number.

        Raises ValueError for a batch without any valid target, or when what is frozen has changed since
        `parallelize`; PipelineError when a peer is lost or its batch is refused, and then the gradients are undefined.
        """
        if _trainable(self.mllm) != self._trainable:
            raise ValueError(
                "what is frozen has changed since parallelize(): freeze or unfreeze first, then parallelize again"
            )
        return self._run(samples, microbatches, train=True)

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Any], microbatches: int | None = None) -> StepResult:
        """Mean loss of a batch over the same pipeline, without gradients; 0 with ``tokens`` 0 if it has no target."""
        return self._run(samples, microbatches, train=False)

    def _run(self, samples: Sequence[Any], microbatches: int | None, train: bool) -> StepResult:
        if self._failed:
            raise PipelineError(f"an earlier step failed and left the ranks out of step ({self._failed}): start anew")
        for channel in self._channels.values():
            if isinstance(channel, LocalChannel):
                channel.network.clear()
        try:
            return self._run_step(samples, microbatches, train)
        except Exception as error:
            if not isinstance(next(iter(self._channels.values())), LocalChannel) and not isinstance(error, ValueError):
                self._failed = str(error)
            raise

    def _run_step(self, samples: Sequence[Any], microbatches: int | None, train: bool) -> StepResult:
        replicas = sorted({rank // self.plan.num_ranks for rank in self.ranks})
        refused: ValueError | None = None
        try:
            split = [self._split(samples[i :: len(replicas)], microbatches) for i in range(len(replicas))]
        except ValueError as error:
            refused, split = error, [[] for _ in replicas]
        groups = dict(zip(replicas, split, strict=True))

        # What runs anywhere in this step, and whether all can start, is known before it starts: so all replicas
        # reduce alike, and a batch that one rank refuses does not leave the others waiting.
        *encoders, language_model = self.mllm.modules_order()
        facts = {}
        for rank in self.ranks:
            here = [sample for group in groups[rank // self.plan.num_ranks] for sample in group]
            first = rank % self.plan.num_ranks == 0
            targets = sum(int((sample.labels != -100).sum()) for sample in here) if first else 0
            present = ",".join(n for n in encoders if any(s.media.get(n) for s in here))
            given = agreement.of_samples(groups[rank // self.plan.num_ranks]).text
            facts[rank] = [refused is not None, targets, present, f"{self._agreed.text}; train={train}", given]
        everyone = self._exchange(facts, "start of the step")
        if refused is not None:
            raise refused
        bad = [str(rank) for rank, (is_bad, *_) in enumerate(everyone) if is_bad]
        if bad:
            raise ValueError(f"rank {', '.join(bad)} refused its batch, so no rank runs this step: see its error")
        self._check_agreement([model for *_, model, _ in everyone], [samples for *_, samples in everyone])
        tokens = sum(count for _, count, *_ in everyone)
        active = frozenset({language_model}.union(*(names.split(",") for _, _, names, *_ in everyone if names)))
        if tokens == 0:
            if train:
                raise ValueError("no sample of the batch has a valid target (every label is -100): nothing to train on")
            return StepResult(0.0, 0, len(split[0]))

        kept = self._set_shared_gradients_aside() if train else []
        steps: dict[int, Step] = {}
        runs: dict[int, Iterator[str]] = {}
        for rank in self.ranks:
            replica_groups = groups[rank // self.plan.num_ranks]
            presence = tuple(self._presence(group) for group in replica_groups)
            schedule = self._schedule(train, presence, active)
            steps[rank] = Step(
                presence=presence,
                inputs=self._collator(rank, replica_groups),
                scale=1.0 / tokens,
                autocast=self._autocast_context,
            )
            actions = self._to_global(rank, schedule.actions[rank % self.plan.num_ranks])
            runs[rank] = self._executors[rank].run(actions, steps[rank])
            self._last = schedule
        _play(runs)
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._records = [record for step in steps.values() for record in step.records]
        sums = self._exchange({rank: step.loss_sum for rank, step in steps.items()}, "loss")
        return StepResult(sum(sums) / tokens, tokens, len(split[0]))

    def _check_agreement(self, models: Sequence[str], samples: Sequence[str]) -> None:
        wrong = agreement.disagreement(dict(enumerate(models)))
        for first in range(0, self.plan.world_size, self.plan.num_ranks):
            replica = range(first, first + self.plan.num_ranks)
            wrong = wrong or agreement.disagreement({rank: samples[rank] for rank in replica})
        if wrong:
            raise ValueError(f"the ranks were not given the same, so none runs this step: {wrong}")

    def _set_shared_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take the gradients of earlier steps off what ranks share: those are sums over ranks already."""
        kept = []
        for rank in self.ranks:
            for key, stage in self.stages[rank].items():
                if len(self._map.stage_ranks(*key)) == 1 and not self._map.tied:
                    continue
                for parameter in stage.parameters():
                    if parameter.grad is not None:
                        kept.append((parameter, parameter.grad))
                        parameter.grad = None
        return kept

    def _split(self, samples: Sequence[Any], microbatches: int | None) -> list[list[Any]]:
        if not samples:
            raise ValueError("a step needs at least one sample (or one microbatch) for each replica")
        if microbatches is not None and microbatches < 1:
            raise ValueError(f"microbatches is {microbatches}: it must be at least 1")
        grouped = [isinstance(item, (list, tuple)) for item in samples]
        if all(grouped):
            if microbatches is not None and microbatches != len(samples):
                raise ValueError(f"microbatches is {microbatches} but {len(samples)} of them are given: leave it out")
            groups = [list(group) for group in samples if group]
            if not groups:
                raise ValueError("all microbatches are empty: a step needs at least one sample for each replica")
            return groups
        if any(grouped):
            raise ValueError("samples mixes samples and lists: pass a list of samples, or a list of microbatches")
        count = min(len(samples), microbatches or 2 * self.plan.num_ranks)
        weights = np.array([len(sample.input_ids) for sample in samples], dtype=np.float64)
        bins = balance.assign(weights, count, capacity=-(-len(samples) // count))
        groups = [[] for _ in range(count)]
        for sample, b in zip(samples, bins, strict=True):
            groups[int(b)].append(sample)
        return [group for group in groups if group]

    def _presence(self, group: Sequence[Any]) -> frozenset[str]:
        *encoders, language_model = self.mllm.modules_order()
        return frozenset(
            [name for name in encoders if any(sample.media.get(name) for sample in group)] + [language_model]
        )

    def _schedule(self, train: bool, presence: tuple[frozenset[str], ...], active: frozenset[str]) -> Schedule:
        key = (train, presence, active)
        if key not in self._schedules:
            graph = self.graph if train else forward_only(self.graph)
            schedule = self._generator(graph, presence, active=active)
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
        if len(ranks) == 1:
            return
        stage = self.stages[rank][action.module, action.stage]
        # A weight that two stages of this rank share is reduced with the first of them only.
        parameters = [p for p in stage.parameters() if self._homes[rank][id(p)] == (action.module, action.stage)]
        key = f"{action.module}[{action.stage}]"
        yield from sum_over_ranks(parameters, ranks, self._channels[rank], key)

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
            squares[rank] = float(sum(gradient.double().pow(2).sum() for gradient in own)) if own else 0.0
        norm = sum(self._exchange(squares, "gradient norm")) ** 0.5
        if norm > max_norm:
            for _, parameter in self.named_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def _exchange(self, values: dict[int, Any], what: str) -> list[Any]:
        """One small value per rank -> those of all ranks of all replicas, in rank order."""
        if len(self.ranks) == self.plan.world_size:
            return [values[rank] for rank in self.ranks]
        (rank,) = self.ranks
        channel = self._channels[rank]
        assert isinstance(channel, DistributedChannel)
        return channel.exchange(values[rank], what)

    # -- what was measured -----------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """Measured timeline of the last step over all ranks. Collective; every rank returns the same."""
        if self._last is None:
            raise PipelineError("no step has run yet: call step() before timeline()")
        records = self._records
        if len(self.ranks) < self.plan.world_size:
            text = "\n".join(f"{rank} {action} {start!r} {finish!r}" for rank, action, start, finish in records)
            parts = self._exchange(dict.fromkeys(self.ranks, text), "timeline")
            records = [_record(line) for part in parts for line in part.splitlines()]
        return Timeline.from_records(records, num_ranks=self.plan.world_size)


def _record(line: str) -> tuple[int, Action, float, float]:
    try:
        rank, action, start, finish = line.split()
        return int(rank), Action.parse(action), float(start), float(finish)
    except ValueError as error:
        raise PipelineError(f"another rank's timeline has the line {line[:100]!r}: {error}") from error


def _stage(mllm: MultimodalModel, stage: StagePlan, checkpointing: bool = False) -> nn.Module:
    return mllm.slice(stage.module, stage.start, stage.stop, checkpointing=checkpointing)


def _trainable(mllm: nn.Module) -> tuple[bool, ...]:
    return tuple(parameter.requires_grad for parameter in mllm.parameters())


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
