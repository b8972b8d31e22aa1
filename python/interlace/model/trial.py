"""Finds out, by trying, how samples may share a batch of a module, and where it may be cut into stages.

Nothing is known about any architecture: a stand-in of the module (standin.py) is run on two samples in one batch and on
each alone. What differs must not be done: "packed" gives way to "rows", "rows" to "alone" (rows.py), a cut is refused.
The trial takes the code path of real batches. Where it cannot be made (a stand-in fails), the safest answer is taken,
and is not kept (untried.py).

An answer depends on the module's structure alone, so modules of one structure are tried once (remembered.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interlace.model.feeding import Feed
from interlace.model.rows import ALONE
from interlace.model.untried import gave_up, raise_if_no_memory

log = logging.getLogger(__name__)

TOLERANCE = 1e-4  # see far; rounding in fp32 stays below 1e-5


@dataclass(frozen=True)
class Packing:
    """How samples share a batch of a module: one of interlace.model.rows.

    returned: the length of the tuple that each layer returns, None for a tensor (see Absent); empty if not known.
    limit: with a longer sample [tokens] in the batch each must be run alone (rotary frequencies that depend on the
    longest); None: however long they are. ends_with_head: a language model's logits are what its head gives, untouched.
    unread: its layers that text does not come through.
    Of an encoder: width, of its features, 0 if not known; feed, how it is fed, as far as the trial told;
    implementation, of attention, if it has to be another than it has.
    """

    name: str
    returned: tuple[int | None, ...] = ()
    limit: int | None = None
    ends_with_head: bool = False
    unread: tuple[int, ...] = ()
    width: int = 0
    feed: Feed | None = None
    implementation: str = ""


def far(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of a token's output [T, D] in any sample, relative to how much tokens differ.

    inf where the shapes differ or the outputs are not finite.
    """
    worst = 0.0
    for got, want in zip(found, expected, strict=True):
        if got.shape != want.shape or not (bool(got.isfinite().all()) and bool(want.isfinite().all())):
            return float("inf")
        error, size = (got - want).flatten(1).norm(dim=1).max(), want.flatten(1).norm(dim=1).mean()
        # What all tokens have in common says nothing about any of them.
        own = (want - want.mean(0)).flatten(1).norm(dim=1).mean() if len(want) > 1 else size
        worst = max(worst, float(error / own.clamp_min(1e-2 * float(size) + 1e-12)))
    return worst


class Case(NamedTuple):
    """Samples to try: outputs of each in one batch of a packing, and of each alone.

    trusted: alone is the same every time. needed: without an answer to this case there is none at all.
    """

    what: str
    together: Callable[[str], Sequence[Tensor]]
    alone: Callable[[], Sequence[Tensor]]
    trusted: bool = True
    needed: bool = True


def both_modes(together: Callable[..., Sequence[Tensor]], alone: Callable[..., Sequence[Tensor]]) -> list[Case]:
    """The cases of samples in evaluation and in training; both functions take `training`."""
    in_training = partial(together, training=True), partial(alone, training=True)
    return [
        Case("in evaluation", together, alone),
        Case("in training", *in_training, trusted=False, needed=False),
    ]


def fastest(name: str, packings: Iterable[str], cases: Iterable[Case]) -> Packing:
    """The first of `packings` that gives each sample of every case what it gets alone; of none, ALONE."""
    reasons = []
    wanted: list[tuple[Case, Sequence[Tensor]]] = []
    for case in cases:
        try:
            alone = case.alone()
            if not case.trusted and far(case.alone(), alone) > 0:
                continue  # random, as in training, whatever the packing: other cases have to answer
            wanted.append((case, alone))
        except Exception as error:  # whatever a model may raise
            gave_up(error)
            if case.needed:
                reasons.append(f"{case.what}: {type(error).__name__}: {one_line(error)}")
                packings = ()
    for packing in packings:
        wrong = next((reason for case, alone in wanted if (reason := _differs(case, packing, alone))), "")
        if not wrong:
            return Packing(packing)
        reasons.append(wrong)
    return one_by_one(name, "; ".join(reasons))


def one_by_one(name: str, reason: object) -> Packing:
    """The safest packing, and a line in the log that says why."""
    log.info("%s runs one sample at a time: %s", name, reason)
    return Packing(ALONE)


def _differs(case: Case, packing: str, alone: Sequence[Tensor]) -> str:
    """How the samples of a batch in this packing come to other outputs; empty where they do not."""
    try:
        error = far(case.together(packing), alone)
    except Exception as problem:  # whatever a model may raise
        if not _raises(problem, lambda: case.together(packing)):
            gave_up(problem)
        return f"{packing} ({case.what}): {type(problem).__name__}: {one_line(problem)}"
    return f"{packing} ({case.what}): samples change outputs of others by {error:.0e}" if error > TOLERANCE else ""


def _raises(problem: Exception, run: Callable[[], object]) -> bool:
    """Whether `run` raises the same again, so that it is the model that cannot do it (shapes that do not fit)."""
    raise_if_no_memory(problem)
    try:
        run()
    except Exception as again:  # as above
        told = str(again), type(again)
        return told == (str(problem), type(problem)) and not isinstance(again, OSError) and "thread" not in told[0]
    return False


def find_cuts(count: int, run: Callable[[Sequence[int]], Tensor]) -> list[bool | str]:
    """For each layer, whether a stage may start with it, or why stages so cut refuse to run.

    Tries all cuts at once, and one by one if that differs; run(bounds) gives outputs [T, D] of stages so bounded.
    """

    def right(*bounds: int) -> bool | str:
        try:
            return far([run(bounds)], [whole]) <= TOLERANCE
        except ValueError as refusal:
            return str(refusal)
        except Exception as problem:  # whatever a model may raise that misses what earlier layers would have made
            gave_up(problem)
            return False

    try:
        whole = run([0, count])
    except Exception as problem:  # as above
        gave_up(problem)
        return [True] * count
    if right(*range(count + 1)) is True:
        return [True] * count
    return [cut == 0 or right(0, cut, count) for cut in range(count)]


def note_returns(layers: nn.ModuleList) -> list[int | None]:
    """A list that holds what each layer returned last, as in Packing.returned."""
    returned: list[int | None] = [None] * len(layers)

    def note(_: nn.Module, args: Any, output: Any, *, index: int) -> None:
        returned[index] = len(output) if isinstance(output, tuple) else None

    for i, layer in enumerate(layers):
        layer.register_forward_hook(partial(note, index=i))
    return returned


def random_rows(shape: Sequence[int], seed: int) -> Tensor:
    """Standard normal numbers, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_line(error: BaseException) -> str:
    """What an error says, shortened."""
    return " ".join(str(error).split())[:200]
