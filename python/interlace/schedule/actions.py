"""Actions of a schedule: integer rows for compiled code, `Action` and a compact text form for people.

One action is one row of one rank's list, int32 [7]: op, module, stage, chunk, other, peer, grad (see `Action`). Modules
are numbered as in the graph; -1 means none. The text form fits in a CSV cell and names every field::

    F:vision/0@3            forward of stage 0 of "vision" for chunk 3 of the step
    B:language_model/1@5    backward
    SEND:vision/0@3+5>2     sends to lane 2 the rows that chunk 5 reads from the output of vision/0 for chunk 3
    RECV:vision/0@3+5<0     ... and receives them from lane 0
    SEND_GRAD:vision/0@3+5>0  sends the gradient of these rows back to lane 0
    SEND:llm/0@5>1          from stage to stage of one chunk
    REDUCE_GRAD:vision/0+2  sums the gradients of reduction 2 of the graph over its ranks
    UNSHARD:vision/0+1      gathers the weights of shard 1 of the graph from the slices of its ranks
    UNSHARD_LAYERS:vision/0+1  ... layer by layer, each time all of its ranks compute with them
    RESHARD:vision/0+1      ... frees them again except for the rank's own slices (shard = "full")
    DISPATCH:vision/0       starts to send the items of the next step (streams); named after the rank's first stage
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class Op(str, Enum):
    """Operation of an action. The value is its code in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and of parameters: BACKWARD_INPUT and BACKWARD_WEIGHT in one."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND = "SEND"
    RECV = "RECV"
    DISPATCH = "DISPATCH"
    """Starts the exchange of the next step's items between all ranks, without blocking; the next step waits for it."""
    UNSHARD = "UNSHARD"
    UNSHARD_LAYERS = "UNSHARD_LAYERS"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OPTIMIZER_STEP = "OPTIMIZER_STEP"

    # Enum hashes its name in Python code; the string's own hash is several times faster and agrees with ==.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.name


OPS: tuple[Op, ...] = tuple(Op)
"""Ops by their number in the first column of a row."""

CODES = {op: code for code, op in enumerate(OPS)}

COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
"""Ops that compute."""

OP, MODULE, STAGE, CHUNK, OTHER, PEER, GRAD = range(7)
"""The columns of a row."""

_MODULE = re.compile(r"[^\s,;/@+<>=\"]+")
_ARROWS = {Op.SEND: ">", Op.RECV: "<"}


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    module, stage: the stage of the action. For SEND and RECV it is the stage that PRODUCED the activation, in both
        directions: grad=False moves its output to the consumer's lane, grad=True the gradient of that output back.
    chunk: index in `StepTable.chunks`; -1 for REDUCE_GRAD, UNSHARD, UNSHARD_LAYERS, RESHARD and DISPATCH.
    other: for SEND and RECV the chunk that reads the rows; `chunk` itself between stages of one pipeline. For
        REDUCE_GRAD an index in `StageGraph.reductions`. For UNSHARD, UNSHARD_LAYERS and RESHARD an index in
        `StageGraph.shards`. Otherwise -1.
    peer: lane on the other side of a SEND or RECV, as numbered by `Layout.lanes()`; otherwise -1.
    """

    op: Op
    module: str
    stage: int
    chunk: int = -1
    other: int = -1
    peer: int = -1
    grad: bool = False

    def __str__(self) -> str:
        text = f"{self.op.value}{'_GRAD' if self.grad else ''}:{self.module}/{self.stage}"
        if self.chunk >= 0:
            text += f"@{self.chunk}"
        if self.other >= 0 and self.other != self.chunk:
            text += f"+{self.other}"
        if self.peer >= 0:
            text += f"{_ARROWS.get(self.op, '=')}{self.peer}"
        return text


def action_of(row: Sequence[int], modules: Sequence[str]) -> Action:
    """A row as an object. modules: names by number."""
    op, module, stage, chunk, other, peer, grad = row
    return Action(OPS[op], modules[module], stage, chunk, other, peer, bool(grad))


def rows_of(actions: Sequence[Action], modules: Sequence[str]) -> NDArray[np.int32]:
    """Rows of a list of actions, int32 [n, 7]. Raises ValueError for a module that is not in `modules`."""
    number = {name: i for i, name in enumerate(modules)}
    unknown = next((a.module for a in actions if a.module not in number), None)
    if unknown is not None:
        raise ValueError(f"an action has the unknown module {unknown!r}: use one of {', '.join(modules)}")
    rows = [(CODES[a.op], number[a.module], a.stage, a.chunk, a.other, a.peer, int(a.grad)) for a in actions]
    return np.array(rows, np.int32).reshape(-1, 7)


def valid_module_name(name: str) -> bool:
    """True if `name` is valid in the text form: no white space and none of `, ; / @ + < > = "`."""
    return _MODULE.fullmatch(name) is not None
