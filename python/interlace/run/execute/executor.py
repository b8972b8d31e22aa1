"""Executes the action list of one rank: the same rows that the checker proved and the simulator times. Decides nothing.

A plain loop: each action ends before the next starts. RECV blocks until the message has arrived. SEND, REDUCE_GRAD,
UNSHARD and DISPATCH only start an asynchronous transfer. Sums are awaited at the end of the list; sums of tied weights
are made from them then. Gathered weights are awaited by the first forward that uses them, or layer by layer. Several
ranks of one process run in a thread each.

A stage's forward starts from detached inputs and its backward ends at them. An activation crosses each stage boundary,
to another rank or within one, and later its gradient crosses back. So every layout computes the same numbers.

Ranks of one lane compute together. Each of them receives a part of a message. The forward or backward that uses the
message joins the parts: the checker has proved that all ranks of the lane run it together, which is not true of a RECV.

With context parallelism a rank has a share of the rows between the stages of a module. It sends this share to the rank
at its place in the next lane. The output of an encoder is whole on all ranks of its lane. Each rank that reads it
receives only its own rows. Their gradients are joined again, and each context-parallel rank of the encoder takes a part
of them backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from interlace.comm.channels.base import Channel, CommError, Part, Pending, Tag
from interlace.comm.overlap.deferred import DeferredGradients
from interlace.comm.process.abort_reports import named
from interlace.comm.process.recorder import page_in_use
from interlace.layout import Reduction
from interlace.parallel import Ranks
from interlace.parallel.route import pairs, parts_of_regions, put, rows_per_receiver, take
from interlace.run.errors import PipelineError
from interlace.run.execute.deferred import LinearLayers, linear_layers
from interlace.run.execute.gradients import Sum
from interlace.run.execute.layers import LayerByLayer, Layers
from interlace.run.execute.sharding import Sharded, ShardedSum
from interlace.run.execute.step import Arrived, Key, Message, StageRuntime, Step, Value
from interlace.run.lanes import Place
from interlace.schedule.actions import CODES, OPS, Op, action_of

FORWARD, BACKWARD, SEND, RECV = (CODES[op] for op in (Op.FORWARD, Op.BACKWARD, Op.SEND, Op.RECV))
BACKWARD_INPUT, BACKWARD_WEIGHT = CODES[Op.BACKWARD_INPUT], CODES[Op.BACKWARD_WEIGHT]
REDUCE_GRAD, UNSHARD = CODES[Op.REDUCE_GRAD], CODES[Op.UNSHARD]
UNSHARD_LAYERS, RESHARD = CODES[Op.UNSHARD_LAYERS], CODES[Op.RESHARD]
DISPATCH = CODES[Op.DISPATCH]
# By name: bound methods in the executor would be a reference cycle, which would keep a step's sums until the next GC.
METHODS = {FORWARD: "_forward", BACKWARD: "_backward", SEND: "_send", RECV: "_receive", REDUCE_GRAD: "_reduce"}
METHODS |= {BACKWARD_INPUT: "_backward", BACKWARD_WEIGHT: "_backward_weight"}
METHODS |= {UNSHARD: "_unshard", UNSHARD_LAYERS: "_unshard_layers", RESHARD: "_reshard", DISPATCH: "_dispatch"}


class Executor:
    """Runs action lists on one rank.

    stages: those of this rank. lanes: the ranks of each lane, by number. reductions: of the graph. parameters: a
    reduction -> the parameters of this rank that it sums. sharded: place in the graph's shards -> this rank's part of
    the shard; layers: the same key -> the layers of a shard that may be gathered layer by layer.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[Key, StageRuntime],
        channel: Channel,
        modules: Sequence[str],
        lanes: Sequence[Sequence[int]],
        reductions: Sequence[Reduction],
        parameters: Callable[[Reduction], Sequence[nn.Parameter]],
        sharded: Mapping[int, Sharded],
        layers: Mapping[int, Layers],
    ) -> None:
        self.rank, self.stages, self.channel, self._sharded, self._layers = rank, dict(stages), channel, sharded, layers
        self._modules, self._lanes, self._reductions, self._parameters = modules, lanes, reductions, parameters

    def run(self, rows: NDArray[Any], step: Step) -> None:
        """Run the actions `rows` (int32 [n, 7]) in order. Raises PipelineError that names the failed action."""
        actions = rows.tolist()
        self._step = step
        self._read(actions)
        try:
            self._run(actions, step)
        finally:
            for by_layer in self._by_layer.values():
                by_layer.end()
            self._by_layer.clear()
            self._sums.clear()

    def _run(self, actions: Sequence[Sequence[int]], step: Step) -> None:
        modules, times, recorder, started = self._modules, step.times, self.channel.recorder, False
        page = page_in_use()
        for row in actions:
            op, module, *rest = row
            if not started and op != DISPATCH and (op != FORWARD or self._together(row)):
                started = True
                step.start()
            begin = step.mark()
            computing = recorder.begin("compute", action_of(row, modules), self._together(row)) if op < SEND else -1
            try:
                if op not in METHODS:
                    raise PipelineError(
                        f"the executor does not support {OPS[op].name}: use a schedule of schedule.GENERATORS"
                    )
                with record_function(str(action_of(row, modules))) if _profiler_enabled() else nullcontext():
                    getattr(self, METHODS[op])(modules[module], *rest)
            except CommError as error:
                raise PipelineError(f"{self._where(row)}{error}") from error
            except Exception as error:
                kind = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
                raise PipelineError(f"rank {self.rank}, {_describe(row, modules)}: {kind}{error}") from error
            if computing >= 0:
                recorder.end(computing)
            if page is not None:
                page.tick()
            times.append((begin, step.mark()))
        if not started:
            step.start()
        self._finish(step, actions)
        if self._saved:
            name, stage, chunk = next(iter(self._saved))
            raise PipelineError(f"rank {self.rank}: {name}[{stage}] chunk {chunk} has had no BACKWARD")
        if self._put_off:
            name, stage, chunk = next(iter(self._put_off))
            raise PipelineError(f"rank {self.rank}: {name}[{stage}] chunk {chunk} has had no BACKWARD_WEIGHT")

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
        """Count in the list how often each value is used on this rank, so that no other values are kept."""
        self._outputs: dict[Value, Tensor] = {}
        self._gradients: dict[Value, Tensor] = {}  # of outputs made here, summed over the readers so far
        self._arrived: dict[Message, Arrived] = {}
        self._leaving: dict[tuple[str, int, int, int], Tensor] = {}  # gradients to send
        self._kept: dict[Tag, Part] = {}  # sent by this rank in one lane to itself in another
        self._crossing: dict[int, set[Tag]] = {}  # rank -> messages that it sends here over several pairs of lanes
        self._saved: dict[Value, tuple[dict[Any, Tensor], Tensor]] = {}
        self._gathers: dict[int, Pending] = {}
        self._by_layer: dict[Key, LayerByLayer] = {}  # of stages whose weights are gathered layer by layer
        self._travelling: Callable[[], float | None] = lambda: None  # end time of the exchange for the next step
        self._sums: dict[int, Sum | ShardedSum] = {}
        self._tied: list[int] = []  # sums that start after those in _sums
        self._uses: dict[Value, int] = defaultdict(int)
        self._takes_backward: set[Value] = set()
        self._split: set[Value] = set()  # those with a BACKWARD_INPUT and a BACKWARD_WEIGHT
        self._put_off: dict[Value, DeferredGradients] = {}  # kept from BACKWARD_INPUT to BACKWARD_WEIGHT
        to_send: set[tuple[str, int, int, int]] = set()  # gradients to send to other ranks
        received: set[tuple[str, int, int, int]] = set()
        forwards: list[Value] = []
        modules = self._modules
        for op, number, stage, chunk, other_chunk, _, grad in actions:
            module = modules[number]
            if op == FORWARD:
                forwards.append((module, stage, chunk))
            elif op == BACKWARD:
                self._takes_backward.add((module, stage, chunk))
            elif op == BACKWARD_INPUT:
                self._split.add((module, stage, chunk))
            elif op == SEND and grad:
                to_send.add((module, stage, chunk, other_chunk))
            elif op == SEND:
                self._uses[module, stage, chunk] += 1
            elif op == RECV and not grad:
                received.add((module, stage, chunk, other_chunk))
        self._gradients_to_send, self._received = to_send, received
        self._takes_backward |= self._split
        split = {value[:2] for value in self._split}
        self._linears: dict[Key, LinearLayers] = linear_layers(self.stages, split) if split else {}
        if any(len(ranks) > 1 for ranks in self._lanes):
            self._find_crossing(actions)
        for module, stage, chunk in forwards:
            sources = [(module, stage - 1, chunk)] if stage else self._origins(chunk)
            for source in sources:
                if (*source, chunk) not in received:
                    self._uses[source] += 1

    def _find_crossing(self, actions: Sequence[Sequence[int]]) -> None:
        """Find the ranks that send here over several pairs of lanes: order is kept within a pair, not between pairs."""
        expected: dict[int, dict[tuple[int, Ranks], set[Tag]]] = {}
        for op, number, stage, chunk, other_chunk, peer, grad in actions:
            if op == RECV:
                tag = Tag(self._modules[number], stage, chunk, other_chunk, bool(grad))
                lane = self._place(tag, receives=True).lane
                for sender in self._senders(lane, self._lanes[peer]):
                    expected.setdefault(sender, {}).setdefault((peer, lane), set()).add(tag)
        self._crossing = {rank: set().union(*found.values()) for rank, found in expected.items() if len(found) > 1}

    def _origins(self, chunk: int) -> list[Value]:
        """The activations from which `chunk` reads rows."""
        return [(*self._step.ends[source], source) for source in self._step.routes.sources.get(chunk, ())]

    def _output(self, source: Value) -> Tensor:
        """The output of a stage of this rank; dropped after its last use."""
        self._uses[source] -= 1
        return self._outputs[source] if self._uses[source] else self._outputs.pop(source)

    def _has_backward(self, source: Value, reader: int) -> bool:
        return source in self._takes_backward or (*source, reader) in self._gradients_to_send

    def _reader(self, tag: Tag) -> Key:
        """The stage that reads the activation of `tag`."""
        if tag.other == tag.chunk:
            return tag.module, tag.stage + 1
        return self._step.ends[tag.other][0], 0

    def _place(self, tag: Tag, *, receives: bool) -> Place:
        """The place at which this rank sends or receives the message of `tag`."""
        return self.stages[self._reader(tag) if receives != tag.grad else tag[:2]].place

    def _regions(self, tag: Tag, rows: int, cp: int) -> tuple[int, ...]:
        """The rows that each context-parallel rank has of a message of `rows`; cp: ranks between stages of a module."""
        if tag.other != tag.chunk:
            return self._step.routes.between(tag.chunk, tag.other).regions
        return (rows // cp,) * cp

    def _joined(self, message: Message) -> Tensor:
        """A message that has arrived, gathered from the ranks that share it. Collective among them."""
        mine, among, counts = self._arrived.pop(message)
        return among.gather_rows(mine, counts) if among.world > 1 else mine

    def _arrive(self, tag: Tag, mine: Tensor, place: Place, counts: Sequence[int]) -> None:
        """Keep the received part of a message until it is used; counts: rows that each rank of the lane has of it."""
        among = place.lane
        if tag.other == tag.chunk or not tag.grad:  # each context-parallel rank needs only its own region
            among, first = place.tp, place.cp.rank * place.tp.world
            counts = counts[first : first + place.tp.world]
        self._arrived[(*tag[:4], int(tag.grad))] = Arrived(mine, among, counts)

    def _senders(self, lane: Ranks, others: Sequence[int]) -> list[int]:
        """The ranks of `others` that send to this place in `lane`, in the order of their rows."""
        return [others[sender] for sender, receiver in pairs(len(others), lane.world) if receiver == lane.rank]

    # -- actions ---------------------------------------------------------------------------------------------

    def _forward(self, module: str, stage: int, chunk: int, *_: int) -> None:
        step, runtime = self._step, self.stages[module, stage]
        for number in [n for n in self._gathers if (module, stage) in self._sharded[n].stages]:
            self._gathers.pop(number).wait()
        inputs = step.dealt(module, chunk, runtime.place, step.inputs(module, chunk, stage == 0))
        backward = (module, stage, chunk) in self._takes_backward
        received: dict[Any, Tensor] = {}
        hidden = None
        if stage:
            source = (module, stage - 1, chunk)
            key = (*source, chunk)
            value = self._joined((*key, 0)) if key in self._received else self._output(source)
            hidden = received[source] = value.requires_grad_(backward and self._has_backward(source, chunk))
        else:
            features = self._features(chunk, runtime.place.cp.rank, backward)
            if features:
                inputs = {**inputs, "features": features}
                received = dict(features)
        by_layer = self._by_layer.get((module, stage))
        split = self._linears[module, stage] if (module, stage, chunk) in self._split else None
        drawn = step.drawing() if runtime.place.lane.world > 1 else bool
        with (
            torch.set_grad_enabled(backward),
            step.autocast(),
            by_layer.forward() if by_layer else nullcontext(),
            split.forward() if split else nullcontext(),
        ):
            output = runtime.module(inputs, hidden)
        step.drew |= drawn()
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
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        needs_gradient: dict[str, bool] = {}
        for source in self._origins(chunk):
            name, _, producer = source
            route = self._step.routes.between(producer, chunk)
            key = (*source, chunk)
            if key in self._received:
                rows = self._joined((*key, 0))
            else:
                rows = take(self._output(source), route.rows).split(route.regions)[cp_rank]
            parts.setdefault(name, []).append((producer, rows))
            needs_gradient[name] = needs_gradient.get(name, False) or self._has_backward(source, chunk)
        features = {}
        for name, pieces in parts.items():
            _, rows = pieces[0]
            if len(pieces) > 1 or not isinstance(self._step.routes.between(pieces[0][0], chunk).places[cp_rank], slice):
                whole = rows.new_empty(self._step.routes.total(name, chunk, cp_rank), *rows.shape[1:])
                for producer, part in pieces:
                    put(whole, self._step.routes.between(producer, chunk).places[cp_rank], part)
                rows = whole
            features[name] = rows.detach().requires_grad_(backward and needs_gradient[name])
        return features

    def _backward(self, module: str, stage: int, chunk: int, *_: int) -> None:
        value = (module, stage, chunk)
        received, output = self._saved.pop(value)
        runtime = self.stages[module, stage]
        gradient = torch.full_like(output, self._step.scale) if runtime.sink else self._gradient(value, output)
        by_layer = self._by_layer.get((module, stage))
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
                self._hand_back(source, chunk, grad, whole=True)
                continue
            for origin in self._origins(chunk):
                if origin[0] == source and self._has_backward(origin, chunk):
                    places = self._step.routes.between(origin[2], chunk).places[runtime.place.cp.rank]
                    self._hand_back(origin, chunk, take(grad, places), whole=False)

    def _backward_weight(self, module: str, stage: int, chunk: int, *_: int) -> None:
        gradients = self._put_off.pop((module, stage, chunk))
        if by_layer := self._by_layer.get((module, stage)):
            by_layer.weight_backward(gradients)
        else:
            gradients.compute()

    def _hand_back(self, source: Value, reader: int, gradient: Tensor, *, whole: bool) -> None:
        """Keep the gradient that the backward of `reader` has for rows of `source`: for a SEND, or a backward here."""
        if (*source, reader) in self._gradients_to_send:
            self._leaving[(*source, reader)] = gradient
        elif whole:
            self._gradients[source] = gradient
        elif len(regions := self._step.routes.between(source[2], reader).regions) > 1:
            # Producer and reader are on this lane: its ranks join their parts.
            tag, place = Tag(*source, reader, True), self.stages[source[:2]].place
            parts = parts_of_regions(regions, place.lane.world, place.lane.world, receives=False)
            mine, first = parts[place.lane.rank], sum(regions[: self.stages[self._reader(tag)].place.cp.rank])
            piece = gradient.narrow(0, mine.start - first, mine.stop - mine.start)
            self._arrive(tag, piece, place, rows_per_receiver(parts, place.lane.world))
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
            return self._joined(key) if key in self._arrived else self._gradients.pop(value)
        for reader in self._step.routes.readers.get(value[2], ()):
            if (key := (*value, reader, 1)) in self._arrived:
                self._add(value, reader, self._joined(key), output)
        gradient, cp = self._gradients.pop(value), runtime.place.cp
        if cp.world == 1:
            return gradient
        # Each of these ranks has all rows, and their weight gradients are summed: so each row counts on one rank only.
        own = torch.zeros_like(gradient)
        mine = slice(cp.rank * len(own) // cp.world, (cp.rank + 1) * len(own) // cp.world)
        own[mine] = gradient[mine]
        return own

    def _send(self, module: str, stage: int, chunk: int, other: int, peer: int, grad: int) -> None:
        tag = Tag(module, stage, chunk, other, bool(grad))
        if grad:
            tensor = self._leaving.pop((module, stage, chunk, other))
        else:
            tensor = self._output((module, stage, chunk))
            if other != chunk:
                tensor = take(tensor, self._step.routes.between(chunk, other).rows)
        place, others = self._place(tag, receives=False), self._lanes[peer]
        lane, cp = place.lane, place.cp
        regions = self._regions(tag, tensor.shape[-2] * cp.world, cp.world)
        rows, first = sum(regions), sum(regions[: cp.rank]) if grad or other == chunk else 0
        for part in parts_of_regions(regions, lane.world, len(others), receives=not grad):
            if part.sender == lane.rank:
                piece, rank = tensor.narrow(-2, part.start - first, part.stop - part.start), others[part.receiver]
                if rank == self.rank:
                    self._kept[tag] = Part(piece, rows)
                else:
                    self.channel.send(piece, rank, tag, rows)

    def _receive(self, module: str, stage: int, chunk: int, other: int, peer: int, grad: int) -> None:
        tag = Tag(module, stage, chunk, other, bool(grad))
        place, others = self._place(tag, receives=True), self._lanes[peer]
        lane = place.lane
        received = [
            self._kept.pop(tag)
            if rank == self.rank
            else self.channel.receive_part(rank, tag, self._crossing.get(rank, ()))
            for rank in self._senders(lane, others)
        ]
        mine = received[0].tensor if len(received) == 1 else torch.cat([part.tensor for part in received], -2)
        rows = received[0].rows
        regions = self._regions(tag, rows, place.cp.world)
        due = rows_per_receiver(parts_of_regions(regions, len(others), lane.world, receives=not grad), lane.world)
        if (mine.shape[-2], rows) != (due[lane.rank], sum(regions)):
            raise PipelineError(
                f"received {mine.shape[-2]} rows of {rows}, expected {due[lane.rank]} of {sum(regions)}: install the "
                "same version of Interlace on all ranks"
            )
        self._arrive(tag, mine, place, due)

    def _reduce(self, _module: str, _stage: int, _chunk: int, number: int, *_: int) -> None:
        if self._reductions[number].tied >= 0:  # a sum of sums: waiting for them here could block a rank that they need
            self._tied.append(number)
        else:
            self._sums[number] = self._sum(number)

    def _dispatch(self, *_: object) -> None:
        self._travelling = self._step.dispatch()

    def _unshard(self, _module: str, _stage: int, _chunk: int, number: int, *_: int) -> None:
        sharded = self._sharded[number]
        self._gathers[number] = sharded.start_gather(self.channel, sharded.gathered, sharded.name)

    def _unshard_layers(self, module: str, stage: int, _chunk: int, number: int, *_: int) -> None:
        late = self._linears[module, stage].weights if (module, stage) in self._linears else ()
        self._by_layer[module, stage] = LayerByLayer(self._layers[number], self.channel, late)

    def _reshard(self, _module: str, _stage: int, _chunk: int, number: int, *_: int) -> None:
        if number in self._gathers:  # no forward of this rank has awaited it
            self._gathers.pop(number).wait()
        self._sharded[number].leave()

    def _sum(self, number: int) -> Sum | ShardedSum:
        reduction = self._reductions[number]
        key = f"{reduction.module} layers {reduction.start} to {reduction.stop}"
        key += " tied" * (reduction.tied >= 0) + " in part" * reduction.in_part
        for sharded in self._sharded.values() if reduction.tied < 0 and not reduction.in_part else ():
            if (sharded.shard.module, sharded.shard.start) == (reduction.module, reduction.start):
                by_layer = self._by_layer.get(min(sharded.stages))  # by layer: the shard has only this stage
                started = by_layer.sums() if by_layer else sharded.start_scatter(self.channel, sharded.summed, key)
                return ShardedSum(sharded, self.channel, key, started)
        return Sum(self._parameters(reduction), reduction.ranks, self.channel, key)

    def _finish(self, step: Step, actions: Sequence[Sequence[int]]) -> None:
        """Wait for the sums, make the sums of tied weights from them, then wait for these and for all sends."""
        done: dict[int, Any] = {}
        try:
            for gather in self._gathers.values():
                gather.wait()
            self._await_sums(done)
            self._sums = {number: self._sum(number) for number in self._tied}
            self._await_sums(done)
            self.channel.finish()
        except CommError as error:
            raise PipelineError(str(error)) from error
        self._sums = {}
        for place, row in enumerate(actions):
            if row[0] == REDUCE_GRAD:
                step.times[place] = (step.times[place][0], done[row[4]])
            elif row[0] == DISPATCH:  # may still be in flight: the next step waits for it, not this one
                begun, ended = step.times[place][0], self._travelling()
                step.times[place] = (begun, ended if ended is not None and isinstance(begun, float) else step.mark())

    def _await_sums(self, done: dict[int, Any]) -> None:
        for number, pending in self._sums.items():
            pending.wait()
            done[number] = self._step.mark()


def _describe(row: Sequence[int], modules: Sequence[str]) -> str:
    action = action_of(row, modules)
    text = f"{action.op.name} {action.module}[{action.stage}]"
    if action.chunk >= 0:
        text += f" chunk {action.chunk}"
    return text + (f" with lane {action.peer}" if action.peer >= 0 else "")
