"""Executes one rank's action list, the very list that the checker proved and the simulator times.

A stage's forward starts from detached inputs and its backward ends at them; what crosses a stage boundary, to another
rank or within one, is an activation and later its gradient. So any placement computes the same numbers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from interlace.run.channel import Channel, PipelineError, Tag
from interlace.schedule import Action, Op

Key = tuple[str, int]


@dataclass
class StageRuntime:
    """A stage of this rank with its neighbours in the module graph."""

    module: nn.Module
    producers: tuple[Key, ...]
    sink: bool  # its output is the loss


@dataclass
class Step:
    """What one step works on, and what it leaves."""

    presence: Sequence[frozenset[str]]
    inputs: Callable[[str, int], dict[str, Any]]  # (module, microbatch) -> collated inputs
    scale: float  # multiplies the summed loss: 1 / global number of valid target tokens
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    loss_sum: float = 0.0
    records: list[tuple[int, Action, float, float]] = field(default_factory=list)  # rank, action, start, finish [s]


class Executor:
    """Runs action lists on one rank. ``reduce_grad`` handles REDUCE_GRAD (a generator of waits)."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[Key, StageRuntime],
        channel: Channel,
        reduce_grad: Callable[[Action], Iterator[str]],
    ):
        self.rank = rank
        self.stages = dict(stages)
        self.channel = channel
        self.reduce_grad = reduce_grad
        self._read([])

    def _read(self, actions: Sequence[Action]) -> None:
        """Learn from the list which values are used here, and how often, so that nothing else is kept."""
        self._values: dict[Tag, Tensor] = {}  # activations and gradients waiting for their use here
        self._saved: dict[tuple[str, int, int], tuple[dict[Key, Tensor], Tensor]] = {}
        self._uses: Counter[Tag] = Counter()
        self._backward = set()
        for action in actions:
            key = (action.module, action.stage)
            if action.op is Op.SEND:
                self._uses[Tag.of(action)] += 1
            elif action.op is Op.FORWARD:
                self._uses.update(Tag(*producer, action.microbatch, False) for producer in self.stages[key].producers)
            elif action.op is Op.BACKWARD:
                self._backward.add((*key, action.microbatch))
                if not self.stages[key].sink:
                    self._uses[Tag(*key, action.microbatch, True)] += 1

    def _take(self, tag: Tag) -> Tensor:
        self._uses[tag] -= 1
        return self._values[tag] if self._uses[tag] else self._values.pop(tag)

    def _keep(self, tag: Tag, tensor: Tensor) -> None:
        if self._uses[tag]:
            self._values[tag] = tensor

    def run(self, actions: Sequence[Action], step: Step) -> Iterator[str]:
        """Execute ``actions``; yields what it waits for whenever an in-process peer has to move first."""
        self._read(actions)
        for action in actions:
            start = time.monotonic()
            try:
                yield from self._do(action, step)
            except PipelineError:
                raise
            except Exception as error:
                raise PipelineError(
                    f"rank {self.rank}, {_describe(action)}: {type(error).__name__}: {error}"
                ) from error
            step.records.append((self.rank, action, start, time.monotonic()))
        self.channel.finish()
        if self._saved:
            name, stage, microbatch = next(iter(self._saved))
            raise PipelineError(f"rank {self.rank}: {name}[{stage}] microbatch {microbatch} was never taken backward")

    def _do(self, action: Action, step: Step) -> Iterator[str]:
        if action.op is Op.FORWARD:
            self._forward_stage(action, step)
        elif action.op is Op.BACKWARD:
            self._backward_stage(action, step)
        elif action.op is Op.SEND:
            tag = Tag.of(action)
            self.channel.send(self._take(tag), action.peer, tag)
        elif action.op is Op.RECV:
            tag = Tag.of(action)
            while (tensor := self.channel.receive(action.peer, tag)) is None:
                yield f"rank {self.rank} waits for {tag} from rank {action.peer}"
            self._keep(tag, tensor)
        elif action.op is Op.REDUCE_GRAD:
            yield from self.reduce_grad(action)
        else:
            raise PipelineError(f"this executor does not know {action.op.name}: use a GPipe or 1F1B schedule")

    def _forward_stage(self, action: Action, step: Step) -> None:
        key, microbatch = (action.module, action.stage), action.microbatch
        stage = self.stages[key]
        inputs = step.inputs(action.module, microbatch)
        backward = (*key, microbatch) in self._backward
        received: dict[Key, Tensor] = {}
        for producer in stage.producers:
            if producer[0] in step.presence[microbatch]:
                value = self._take(Tag(*producer, microbatch, False))
                wanted = backward and self._uses[Tag(*producer, microbatch, True)] > 0
                received[producer] = value.requires_grad_(wanted)
        hidden = None
        if action.stage > 0:
            hidden = received[action.module, action.stage - 1]
        elif stage.producers:
            inputs = {**inputs, "features": {name: value for (name, _), value in received.items()}}
        with torch.set_grad_enabled(backward), step.autocast():
            output = stage.module(inputs, hidden)
        if stage.sink:
            step.loss_sum += float(output.detach())
        else:
            self._keep(Tag(*key, microbatch, False), output.detach())
        if backward:
            self._saved[action.module, action.stage, microbatch] = (received, output)

    def _backward_stage(self, action: Action, step: Step) -> None:
        key, microbatch = (action.module, action.stage), action.microbatch
        received, output = self._saved.pop((*key, microbatch))
        gradient = None if self.stages[key].sink else self._take(Tag(*key, microbatch, True))
        # Without grad: everything trainable lies in encoders that this microbatch does not use.
        if output.requires_grad:
            torch.autograd.backward(output * step.scale if gradient is None else output, gradient)
        for producer, value in received.items():
            if value.requires_grad:
                self._keep(
                    Tag(*producer, microbatch, True),
                    value.grad if value.grad is not None else torch.zeros_like(value),
                )


def _describe(action: Action) -> str:
    text = f"{action.op.name} {action.module}[{action.stage}] microbatch {action.microbatch}"
    return text + (f" with rank {action.peer}" if action.peer >= 0 else "")
