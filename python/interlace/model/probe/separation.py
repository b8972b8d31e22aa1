"""Probes how samples may share a batch of a module, and at which layers it may be cut into stages.

Probes use no knowledge of architectures. A stand-in of the module (stand_in.py) runs on two samples in one batch and on
each alone. If the outputs differ, that packing is rejected: "packed" falls back to "rows", "rows" to "alone" (rows.py).
A cut that changes outputs is refused. The probe uses the same code path as real batches. If it cannot run (a stand-in
fails), the safest result is used and not cached (inconclusive.py).

A result depends only on the module's structure, so each structure is probed once (cache.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interlace._text import one_line
from interlace.model.inputs.kinds import Feed
from interlace.model.probe.inconclusive import attempt, raise_if_no_memory, record_failure
from interlace.model.probe.stand_in import Unanswerable, cheaply
from interlace.model.rows import ALONE

log = logging.getLogger(__name__)

TOLERANCE = 1e-4  # see far; rounding in fp32 stays below 1e-5


@dataclass(frozen=True)
class Packing:
    """Packing of a module: a kind of interlace.model.rows, with further probe results.

    returned: the length of the tuple that each layer returns, None for a tensor (see Absent); empty if unknown.
    limit: if a batch has a longer sample [tokens], each sample must run alone (rotary frequencies that depend on the
    longest sample). None: no limit.
    ends_with_head: True if a language model's logits are exactly its head's output.
    unread: layers that text does not pass through.
    width: width of an encoder's features; 0 if unknown.
    feed: inputs of an encoder, as determined by the probe.
    implementation: attention implementation of an encoder, if it must differ from the current one.
    """

    name: str
    returned: tuple[int | None, ...] = ()
    limit: int | None = None
    ends_with_head: bool = False
    unread: tuple[int, ...] = ()
    width: int = 0
    feed: Feed | None = None
    implementation: str = ""


def far(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest error of a token's output [T, D] in any sample, relative to the differences between tokens.

    inf if shapes differ or outputs are not finite.
    """
    worst = 0.0
    for got, want in zip(outputs, expected, strict=True):
        if got.shape != want.shape or not (bool(got.isfinite().all()) and bool(want.isfinite().all())):
            return float("inf")
        error, size = (got - want).flatten(1).norm(dim=1).max(), want.flatten(1).norm(dim=1).mean()
        # The mean over all tokens carries no information about a single token.
        own = (want - want.mean(0)).flatten(1).norm(dim=1).mean() if len(want) > 1 else size
        worst = max(worst, float(error / own.clamp_min(1e-2 * float(size) + 1e-12)))
    return worst


class Case(NamedTuple):
    """Samples to probe: outputs of each in one batch of a packing, and of each alone.

    trusted: True if `alone` is deterministic.
    needed: True if the probe has no result when this case fails.
    """

    what: str
    together: Callable[[str], Sequence[Tensor]]
    alone: Callable[[], Sequence[Tensor]]
    trusted: bool = True
    needed: bool = True


def both_modes(together: Callable[..., Sequence[Tensor]], alone: Callable[..., Sequence[Tensor]]) -> list[Case]:
    """The cases of samples in evaluation and in training mode; both functions take `training`."""
    in_training = partial(together, training=True), partial(alone, training=True)
    return [
        Case("in evaluation", together, alone),
        Case("in training", *in_training, trusted=False, needed=False),
    ]


def fastest(name: str, packings: Iterable[str], cases: Iterable[Case]) -> Packing:
    """The first of `packings` in which every sample of every case has the same output as alone; otherwise ALONE."""
    reasons = []
    references: list[tuple[Case, Sequence[Tensor]]] = []
    for case in cases:
        try:
            separate = case.alone()
            if not case.trusted and far(case.alone(), separate) > 0:
                continue  # random in every packing, as in training: other cases decide
            references.append((case, separate))
        except Exception as error:  # a model may raise anything
            record_failure(error)
            if case.needed:
                reasons.append(f"{case.what}: {type(error).__name__}: {one_line(error)}")
                packings = ()
    for packing in packings:
        wrong = next((reason for case, separate in references if (reason := _differs(case, packing, separate))), "")
        if not wrong:
            return Packing(packing)
        reasons.append(wrong)
    return one_by_one(name, "; ".join(reasons))


def one_by_one(name: str, reason: object) -> Packing:
    """Return the safest packing and log the reason."""
    log.info("%s runs one sample at a time: %s", name, reason)
    return Packing(ALONE)


def _differs(case: Case, packing: str, alone: Sequence[Tensor]) -> str:
    """Reason why outputs of the samples differ in a batch of this packing; "" if they are equal."""
    try:
        error = far(case.together(packing), alone)
    except Exception as problem:  # a model may raise anything
        if not _raises(problem, lambda: case.together(packing)):
            record_failure(problem)
        return f"{packing} ({case.what}): {type(problem).__name__}: {one_line(problem)}"
    return f"{packing} ({case.what}): samples change each other's outputs by {error:.0e}" if error > TOLERANCE else ""


def _raises(problem: Exception, run: Callable[[], object]) -> bool:
    """True if `run` raises the same error again: the model itself is the cause (such as mismatched shapes)."""
    raise_if_no_memory(problem)
    try:
        run()
    except Exception as again:  # as above
        repeated = str(again), type(again)
        return (
            repeated == (str(problem), type(problem)) and not isinstance(again, OSError) and "thread" not in repeated[0]
        )
    return False


def holds(probe: Callable[[], bool]) -> bool:
    """The result of a probe that runs stand-ins; False if it fails."""
    with cheaply():
        return attempt(probe, False)


def find_cuts(count: int, prepare: Callable[[], Callable[[Sequence[int]], Tensor]]) -> list[bool | str]:
    """For each layer: True if a stage may start with it; otherwise False, or the reason of the refusal.

    Probes all cuts at once, and each cut alone if outputs differ. prepare() returns run, and run(bounds) the outputs
    [T, D] of stages with these bounds. True if the model does not run uncut: the real run then raises the error.
    """

    def right(*bounds: int) -> bool | str:
        try:
            return far([run(bounds)], [whole]) <= TOLERANCE
        except ValueError as refusal:
            return str(refusal)
        except Exception as problem:  # a model may raise anything if earlier layers' results are missing
            record_failure(problem)
            return False

    with cheaply():
        try:
            run = prepare()
        except Unanswerable as problem:
            record_failure(problem)
            return [True] * count
        try:
            whole = run([0, count])
        except Exception as problem:  # as above
            record_failure(problem)
            return [True] * count
        if right(*range(count + 1)) is True:
            return [True] * count
        return [cut == 0 or right(0, cut, count) for cut in range(count)]


def check_cuts(where: str, allowed: Sequence[bool | str], cuts: Iterable[int]) -> None:
    """Raise ValueError unless all `cuts` of the module `where` are allowed. allowed: result of `find_cuts`."""
    for cut in sorted(cuts):
        if isinstance(refusal := allowed[cut], str):
            raise ValueError(refusal)
        if not allowed[cut]:
            others = [str(i) for i in range(1, len(allowed)) if allowed[i] is True]
            raise ValueError(
                f"{where} cannot be cut before layer {cut}: later layers need more than the hidden state of the "
                "earlier ones. "
                + (f"Cut it before layer {', '.join(others)}" if others else "Keep this module on one stage")
            )


def note_returns(layers: nn.ModuleList) -> list[int | None]:
    """List of each layer's latest return kind, as in Packing.returned."""
    returned: list[int | None] = [None] * len(layers)

    def note(_: nn.Module, args: tuple[Any, ...], output: object, *, index: int) -> None:
        returned[index] = len(output) if isinstance(output, tuple) else None

    for i, layer in enumerate(layers):
        layer.register_forward_hook(partial(note, index=i))
    return returned


def random_rows(shape: Sequence[int], seed: int) -> Tensor:
    """Standard normal numbers, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
