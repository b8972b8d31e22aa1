"""Executes the action list of one rank: the same rows that the checker proved and the simulator times. Decides nothing.

A plain loop: each action ends before the next starts. RECV blocks until the message has arrived. SEND, REDUCE_GRAD,
UNSHARD and DISPATCH only start an asynchronous transfer. Sums are awaited at the end of the list; sums of tied weights
are made from them then. Gathered weights are awaited by the first forward that uses them, or layer by layer. Several
ranks of one process run in a thread each.

A stage's forward starts from detached inputs and its backward ends at them. An activation crosses each stage boundary,
to another rank or within one, and later its gradient crosses back. So every layout computes the same numbers.

Ranks of one lane compute together, each with its part of the messages (`interlace.run.execute.messages`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from interlace.comm.channels.base import Channel, Tag
from interlace.comm.overlap.deferred import DeferredGradients
from interlace.comm.process.abort_reports import named
from interlace.comm.process.errors import CommError
from interlace.comm.process.recorder import page_in_use
from interlace.parallel.route import Index, put, take
from interlace.run.errors import PipelineError, as_pipeline_errors
from interlace.run.execute.collectives import Collectives
from interlace.run.execute.deferred import LinearLayers, linear_layers
from interlace.run.execute.device import autocast, drawn_since, generators, mark
from interlace.run.execute.messages import Messages
from interlace.run.execute.step import Key, Read, StageRuntime, Step, Value
from interlace.schedule import StageGraph
from interlace.schedule.actions import CODES, OPS, Op, action_of

FORWARD, BACKWARD, SEND, RECV = (CODES[op] for op in (Op.FORWARD, Op.BACKWARD, Op.SEND, Op.RECV))
BACKWARD_INPUT, REDUCE_GRAD, DISPATCH = (CODES[op] for op in (Op.BACKWARD_INPUT, Op.REDUCE_GRAD, Op.DISPATCH))
# By name: bound methods in the executor would be a reference cycle, which would keep a step's sums until the next GC.
METHODS = {
    FORWARD: "_forward",
    BACKWARD: "_backward",
    BACKWARD_INPUT: "_backward",
    CODES[Op.BACKWARD_WEIGHT]: "_backward_weight",
    SEND: "_send",
    RECV: "_receive",
    DISPATCH: "_dispatch",
    CODES[Op.UNSHARD]: "collectives.unshard",
    CODES[Op.UNSHARD_LAYERS]: "_unshard_layers",
    CODES[Op.RESHARD]: "collectives.reshard",
    REDUCE_GRAD: "collectives.reduce",
}


class Executor:
    """Runs the action list of one step on one rank. stages: those of the rank. graph: of the layout."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[Key, StageRuntime],
        graph: StageGraph,
        channel: Channel,
        collectives: Collectives,
        step: Step,
    ) -> None:
        self.rank, self.stages, self.channel, self.collectives = rank, dict(stages), channel, collectives
        self.messages = Messages(rank, self.stages, graph, channel, step)
        self._modules, self._step = graph.modules, step
        self._outputs: dict[Value, Tensor] = {}
        self._gradients: dict[Value, Tensor] = {}  # of outputs made here, summed over the readers so far
        self._leaving: dict[Read, Tensor] = {}  # gradients to send
        self._saved: dict[Value, tuple[dict[Value | str, Tensor], Tensor]] = {}  # received tensors, output
        self._put_off: dict[Value, DeferredGradients] = {}  # kept from BACKWARD_INPUT to BACKWARD_WEIGHT
        self._travelling: Callable[[], float | None] | None = None  # end time of the exchange for the next step
        # Read from the list: no values are kept that it does not use.
        self._uses: dict[Value, int] = defaultdict(int)  # how often each value is used on this rank
        self._takes_backward: set[Value] = set()
        self._split: set[Value] = set()  # those with a BACKWARD_INPUT and a BACKWARD_WEIGHT
        self._gradients_to_send: set[Read] = set()
        self._received: set[Read] = set()
        self._linears: dict[Key, LinearLayers] = {}

    def run(self, rows: NDArray[np.int32]) -> None:
        """Run the actions `rows` (int32 [n, 7]) in order. Raises PipelineError that names the failed action."""
        actions = rows.tolist()
        self._read(actions)
        self.messages.expect(actions)
        try:
            self._run(actions)
        finally:
            self.collectives.end()

    def _run(self, actions: Sequence[Sequence[int]]) -> None:
        modules, step, recorder, started = self._modules, self._step, self.channel.recorder, False
        page = page_in_use()
        for row in actions:
            op, module, *rest = row
            if not started and op != DISPATCH and (op != FORWARD or self._together(row)):
                started = True
                step.comparison.finish()
            begin = mark(step.device)
            computing = recorder.begin("compute", action_of(row, modules), self._together(row)) if op < SEND else -1
            try:
                if op not in METHODS:
                    raise PipelineError(
                        f"the executor does not support {OPS[op].name}: use a schedule of schedule.GENERATORS"
                    )
                with record_function(str(action_of(row, modules))) if _profiler_enabled() else nullcontext():
                    attrgetter(METHODS[op])(self)(modules[module], *rest)
            except CommError as error:
                raise PipelineError(f"{self._where(row)}{error}") from error
            except Exception as error:
                kind = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
                raise PipelineError(f"rank {self.rank}, {_describe(row, modules)}: {kind}{error}") from error
            if computing >= 0:
                recorder.end(computing)
            if page is not None:
                page.tick()
            step.times.append((begin, mark(step.device)))
        if not started:
            step.comparison.finish()
        self._finish(actions)
        for left, lacking in ((self._saved, "BACKWARD"), (self._put_off, "BACKWARD_WEIGHT")):
            for name, stage, chunk in left:
                raise PipelineError(f"rank {self.rank}: {name}[{stage}] chunk {chunk} has had no {lacking}")

    def _together(self, row: Sequence[int]) -> Sequence[int]:
        """The ranks that run an action together; empty if this rank runs it alone."""
        op, module, stage, *_ = row
        ranks = self.stages[self._modules[module], stage].place.ranks if op < SEND else ()
        return ranks if len(ranks) > 1 else ()

    def _where(self, row: Sequence[int]) -> str:
        """Prefix for errors: the action and the lane of several ranks in which an operation failed."""
        if not (ranks := self._together(row)):
            return ""
        return f"rank {self.rank}, {_describe(row, self._modules)}, in the lane of {named(ranks)}: "

    # -- values ----------------------------------------------------------------------------------------------

    def _read(self, actions: Sequence[Sequence[int]]) -> None:
        """Count in the list how often each value is used on this rank."""
        forwards: list[Value] = []
        for op, number, stage, chunk, other, _, grad in actions:
            value = self._modules[number], stage, chunk
            if op == FORWARD:
                forwards.append(value)
            elif op == BACKWARD:
                self._takes_backward.add(value)
            elif op == BACKWARD_INPUT:
                self._split.add(value)
            elif op == SEND and grad:
                self._gradients_to_send.add((*value, other))
            elif op == SEND:
                self._uses[value] += 1
            elif op == RECV and not grad:
                self._received.add((*value, other))
        self._takes_backward |= self._split
        if self._split:
            self._linears = linear_layers(self.stages, {value[:2] for value in self._split})
        for module, stage, chunk in forwards:
            for source in [(module, stage - 1, chunk)] if stage else self._origins(chunk):
                if (*source, chunk) not in self._received:
                    self._uses[source] += 1

    def _origins(self, chunk: int) -> list[Value]:
        """The activations from which `chunk` reads rows."""
        return [(*self._step.ends[source], source) for source in self._step.routes.sources.get(chunk, ())]

    def _output(self, source: Value) -> Tensor:
        """The output of a stage of this rank; dropped after its last use."""
        self._uses[source] -= 1
        return self._outputs[source] if self._uses[source] else self._outputs.pop(source)

    def _has_backward(self, source: Value, reader: int) -> bool:
        return source in self._takes_backward or (*source, reader) in self._gradients_to_send

    # -- actions ---------------------------------------------------------------------------------------------

    def _forward(self, module: str, stage: int, chunk: int, *_: int) -> None:
        step, runtime = self._step, self.stages[module, stage]
        self.collectives.gathered((module, stage))
        inputs = step.inputs.of(module, chunk, first_stage=stage == 0)
        inputs = step.deals.inputs(module, chunk, runtime.place, inputs)
        backward = (module, stage, chunk) in self._takes_backward
        received: dict[Value | str, Tensor] = {}
        hidden = None
        if stage:
            source = (module, stage - 1, chunk)
            arrives = (*source, chunk) in self._received
            value = self.messages.joined((*source, chunk, 0)) if arrives else self._output(source)
            hidden = received[source] = value.requires_grad_(backward and self._has_backward(source, chunk))
        else:
            if features := self._features(chunk, runtime.place.cp.rank, backward):
                inputs = {**inputs, "features": features}
                received.update(features)
        by_layer = self.collectives.by_layer.get((module, stage))
        split = self._linears[module, stage] if (module, stage, chunk) in self._split else None
        states = generators(step.device) if runtime.place.lane.world > 1 else None
        with (
            torch.set_grad_enabled(backward),
            autocast(step.device, step.autocast),
            by_layer.forward() if by_layer else nullcontext(),
            split.forward() if split else nullcontext(),
        ):
            output = runtime.module(inputs, hidden)
        step.drew |= states is not None and drawn_since(states, step.device)
        if runtime.sink:
            if runtime.place.tp.rank == 0:  # all tensor-parallel ranks have the same loss: count it once
                loss = output.detach().double()
                step.loss = loss if step.loss is None else step.loss + loss
        elif self._uses[module, stage, chunk]:
            self._outputs[module, stage, chunk] = output.detach()
        if backward:
            self._saved[module, stage, chunk] = (received, output)

    def _features(self, chunk: int, cp_rank: int, backward: bool) -> dict[str, Tensor]:
        """Encoder -> the rows of it that this rank's share of a chunk reads, in the order of its placeholders."""
        parts: dict[str, list[tuple[Index, Tensor]]] = {}
        needs_gradient: set[str] = set()
        for source in self._origins(chunk):
            name, _, producer = source
            route = self._step.routes.between(producer, chunk)
            if (*source, chunk) in self._received:
                rows = self.messages.joined((*source, chunk, 0))
            else:
                rows = take(self._output(source), route.rows).split(route.regions)[cp_rank]
            parts.setdefault(name, []).append((route.places[cp_rank], rows))
            if self._has_backward(source, chunk):
                needs_gradient.add(name)
        features = {}
        for name, pieces in parts.items():
            places, rows = pieces[0]
            if len(pieces) > 1 or not isinstance(places, slice):
                rows = rows.new_empty(self._step.routes.total(name, chunk, cp_rank), *rows.shape[1:])
                for places, part in pieces:
                    put(rows, places, part)
            features[name] = rows.detach().requires_grad_(backward and name in needs_gradient)
        return features

    def _backward(self, module: str, stage: int, chunk: int, *_: int) -> None:
        value = (module, stage, chunk)
        received, output = self._saved.pop(value)
        runtime = self.stages[module, stage]
        gradient = torch.full_like(output, self._step.scale) if runtime.sink else self._gradient(value, output)
        by_layer = self.collectives.by_layer.get((module, stage))
        split = self._linears[module, stage] if value in self._split else None
        with (
            by_layer.backward(split=split is not None) if by_layer else nullcontext(),
            split.backward() if split else nullcontext() as put_off,
        ):
            if output.requires_grad:  # else all trainable weights are in encoders that this chunk does not use
                torch.autograd.backward(output, gradient)
        if put_off is not None:
            self._put_off[value] = put_off
        for source, given in received.items():
            if not given.requires_grad:
                continue
            grad = torch.zeros_like(given) if given.grad is None else given.grad
            if isinstance(source, tuple):
                self._hand_back(source, chunk, grad)
                continue
            for origin in self._origins(chunk):
                if origin[0] == source and self._has_backward(origin, chunk):
                    places = self._step.routes.between(origin[2], chunk).places[runtime.place.cp.rank]
                    self._hand_back(origin, chunk, take(grad, places))

    def _backward_weight(self, module: str, stage: int, chunk: int, *_: int) -> None:
        gradients = self._put_off.pop((module, stage, chunk))
        if by_layer := self.collectives.by_layer.get((module, stage)):
            by_layer.weight_backward(gradients)
        else:
            gradients.compute()

    def _hand_back(self, source: Value, reader: int, gradient: Tensor) -> None:
        """Keep the gradient that the backward of `reader` has for rows of `source`: for a SEND, or a backward here."""
        if (*source, reader) in self._gradients_to_send:
            self._leaving[(*source, reader)] = gradient
        elif source[2] == reader:  # between stages
            self._gradients[source] = gradient
        elif len(self._step.routes.between(source[2], reader).regions) > 1:
            self.messages.keep_shared(Tag(*source, reader, True), gradient)
        else:
            self._add(source, reader, gradient, self._saved[source][1])

    def _add(self, source: Value, reader: int, gradient: Tensor, output: Tensor) -> None:
        """Add the gradient of the rows that `reader` reads to the gradient of `output`, the whole chunk."""
        route = self._step.routes.between(source[2], reader)
        if isinstance(route.rows, slice) and route.length == len(output) and source not in self._gradients:
            self._gradients[source] = gradient
            return
        if source not in self._gradients:
            self._gradients[source] = torch.zeros_like(output)
        put(self._gradients[source], route.rows, gradient, add=True)

    def _gradient(self, value: Value, output: Tensor) -> Tensor:
        """The gradient of an output, summed over all its readers."""
        runtime = self.stages[value[:2]]
        if not runtime.last:
            key = (*value, value[2], 1)
            return self.messages.joined(key) if key in self.messages else self._gradients.pop(value)
        for reader in self._step.routes.readers.get(value[2], ()):
            if (key := (*value, reader, 1)) in self.messages:
                self._add(value, reader, self.messages.joined(key), output)
        gradient, cp = self._gradients.pop(value), runtime.place.cp
        if cp.world == 1:
            return gradient
        # Each of these ranks has all rows, and their weight gradients are summed: so each row counts on one rank only.
        own = torch.zeros_like(gradient)
        mine = slice(cp.rank * len(own) // cp.world, (cp.rank + 1) * len(own) // cp.world)
        own[mine] = gradient[mine]
        return own

    def _send(self, module: str, stage: int, chunk: int, other: int, peer: int, grad: int) -> None:
        if grad:
            tensor = self._leaving.pop((module, stage, chunk, other))
        else:
            tensor = self._output((module, stage, chunk))
            if other != chunk:
                tensor = take(tensor, self._step.routes.between(chunk, other).rows)
        self.messages.send(Tag(module, stage, chunk, other, bool(grad)), tensor, peer)

    def _receive(self, module: str, stage: int, chunk: int, other: int, peer: int, grad: int) -> None:
        self.messages.receive(Tag(module, stage, chunk, other, bool(grad)), peer)

    def _dispatch(self, *_: object) -> None:
        self._travelling = self._step.dispatch and self._step.dispatch()

    def _unshard_layers(self, module: str, stage: int, _chunk: int, number: int, *_: int) -> None:
        late = self._linears[module, stage].weights if (module, stage) in self._linears else ()
        self.collectives.unshard_layers((module, stage), number, late)

    def _finish(self, actions: Sequence[Sequence[int]]) -> None:
        """Wait for all gathers, sums and sends, and note when the sums and the exchange of items ended."""
        step = self._step
        with as_pipeline_errors():
            done = self.collectives.finish(step.device)
            self.channel.finish()
        for place, row in enumerate(actions):
            begun, _ = step.times[place]
            if row[0] == REDUCE_GRAD:
                step.times[place] = begun, done[row[4]]
            elif row[0] == DISPATCH:  # may still be in flight: the next step waits for it, not this one
                ended = self._travelling and self._travelling()
                step.times[place] = (
                    begun,
                    ended if ended is not None and isinstance(begun, float) else mark(step.device),
                )


def _describe(row: Sequence[int], modules: Sequence[str]) -> str:
    action = action_of(row, modules)
    text = f"{action.op.name} {action.module}[{action.stage}]"
    if action.chunk >= 0:
        text += f" chunk {action.chunk}"
    return text + (f" with lane {action.peer}" if action.peer >= 0 else "")
