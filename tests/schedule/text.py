"""The text form of actions: parsed, and the lists of a schedule as lines."""

from __future__ import annotations

import re

from interlace.schedule import Action, Op, Schedule

ARROWS = {Op.SEND: ">", Op.RECV: "<"}
_TEXT = re.compile(
    r"(?P<op>[A-Z_]+):(?P<module>[^\s,;/@+<>=\"]+)/(?P<stage>\d+)"
    r"(?:@(?P<chunk>\d+))?(?:\+(?P<other>\d+))?(?:(?P<arrow>[<>=])(?P<peer>\d+))?"
)


def parse(text: str) -> Action:
    """Parses the output of `str(action)`. Raises ValueError for anything else."""
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
    if match["arrow"] is not None and match["arrow"] != ARROWS.get(op, "="):
        raise ValueError(f"{text!r}: {op.name} writes its peer after {ARROWS.get(op, '=')!r}")
    chunk = int(match["chunk"]) if match["chunk"] is not None else -1
    other = int(match["other"]) if match["other"] is not None else chunk if op in ARROWS else -1
    peer = int(match["peer"]) if match["peer"] is not None else -1
    return Action(op, match["module"], int(match["stage"]), chunk, other, peer, grad)


def text_of(schedule: Schedule) -> str:
    """One line per rank, actions separated by commas; valid CSV."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.actions)


def parse_lists(text: str) -> list[list[Action]]:
    """Parses the output of `text_of`. Raises ValueError with the rank of a cell that is not an action."""
    lists = []
    for rank, line in enumerate(text.splitlines()):
        try:
            lists.append([parse(cell) for cell in line.split(",") if cell.strip()])
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from None
    return lists
