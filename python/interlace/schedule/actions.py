"""The actions a schedule is made of: rows of integers for machines, `Action` and a compact text form for people.

One action is one row of one rank's list, int32 [7]: op, module, stage, chunk, other, peer, grad (see `Action`; modules
are numbered as in the graph, -1 stands for none). Its text form is short enough for a CSV cell and parses back to the
same action::

    F:vision/0@3            forward of stage 0 of "vision" for chunk 3 of the step
    B:language_model/1@5    backward
    SEND:vision/0@3+5>2     what chunk 5 reads of the output of vision/0 for chunk 3 goes to lane 2
    RECV:vision/0@3+5<0     ... and is received from lane 0
    SEND_GRAD:vision/0@3+5>0  the gradient of these rows goes back to lane 0
    SEND:llm/0@5>1          from stage to stage of one chunk
    REDUCE_GRAD:vision/0+2  the gradients of reduction 2 of the graph are summed over its ranks
    UNSHARD:vision/0+1      the weights of shard 1 of the graph are gathered from the slices of its ranks
    UNSHARD_LAYERS:vision/0+1  ... layer by layer, whenever one of its ranks computes with them and all others do too
    RESHARD:vision/0+1      ... and given up again but for the rank's own slices (shard = "full")
    DISPATCH:vision/0       the items of the coming step begin to travel (streams); named after the rank's first stage
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class Op(str, Enum):
    """What an action does. The value is the code that the text form uses."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and of parameters: BACKWARD_INPUT and BACKWARD_WEIGHT in one."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND = "SEND"
    RECV = "RECV"
    DISPATCH = "DISPATCH"
    """Starts the exchange of the coming step's items between all ranks and goes on; the coming step waits for it."""
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
"""What the first column of a row stands for."""

CODES = {op: code for code, op in enumerate(OPS)}

COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
"""The ops that occupy a rank with the module's own work."""

OP, MODULE, STAGE, CHUNK, OTHER, PEER, GRAD = range(7)
"""The columns of a row."""

_TEXT = re.compile(
    r"(?P<op>[A-Z_]+):(?P<module>[^\s,;/@+<>=\"]+)/(?P<stage>\d+)"
    r"(?:@(?P<chunk>\d+))?(?:\+(?P<other>\d+))?(?:(?P<arrow>[<>=])(?P<peer>\d+))?"
)
_MODULE = re.compile(r"[^\s,;/@+<>=\"]+")
_ARROWS = {Op.SEND: ">", Op.RECV: "<"}


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    module, stage: whose work it is. For SEND and RECV they name the stage that PRODUCED the activation, in both
        directions: grad=False moves its output to the consumer's lane, grad=True the gradient of that output back.
    chunk: place in `StepTable.chunks`; of a REDUCE_GRAD, UNSHARD, UNSHARD_LAYERS, RESHARD or DISPATCH -1.
    other: for SEND and RECV the chunk that reads the rows: `chunk` itself between stages of one pipeline. For a
        REDUCE_GRAD its place in `StageGraph.reductions`, for what makes weights whole or a RESHARD that in
        `StageGraph.shards`.
        Otherwise -1.
    peer: the lane on the other side of a SEND or RECV, as numbered by `Layout.lanes()`; otherwise -1.
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

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `str(action)` wrote. Raises ValueError for anything else."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not an action: {text!r}; expected for example 'F:vision/0@3' or 'SEND:vision/0@3>2'")
        code, grad = match["op"], False
        if code in ("SEND_GRAD", "RECV_GRAD"):
            code, grad = code[: -len("_GRAD")], True
        try:
            op = Op(code)
        except ValueError:
            known = ", ".join(member.value for member in Op)
            raise ValueError(f"unknown op {code!r} in {text!r}; known: {known}, SEND_GRAD, RECV_GRAD") from None
        if match["arrow"] is not None and match["arrow"] != _ARROWS.get(op, "="):
            raise ValueError(f"{text!r}: {op.name} writes its peer after {_ARROWS.get(op, '=')!r}")
        chunk = int(match["chunk"]) if match["chunk"] is not None else -1
        other = int(match["other"]) if match["other"] is not None else chunk if op in _ARROWS else -1
        peer = int(match["peer"]) if match["peer"] is not None else -1
        return cls(op, match["module"], int(match["stage"]), chunk, other, peer, grad)


def action_of(row: Sequence[int], modules: Sequence[str]) -> Action:
    """The row of a list as an object; modules: their names by number."""
    op, module, stage, chunk, other, peer, grad = row
    return Action(OPS[op], modules[module], stage, chunk, other, peer, bool(grad))


def rows_of(actions: Sequence[Action], modules: Sequence[str]) -> NDArray[np.int32]:
    """int32 [n, 7]: the rows of a list of actions. Raises ValueError for a module that is none of `modules`."""
    number = {name: i for i, name in enumerate(modules)}
    unknown = next((a.module for a in actions if a.module not in number), None)
    if unknown is not None:
        raise ValueError(f"an action names the module {unknown!r}; modules: {', '.join(modules)}")
    rows = [(CODES[a.op], number[a.module], a.stage, a.chunk, a.other, a.peer, int(a.grad)) for a in actions]
    return np.array(rows, np.int32).reshape(-1, 7)


def valid_module_name(name: str) -> bool:
    """Whether `name` survives the text form: no white space and none of `, ; / @ + < > = "`."""
    return _MODULE.fullmatch(name) is not None
