"""Probe of an encoder: packing, agreement with its own forward, and cuts (see probe/separation.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace._text import one_line
from interlace.attention import AttentionPlan
from interlace.masks import BitfieldMask
from interlace.model.inputs.base import Inputs, Item
from interlace.model.inputs.clips import ClipInputs
from interlace.model.inputs.images import ImageInputs
from interlace.model.inputs.kinds import Feed
from interlace.model.inputs.patches import UNIT, PatchInputs
from interlace.model.inputs.spectrograms import AudioInputs
from interlace.model.inputs.tiles import TileInputs
from interlace.model.probe.cache import remembered, spelled
from interlace.model.probe.inconclusive import attempt, raise_if_no_memory, record_failure
from interlace.model.probe.separation import (
    TOLERANCE,
    Packing,
    both_modes,
    far,
    fastest,
    find_cuts,
    holds,
    note_returns,
    one_by_one,
    random_rows,
)
from interlace.model.probe.stand_in import KEPT, Unanswerable, cheaply, stand_in
from interlace.model.rows import ALONE, PACKED, ROWS
from interlace.model.sample import Media
from interlace.model.stages.attention_switch import NAMES
from interlace.model.stages.slice import clone

if TYPE_CHECKING:
    from interlace.model.modality import ModalityModule

OWN = "eager"  # attention implementation for encoders whose attention cannot follow a plan
LARGEST = 1600  # maximum tokens of a nominal item for the comparison with an encoder's own forward


def encoder_packing(encoder: ModalityModule) -> Packing:
    """Packing kind of this encoder.

    Raises ValueError for an encoder whose features of a nominal-size item differ from those of its own eager attention.
    """
    return remembered("packing", encoder.module, known(encoder), lambda: _packing(encoder))


def known(encoder: ModalityModule) -> tuple[object, ...]:
    """Inputs of probe results besides the module: cutting, attention and feed, as known before the probe."""
    return encoder.layer_path, encoder.implementation, spelled(encoder.feed)


def _packing(encoder: ModalityModule) -> Packing:
    try:
        return _packing_with(encoder, encoder.implementation)
    except ValueError:
        if encoder.in_one_row:
            raise
        try:  # its own attention (score biases, relative positions), for items that need no mask
            return replace(_packing_with(encoder, OWN), implementation=OWN)
        except ValueError:
            pass
        raise


def _packing_with(encoder: ModalityModule, implementation: str) -> Packing:
    name = type(encoder.module).__name__
    with cheaply():
        try:
            trial = _Trial(encoder, implementation=implementation)
        except Unanswerable as error:
            return one_by_one(name, error)
        if isinstance(encoder.feed, PatchInputs):
            trial.learn_patches(encoder.feed)
            trial.check()
        elif encoder.nominal_length <= LARGEST:
            trial.choose([encoder.default])
            trial.check()
        packing = Packing(ALONE)
        for items in _items(trial.encoder.feed):
            trial.choose(items)
            packing = fastest(name, (PACKED, ROWS), both_modes(trial.together, trial.alone))
            if packing.name != ALONE or (encoder.images is not None and encoder.images.any_size):
                break
        if packing.name != PACKED and not encoder.takes_item_data:
            trial.check_counts()
        return replace(packing, returned=tuple(trial.returned), width=trial.width, feed=trial.encoder.feed)


class _Trial:
    def __init__(self, encoder: ModalityModule, keep: int = KEPT, implementation: str | None = None):
        self.encoder = clone(encoder)
        self.encoder.module = stand_in(encoder.module, encoder.layer_path, keep=keep)
        self.encoder.implementation = implementation or encoder.implementation
        self.encoder.module.set_attn_implementation(self.encoder.implementation)
        self.encoder.projector, self.encoder.downsample, self.encoder.backend = nn.Identity(), 1, None
        self.encoder.preprocess = self.encoder.postprocess = self.encoder.postprocess_projector = None
        self.encoder._collate = self.encoder._tokens = None
        self.items: list[Media] = []
        self.width = 0  # width of the latest features
        self.returned = note_returns(self.encoder.layers)

    def choose(self, items: Sequence[Item]) -> None:
        """Set `items` to random data for these items."""
        self.items = [
            Media(item.shape, 1, random_rows(item.shape, seed), about=item.about) for seed, item in enumerate(items)
        ]

    def learn_patches(self, feed: PatchInputs) -> None:
        """Determine the shape of a patch, the number of patches per feature, and support of several frames.

        Leaves images, and a video if supported, in `items`. Raises ValueError if no shape of a patch is accepted.
        """
        problems: list[str] = []
        for patch in feed.patches(self.encoder.module):
            self.encoder.feed = replace(feed, patch=patch, videos=False)
            try:
                [images, _] = _items(self.encoder.feed)
                self.choose(images)
                patches, features = zip(*((one.shape[0], len(self._reference_features(one))) for one in self.items))
                if set(features) == {1}:  # one vector per item
                    self.encoder.feed = replace(self.encoder.feed, pooled=False)
                    features = tuple(len(self._reference_features(one)) for one in self.items)
                merged = {count / made for count, made in zip(patches, features)}
                if len(merged) == 1 and min(merged).is_integer():
                    break
                problems.append(f"it makes {features} features of {patches} patches, not a constant ratio")
            except Exception as error:  # a model may raise anything
                raise_if_no_memory(error)
                problems.append(f"{type(error).__name__}: {one_line(error)}")
        else:
            problem = ValueError(
                f"{type(self.encoder.module).__name__} takes grid_thw, but not concatenated patches "
                f"({'; '.join(problems)}): use an encoder like those of Qwen2-VL, or give it a forward like theirs"
            )
            record_failure(problem)
            raise problem
        self.encoder.feed = replace(self.encoder.feed, merged=int(merged.pop()))
        video = self.encoder.feed.item(2, UNIT, UNIT)
        self.choose([video])
        frames = attempt(lambda: len(self._reference_features(self.items[0])), None)
        self.encoder.feed = replace(self.encoder.feed, videos=frames == self.encoder.feed.features(video))
        self.choose(_items(self.encoder.feed)[0])

    def _reference_features(self, one: Media) -> Tensor:
        """Features [n, D] of an item by the module's own forward and eager attention."""
        return self.encoder.features_of(self._reference_output(one))[0]

    def _reference_output(self, one: Media) -> Any:
        module = self.encoder.module
        try:
            module.set_attn_implementation(OWN)
            return module(**self.encoder.kwargs_of([one]))
        finally:
            module.set_attn_implementation(self.encoder.implementation)

    def check(self) -> None:
        """Raise ValueError unless each of `items` gets the same features as from the module's own forward."""
        encoder, items = self.encoder, self.items
        name = type(encoder.module).__name__
        for one in items:
            try:
                output = self._reference_output(one)
            except Exception as problem:  # a model may raise anything; the error shows again in a real run
                record_failure(problem)
                if encoder.implementation in NAMES:
                    return
                raise ValueError(
                    f"{name} has its own attention, and does not run by itself on the inputs of its kind "
                    f"({type(problem).__name__}: {one_line(problem)}): use another encoder"
                ) from problem
            own_features = encoder.features_of(output)[0]
            self.items = [one]
            try:
                features = self.alone()[0]
            except Exception as problem:  # as above
                record_failure(problem)
                raise ValueError(
                    f"{name} runs by itself but not inside a ModalityModule ({type(problem).__name__}: "
                    f"{one_line(problem)}): its layers may need more than tokens [B, N, D]. Use another encoder"
                ) from problem
            own_features = encoder.without_prefix(own_features, encoder.encoder_length(one.shape, one.about))
            error = far([features], [own_features])
            if error > TOLERANCE:
                raise ValueError(
                    f"{name} gives other features inside a ModalityModule than by itself (relative error {error:.0e} "
                    "on random weights): its layers use more than their tokens. Use another encoder"
                )
        self.items = items

    def check_counts(self) -> None:
        """Raise ValueError if an item's number of features differs from the output of the modules after the layers."""
        encoder, one = self.encoder, self.items[0]
        count = attempt(lambda: len(self._run(ALONE, [one], training=False)), None)
        if count is None:  # the error shows again in a real run
            return
        encoder.returned = tuple(self.returned)
        expected = encoder.tokens(one.shape, one.about)
        if count != expected:
            raise ValueError(
                f"{type(encoder.module).__name__} makes {count} features of an item, but {expected} follow from the "
                "number of input tokens: its layers change their number. Use another encoder"
            )

    def alone(self, training: bool = False) -> list[Tensor]:
        """Features of all items, each run separately: [one tensor [n, D]]."""
        return [torch.cat([self._run(ALONE, [item], training) for item in self.items])]

    def together(self, packing: str, training: bool = False) -> list[Tensor]:
        """Features of all items, run in one batch."""
        return [self._run(packing, self.items, training)]

    def _run(self, packing: str, items: list[Media], training: bool) -> Tensor:
        self.encoder.train(training)
        self.encoder.packing = packing
        features = self.encoder.run(self.encoder.collate(items))
        self.width = features.shape[-1]
        return features


def _items(feed: Feed) -> list[list[Item]]:
    """Sets of items to probe. The first and last of a set are equal; sizes differ if the encoder supports that."""
    default = feed.default
    if isinstance(feed, PatchInputs):
        images = [feed.item(1, UNIT, 2 * UNIT), feed.item(1, 3 * UNIT, UNIT), feed.item(1, UNIT, 2 * UNIT)]
        if feed.videos:
            images[1:1] = [feed.item(2, UNIT, UNIT), feed.item(1, 3 * UNIT, 3 * UNIT)]
        return [images, [feed.item(1, UNIT, UNIT)] * 3]
    if isinstance(feed, ImageInputs):
        patch, sets = feed.patch, [[default] * 3]
        if feed.any_size:
            sizes = ((3, 4), (5, 2), (3, 4))
            sets.insert(0, [Item((default.shape[0], rows * patch[0], cols * patch[1])) for rows, cols in sizes])
        return sets
    if isinstance(feed, TileInputs):
        return [[*feed.examples, default]]
    if isinstance(feed, ClipInputs):
        full = default.shape[feed.time]
        lengths = [feed.with_length(full * part // 4) for part in (2, 1, 2)]
        return [lengths, [default] * 3] if feed.any_length else [[default] * 3]
    assert isinstance(feed, AudioInputs)
    frames = [min(default.shape[1], feed.stride * tokens) for tokens in (36, 21, 36)]
    return [[Item((default.shape[0], n)) for n in frames], [default] * 3]


class _Shuffled:
    """A one-rank context (see interlace.parallel.context) that holds all rows, in shuffled order."""

    attend = None

    def share(self, mask: BitfieldMask, plan: AttentionPlan, backend: str | None) -> _Shuffled:
        self.order = torch.randperm(mask.length, generator=torch.Generator().manual_seed(0))
        self.plan = AttentionPlan.build(mask.select(self.order[None]))
        return self

    def shard(self, rows: Tensor) -> Tensor:
        return rows[:, self.order]

    def unshard(self, rows: Tensor) -> Tensor:
        return rows[:, self.order.argsort()]


def encoder_takes_any_order(encoder: ModalityModule) -> bool:
    """True if an encoder's layers give the same results for tokens in any order of a packed row.

    See language_takes_any_order of probe/language.py.
    """

    def order() -> bool:
        whole, inputs = _collated(encoder, PACKED)
        expected, shuffled = whole.run(inputs), whole.run({**inputs, "context": _Shuffled()})
        return far([shuffled], [expected]) <= TOLERANCE

    return remembered("order", encoder.module, known(encoder), lambda: holds(order))


def _collated(encoder: ModalityModule, packing: str, keep: int = KEPT) -> tuple[ModalityModule, Inputs]:
    """A stand-in of this packing, and its inputs for random items."""
    trial = _Trial(encoder, keep)
    trial.choose(_items(encoder.feed)[0])
    trial.encoder.packing = packing
    return trial.encoder, trial.encoder.collate(trial.items)


def encoder_cuts(encoder: ModalityModule) -> list[bool | str]:
    """For each layer: True if a stage may start with it; as allowed_cuts of probe/language.py."""
    key = (*known(encoder), encoder.packing, tuple(encoder.returned))

    def prepare() -> Callable[[Sequence[int]], Tensor]:
        whole, inputs = _collated(encoder, encoder.packing, keep=encoder.num_layers)

        def run(bounds: Sequence[int]) -> Tensor:
            hidden = None
            for start, stop in pairwise(bounds):
                hidden = whole.stage(start, stop).run(inputs, hidden)
            assert hidden is not None
            return hidden

        return run

    return remembered("cuts", encoder.module, key, lambda: find_cuts(encoder.num_layers, prepare))
