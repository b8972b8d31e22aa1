"""`ParallelModel`: this process's share of a model, and `step(samples)` that trains it.

Every rank receives the same samples, the global batch. The step's table assigns them to ranks; media that a rank does
not run may be undecoded. The loss is normalised by the number of valid targets of the whole batch, so the gradients
equal those of ``mllm(**mllm.collate(samples))`` in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from interlace.comm.channels.base import Channel
from interlace.comm.transports import Transport
from interlace.layout import Layout
from interlace.model import Media, MultimodalModel
from interlace.parallel.region import Region
from interlace.parallel.route import Routes
from interlace.run import comparison
from interlace.run.comparison import Comparison
from interlace.run.errors import PipelineError, as_pipeline_errors, wait_of
from interlace.run.execute.device import Mark, device_of, seconds
from interlace.run.execute.gradients import GradientNorm, totals, whole_gradients
from interlace.run.execute.result import Spans, StepResult, gathered, measured
from interlace.run.execute.step import Step
from interlace.run.execute.weights import Trained
from interlace.run.graph import stage_graph
from interlace.run.lanes import with_lanes
from interlace.run.options import StepOptions
from interlace.run.process import Process
from interlace.run.tables.ahead import TablesAhead
from interlace.run.tables.assign import assigner_of
from interlace.run.tables.batch import Batch, ChunkInputs, Dispatched, GlobalBatch, Microbatches, read_media
from interlace.run.tables.deals import Deals
from interlace.run.tables.dispatch import dispatcher_of
from interlace.run.tables.lists import Lists
from interlace.run.tables.needs import Needs, needs_of
from interlace.run.tables.table import Samples
from interlace.schedule import Schedule, StepTable
from interlace.simulate import Timeline


class Prepared(NamedTuple):
    """A batch ready to run. deals, routes: of each rank of this process. tokens: its valid targets. text, digest: of
    the batch, and of all inputs, for `Comparison`."""

    batch: GlobalBatch
    table: StepTable
    schedule: Schedule
    deals: Mapping[int, Deals]
    routes: Mapping[int, Routes]
    device: torch.device
    tokens: int
    text: str
    digest: int


class ParallelModel:
    """The ranks of a layout in this process: one, or all.

    channel: connection to the ranks of other processes; None if one process runs all ranks.
    """

    def __init__(
        self,
        mllm: MultimodalModel,
        layout: Layout,
        options: StepOptions,
        ranks: Sequence[int],
        channel: Channel | None,
        device: torch.device,
    ):
        self.layout, self.mllm, self.options, self.ranks = layout, mllm, options, list(ranks)
        self.channel, self._failed = channel, ""
        self._last: tuple[Schedule, StepTable, Mapping[int, Sequence[tuple[Mark, Mark]]]] | None = None
        self._agreed = comparison.of_model(mllm, layout, **options.compared()).text
        self.graph, rows = with_lanes(stage_graph(mllm, layout), mllm, sequence_parallel=options.sequence_parallel)
        self._process = Process(mllm, self.graph, self.ranks, options, rows, channel, device)
        self._ranks, self._own = self._process.ranks, self._process.own
        self._trained = Trained(mllm)
        parameters = dict(self.named_parameters())
        self._norm = GradientNorm(parameters, parameters.keys() if self._own is None else self._own.counts, channel)
        self._assigner = assigner_of(options.assign, layout, mllm, recompute=options.recompute)
        self._lists = Lists(self.graph, options.schedule, options.schedule_options or {}, self._assigner)
        self.dispatcher = dispatcher_of(
            options.balance, layout, mllm, recompute=options.recompute, ranks_per_node=options.ranks_per_node
        )
        self._ahead = TablesAhead()

    # -- weights and stages ----------------------------------------------------------------------------------

    @property
    def stages(self) -> dict[int, dict[tuple[str, int], nn.Module]]:
        """Rank of this process -> (module, stage) -> its StageModule."""
        return {number: rank.stages for number, rank in self._ranks.items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that an optimizer trains in this process, by their names in the model; each once.

        With transport "local" these are the model's own. Otherwise they are this rank's: its piece of a weight that its
        lane has cut, and its rows, if any, of a sharded weight.
        """
        yield from self.mllm.named_parameters() if self._own is None else self._own.own.items()

    def regions(self) -> dict[str, Region]:
        """Name -> region in the whole weight, for those of `named_parameters` that are pieces."""
        return {} if self._own is None else dict(self._own.cut)

    def state_dict(self) -> dict[str, Tensor]:
        """This process's weights by their names in the whole model."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    @property
    def feature_bytes(self) -> int:
        """Bytes of a row that an encoder passes to the language model."""
        embedding: Tensor = self.mllm.language_model.get_input_embeddings().weight  # type: ignore[operator]
        return int(embedding.shape[-1] * (self.options.autocast or embedding.dtype).itemsize)

    def train(self, mode: bool = True) -> None:
        """Switch the stages between training and evaluation (frozen modules stay in evaluation)."""
        for stages in self.stages.values():
            for stage in stages.values():
                stage.train(mode)

    def connect_lanes(self, through: Callable[[Transport], Transport]) -> None:
        """Wrap the transport that connects the ranks of each lane with `through`.

        For measurements: a `Forwarding` that counts messages, or an `EmulatedTransport` of another speed. May be called
        again to replace the wrapper; on all ranks, between steps.
        """
        self._process.connect_lanes(through)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for _, parameter in self.named_parameters():
            parameter.grad = None

    # -- tables ----------------------------------------------------------------------------------------------

    def table(
        self,
        samples: Batch,
        microbatches: Microbatches = None,
        chunks: Mapping[str, int] | None = None,
        place: tuple[int, int, int] = (0, 0, 0),
    ) -> StepTable:
        """The step table over `samples`: arguments and errors as in `step`."""
        return self._table(GlobalBatch.of(samples, microbatches, chunks, place))

    def _table(self, batch: GlobalBatch) -> StepTable:
        return self._ahead.take(batch) or batch.table(self.layout, self._assigner, self.dispatcher)

    def schedule(self, table: StepTable, *, train: bool = True, dispatch: bool = False) -> Schedule:
        """The checked schedule of a table. Tables with the same chunks and links share one.

        dispatch: whether ranks start the exchange of the next step's items in it (streams).

        Raises ValueError for a table that the layout cannot run, and for a chunk of an encoder without a reader.
        """
        return self._lists.of(table, train=train, dispatch=dispatch)

    def item_transports(self) -> dict[int, Transport]:
        """Rank of this process -> a transport between all ranks, on the host, for the items of streams. Collective;
        the caller closes them."""
        return self._process.item_transports()

    def needs(
        self, samples: Samples, microbatches: Microbatches = None, chunks: Mapping[str, int] | None = None
    ) -> Needs:
        """The parts of `samples` that each rank needs in a step with these arguments. samples: may be outlines."""
        return needs_of(self.layout, self.table(samples, microbatches, chunks), samples)

    def wanted(
        self, samples: Batch, microbatches: Microbatches = None, chunks: Mapping[str, int] | None = None
    ) -> list[Media]:
        """The media of `samples` that this process reads in a step with these arguments.

        For the thread that reads ahead: the table is cached for the step over the same sample objects.
        """
        batch = GlobalBatch.of(samples, microbatches, chunks)
        table = self._ahead.prepare(batch, lambda: batch.table(self.layout, self._assigner, self.dispatcher))
        return read_media(self.layout, self.ranks, table, batch.samples)

    # -- steps -----------------------------------------------------------------------------------------------

    def step(
        self,
        samples: Batch | Dispatched,
        microbatches: Microbatches = None,
        *,
        chunks: Mapping[str, int] | None = None,
        place: tuple[int, int, int] = (0, 0, 0),
        note: Callable[[], float] = lambda: 0.0,
        loss_scale: float = 1.0,
    ) -> StepResult:
        """Forward and backward of the global batch; gradients add up in ``.grad`` until `zero_grad`.

        samples: the same list on every rank. A list of lists fixes the chunks of the language model: empty lists are
            left out, the i-th goes to replica i modulo the number of replicas. Otherwise samples are spread by their
            tokens over `microbatches` of each replica: one number for all or one for each (default: twice its stages,
            at most one per sample). Or the batch of a stream (`interlace.data.StreamLoader`), whose samples are only on
            the ranks that need them.
        chunks: encoder -> chunks of each of its replicas (default: as many as the language model; 1 with placement
            "shared"). place: (epoch, position, step) of the batch, for the table. note: called at the end; its result
            is sent to all ranks (see StepResult).
        loss_scale: factor of the loss for gradients and their norm, the same on every rank.

        Raises ValueError for a batch without any valid target, if ranks have different inputs, or if the model's
        parameters or frozen flags have changed since `parallelize`. Raises PipelineError if a peer is lost; then the
        gradients are undefined.
        """
        with self._leaving_on_error():
            prepared = self._prepare(samples, microbatches, chunks, place, loss_scale)
            return self._run_step(prepared, note, loss_scale)

    @torch.no_grad()
    def evaluate(
        self, samples: Batch, microbatches: Microbatches = None, *, chunks: Mapping[str, int] | None = None
    ) -> StepResult:
        """Mean loss of a batch on the same pipeline, without gradients; 0 with ``tokens`` 0 if it has no target."""
        with self._leaving_on_error():
            prepared = self._prepare(samples, microbatches, chunks, (0, 0, 0), None)
            return self._run_step(prepared, None, None)

    @contextlib.contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Runs a step. After an error, other than one that all ranks raise, this rank leaves the group."""
        if self._failed:
            raise PipelineError(
                f"an earlier step failed and left the ranks out of sync ({self._failed}): restart the run"
            )
        try:
            with as_pipeline_errors():
                yield
        except Exception as error:
            self._process.recover()
            if self.channel is not None and not isinstance(error, ValueError):
                self._failed = str(error)
                if lost := self.channel.leave(self._failed, wait_of(error)):
                    self._failed = f"rank {self.ranks[0]}: {lost}; first symptom: {error}"
                if self.options.crash_folder is not None:
                    with contextlib.suppress(OSError):  # must not hide the original error
                        self.channel.recorder.dump(Path(self.options.crash_folder), self._failed)
                if lost:
                    raise PipelineError(self._failed) from error
            raise

    def _prepare(
        self,
        samples: Batch | Dispatched,
        microbatches: Microbatches,
        chunks: Mapping[str, int] | None,
        place: tuple[int, int, int],
        loss_scale: float | None,
    ) -> Prepared | ValueError:
        """The tables of a batch; the error of a batch that cannot run, which the other ranks must learn of first.

        Arguments as in `step`. loss_scale: None for evaluation.
        """
        train, order = loss_scale is not None, self.options.context_order
        try:
            if train:
                self._trained.check(self.mllm)
            batch, device = GlobalBatch.of(samples, microbatches, chunks, place), device_of(self.mllm)
            table = self._table(batch)
            if batch.dispatched is None:
                deals = dict.fromkeys(self.ranks, Deals(self.mllm, self.layout, table, batch.samples, order))
            else:
                given = batch.dispatched.of_rank
                deals = {rank: Deals(self.mllm, self.layout, table, given[rank], order) for rank in self.ranks}
            schedule = self.schedule(table, train=train, dispatch=train and batch.dispatched is not None)
            routes = {number: each.routes(device) for number, each in deals.items()}
            text = comparison.of_samples(batch.lists()).text
        except ValueError as error:
            return error
        tokens = int(table.targets.sum()) if table.targets is not None else 0
        digest = comparison.number(table.digest, schedule.digest, self._agreed, loss_scale, text)
        return Prepared(batch, table, schedule, deals, routes, device, tokens, text, digest)

    def _run_step(
        self, prepared: Prepared | ValueError, note: Callable[[], float] | None, loss_scale: float | None
    ) -> StepResult:
        """Arguments as in `step`. loss_scale: None for evaluation."""
        train = loss_scale is not None
        model = f"{self._agreed}; {train=}; {loss_scale=}"
        if isinstance(prepared, ValueError):
            Comparison(self.channel, None, model, "").finish()
            raise prepared
        compared = Comparison(self.channel, prepared.digest, model, prepared.text)
        if prepared.tokens == 0:
            compared.finish()
            if train:
                raise ValueError("no sample of the batch has a valid target (every label is -100): nothing to train on")
            return StepResult(0.0, 0, 0)

        self._process.refresh()
        earlier_gradients = self._process.set_shared_gradients_aside() if train else []
        scale = (loss_scale or 1.0) / prepared.tokens
        steps = {number: self._step(number, prepared, compared, scale) for number in self.ranks}
        if train:
            self._norm.set(None)
        try:
            self._process.execute(prepared.schedule, steps, prepared.digest, prepared.device)
        except ValueError:  # the ranks' inputs differ, and no backward has run: restore the gradients of earlier steps
            for parameter, gradient in earlier_gradients:
                parameter.grad = gradient
            raise
        self._process.pieces.collect()
        for parameter, gradient in earlier_gradients:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        table = prepared.table
        self._last = prepared.schedule, table, {number: step.times for number, step in steps.items()}
        loss, norm, notes = self._results(steps, 0.0 if note is None else float(note()), train)
        if train:
            self._norm.set(norm)
        most = max(chunk.index for chunk in table.chunks if chunk.module == self.graph.modules[-1]) + 1
        return StepResult(loss / prepared.tokens, prepared.tokens, most, notes, table)

    def _step(self, number: int, prepared: Prepared, compared: Comparison, scale: float) -> Step:
        """The inputs of a step for one rank of this process. scale: of the summed loss."""
        table, device, dispatched = prepared.table, prepared.device, prepared.batch.dispatched
        samples = prepared.batch.samples if dispatched is None else dispatched.of_rank[number]
        ends = {
            i: (c.module, len(self.layout.pipelines(c.module)[c.replica].stages) - 1)
            for i, c in enumerate(table.chunks)
        }
        inputs = ChunkInputs(self.mllm, table, samples, self._ranks[number].stages, device)
        dispatch = None if dispatched is None else partial(dispatched.start, number)
        routes, deals, autocast = prepared.routes[number], prepared.deals[number], self.options.autocast
        return Step(routes, ends, inputs, deals, scale, compared, device, autocast, dispatch)

    def _results(self, steps: Mapping[int, Step], note: float, train: bool) -> tuple[float, float, tuple[float, ...]]:
        """The summed loss, the norm of the gradients and the ranks' notes, the same on every rank."""
        losses = [step.loss for step in steps.values() if step.loss is not None]
        loss, square = totals(losses, self._norm.squares() if train else [])
        if self.channel is None:
            return loss, square**0.5, (note,) * len(self.ranks)
        mine = [loss, square, note, float(any(step.drew for step in steps.values()))]
        with as_pipeline_errors():
            numbers = torch.tensor(mine, dtype=torch.float64)
            everyone = self.channel.start_all_gather(numbers, "loss", compare_sums=train).wait()
        if drew := everyone[:, 3].nonzero().flatten().tolist():
            raise PipelineError(
                f"rank {', '.join(map(str, drew))} drew random numbers (dropout?) in a module with tp > 1 or cp > 1, "
                "whose ranks draw different ones: set its dropout to 0, or use tp = cp = 1"
            )
        total, square, *_ = everyone.sum(0).tolist()
        return total, square**0.5, tuple(everyone[:, 2].tolist())

    # -- gradients -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, recompute: bool = False) -> float:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``; returns the norm.

        Each parameter counts once, even if several ranks hold it. The norm is known since the end of the step. If
        gradients were changed since then, pass `recompute` on every rank to compute it again.
        """
        with as_pipeline_errors():
            return self._norm.clip(max_norm, recompute)

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor | None]:
        """Name -> the whole gradient, of every parameter of the model, on every rank (for tests and debugging)."""
        if self.channel is None or self._own is None:
            return {n: None if p.grad is None else p.grad.clone() for n, p in self.mllm.named_parameters()}
        model, here = dict(self.mllm.named_parameters(remove_duplicate=False)), self._own
        counted = {id(model[name]): (p, here.cut.get(name)) for name, p in here.own.items() if name in here.counts}
        with as_pipeline_errors():
            return whole_gradients(self.mllm, counted, self.channel)

    # -- measured times --------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """Measured timeline of the last step over all ranks. Collective; every rank returns the same."""
        if self._last is None:
            raise PipelineError("no step has run yet: call step() before timeline()")
        schedule, table, marks = self._last
        times: Sequence[Spans] = [
            seconds(marks.get(rank, []), device_of(self.mllm)) for rank in range(self.layout.world)
        ]
        planning: Sequence[Spans] = [
            self._ahead.within(mine) if rank == self.ranks[0] else [] for rank, mine in enumerate(times)
        ]
        if self.channel is not None:
            (number,) = self.ranks
            with as_pipeline_errors():
                times, planning = gathered(self.channel, schedule, times[number], planning[number])
        return measured(schedule, table, times, planning)
