"""The actions a schedule is made of, and their compact text form.

One action is one line of one rank's list. Its text form is short enough for a CSV cell and parses back to
the same action::

    F:vision/0@3            forward of stage 0 of "vision" for microbatch 3
    B:language_model/1@3    backward
    SEND:vision/0@3>2       the output of vision/0 goes to rank 2
    RECV:vision/0@3<0       ... and is received from rank 0
    SEND_GRAD:vision/0@3>0  the gradient of that output goes back to rank 0
    REDUCE_GRAD:vision/0    the gradients of the stage's parameters are summed over its copies
    REDUCE_GRAD:llm/0+1     the gradients of tied weights number 1, which llm/0 and others hold, are summed over them
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


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
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OPTIMIZER_STEP = "OPTIMIZER_STEP"

    # Enum hashes its name in Python code; the string's own hash is several times faster and agrees with ==.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.name


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
"""The ops that occupy a rank with the module's own work."""

_TEXT = re.compile(
    r"(?P<op>[A-Z_]+):(?P<module>[^\s,;/@+<>=\"]+)/(?P<stage>\d+)"
    r"(?:@(?P<microbatch>\d+))?(?:\+(?P<part>\d+))?(?:(?P<arrow>[<>=])(?P<peer>\d+))?"
)
_MODULE = re.compile(r"[^\s,;/@+<>=\"]+")
_ARROWS = {Op.SEND: ">", Op.RECV: "<"}
_PER_STEP = frozenset({Op.REDUCE_GRAD, Op.OPTIMIZER_STEP, Op.UNSHARD, Op.RESHARD})


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    `module` and `stage` name the stage that computes. For SEND and RECV they name the stage that PRODUCED the
    activation, in both directions: `grad=False` moves its output to the consumer's rank, `grad=True` moves the
    gradient of its output back to its rank. `peer` is the other rank of a SEND or RECV (-1: none), `part`
    numbers the pieces of a microbatch that travel apart (0: all of it), or for REDUCE_GRAD the groups of tied weights
    of the graph, from 1 (0: the stage's own parameters).
    """

    op: Op
    module: str
    stage: int
    microbatch: int = 0
    part: int = 0
    peer: int = -1
    grad: bool = False

    def __str__(self) -> str:
        text = f"{self.op.value}{'_GRAD' if self.grad else ''}:{self.module}/{self.stage}"
        if self.op not in _PER_STEP or self.microbatch:
            text += f"@{self.microbatch}"
        if self.part:
            text += f"+{self.part}"
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
        return cls(
            op,
            match["module"],
            int(match["stage"]),
            int(match["microbatch"] or 0),
            int(match["part"] or 0),
            int(match["peer"]) if match["peer"] is not None else -1,
            grad,
        )


def valid_module_name(name: str) -> bool:
    """Whether `name` survives the text form: no white space and none of `, ; / @ + < > = "`."""
    return _MODULE.fullmatch(name) is not None
