"""The trial of an encoder: packing, whether it is what its own forward is, and its cuts (see trial.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.attention import AttentionPlan
from interlace.masks import BitfieldMask
from interlace.model.rows import ALONE, PACKED, ROWS
from interlace.model.sample import Media
from interlace.model.slice import carve, clone
from interlace.model.standin import Unanswerable, cheaply, stand_in
from interlace.model.trial import (
    TOLERANCE,
    Packing,
    both_modes,
    far,
    fastest,
    find_cuts,
    note_returns,
    one_by_one,
    one_line,
    random_rows,
    remembered,
)

if TYPE_CHECKING:
    from interlace.model.modality import ModalityModule

LARGEST = 1600  # tokens of an item of nominal size with which an encoder is still compared with its own forward


def encoder_packing(encoder: ModalityModule) -> Packing:
    """How items share a batch of this encoder.

    Raises ValueError for one that gives other features for an item of its nominal size than by its own eager attention.
    """
    return remembered("packing", encoder.module, encoder.layer_path, lambda: _packing(encoder))


def _packing(encoder: ModalityModule) -> Packing:
    name = type(encoder.module).__name__
    with cheaply():
        try:
            trial = _Trial(encoder)
        except Unanswerable as error:
            return one_by_one(name, error)
        if encoder.nominal_length <= LARGEST:
            trial.check()
        found = Packing(ALONE)
        for shapes in _shapes(encoder):
            trial.choose(shapes)
            found = fastest(name, (PACKED, ROWS), both_modes(trial.together, trial.alone))
            if found.name != ALONE or (encoder.images is not None and encoder.any_size):
                break
        return replace(found, returned=tuple(trial.returned))


class _Trial:
    def __init__(self, encoder: ModalityModule, keep: int | None = None):
        options = {} if keep is None else {"keep": keep}
        self.encoder = clone(encoder)
        self.encoder.module = stand_in(encoder.module, encoder.layer_path, **options)
        self.encoder.projector, self.encoder.downsample, self.encoder.backend = nn.Identity(), 1, None
        self.encoder.preprocess = self.encoder.postprocess = self.encoder.postprocess_projector = None
        self.encoder._collate = None
        self.items: list[Media] = []
        self.returned = note_returns(self.encoder.layers)

    def choose(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Take one random item of each shape."""
        self.items = [Media(shape, 1, random_rows(shape, seed)) for seed, shape in enumerate(shapes)]

    def check(self) -> None:
        """Raise ValueError unless an item of nominal size gets the features that the module's own forward gives."""
        encoder = self.encoder
        self.choose([encoder.default_shape])
        module: Any = encoder.module
        try:
            module.set_attn_implementation("eager")
            own = encoder.features_of(module(**encoder.kwargs_of(self.items[0].data[None])))[0]  # type: ignore[index]
        except Exception:  # whatever a model may raise; it says so itself when it is run
            return
        finally:
            module.set_attn_implementation(encoder.implementation)
        try:
            found = self.alone()[0]
        except Exception as problem:  # as above
            raise ValueError(
                f"{type(module).__name__} runs by itself but not inside a ModalityModule ({type(problem).__name__}: "
                f"{one_line(problem)}): its layers may want more than tokens [B, N, D]. Use another encoder"
            ) from problem
        error = far([found], [encoder.without_prefix(own, encoder.nominal_length)])
        if error > TOLERANCE:
            raise ValueError(
                f"{type(module).__name__} gives other features inside a ModalityModule than by itself (relative error "
                f"{error:.0e} on random weights): its layers are told more than their tokens. Use another encoder"
            )

    def alone(self, training: bool = False) -> list[Tensor]:
        """Features of all items, each run by itself: [one tensor [n, D]]."""
        return [torch.cat([self._run(ALONE, [item], training) for item in self.items])]

    def together(self, packing: str, training: bool = False) -> list[Tensor]:
        """The same of all items in one batch."""
        return [self._run(packing, self.items, training)]

    def _run(self, packing: str, items: list[Media], training: bool) -> Tensor:
        self.encoder.train(training)
        self.encoder.packing = packing
        return self.encoder.run(self.encoder.collate(items))


def _shapes(encoder: ModalityModule) -> list[list[tuple[int, ...]]]:
    """Sets of items to try: the first and the last of a set are alike; several sizes where the encoder takes them."""
    default = encoder.default_shape
    if encoder.images is not None:
        patch, sets = encoder.images.patch, [[default] * 3]
        if encoder.any_size:
            sizes = ((3, 4), (5, 2), (3, 4))
            sets.insert(0, [(default[0], rows * patch[0], columns * patch[1]) for rows, columns in sizes])
        return sets
    frames = [min(default[1], encoder.stride * tokens) for tokens in (36, 21, 36)]
    return [[(default[0], n) for n in frames], [default] * 3]


class _Shuffled:
    """A context (see interlace.parallel.context) of one rank, which has all rows, in an order of their own."""

    attend = None

    def share(self, mask: BitfieldMask, plan: AttentionPlan, backend: str | None) -> _Shuffled:
        self.order = torch.randperm(mask.length, generator=torch.Generator().manual_seed(0))
        self.plan = AttentionPlan.build(mask.select(self.order[None]))
        return self

    def take(self, rows: Tensor) -> Tensor:
        return rows[:, self.order]

    def whole(self, mine: Tensor) -> Tensor:
        return mine[:, self.order.argsort()]


def encoder_takes_any_order(encoder: ModalityModule) -> bool:
    """Whether the layers of an encoder do with tokens what they do in order wherever these lie in a packed row; as
    language_takes_any_order of trial_language.py."""
    return remembered("order", encoder.module, encoder.layer_path, lambda: _order(encoder))


def _order(encoder: ModalityModule) -> bool:
    with cheaply():
        try:
            trial = _Trial(encoder)
            trial.choose(_shapes(encoder)[0])
            whole = trial.encoder
            whole.packing = PACKED
            inputs = whole.collate(trial.items)
            wanted, found = whole.run(inputs), whole.run({**inputs, "context": _Shuffled()})
        except Exception:  # whatever a model may raise
            return False
    return far([found], [wanted]) <= TOLERANCE


def encoder_cuts(encoder: ModalityModule) -> list[bool]:
    """For each layer, whether a stage may start with it; as allowed_cuts of trial_language.py."""
    return remembered("cuts", encoder.module, encoder.layer_path, lambda: _cuts(encoder))


def _cuts(encoder: ModalityModule) -> list[bool]:
    count = encoder.num_layers
    with cheaply():
        try:
            trial = _Trial(encoder, keep=count)
        except Unanswerable:
            return [True] * count
        trial.choose(_shapes(encoder)[0])
        whole = trial.encoder
        whole.packing = encoder.packing
        inputs = whole.collate(trial.items)

        def run(bounds: Sequence[int]) -> Tensor:
            hidden = None
            for start, stop in pairwise(bounds):
                part: Any = carve(
                    whole, f"module.{encoder.layer_path}", start, stop, returned=encoder.returned,
                    zeros=encoder.in_one_row,
                )  # fmt: skip
                part.start, part.stop = start, stop
                hidden = part.run(inputs, hidden)
            assert hidden is not None
            return hidden

        return find_cuts(count, run)
