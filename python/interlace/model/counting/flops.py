"""FLOPs of modules: matrix products and attention.

A module runs once on fake tensors, forward and backward, as in training: with its frozen weights, adapters and chosen
experts. Every product counts 2 * m * n * k. No code here depends on an architecture. Consequences:

- frozen weights have no weight gradient, and input gradients only if something before them is trained;
- logits are counted where the loss needs them, and experts if a router chooses them;
- of identical layers only the first runs; the others count with their number of calls.

Products of a module are linear in its tokens. A few runs determine the line, and another run verifies it. If products
are not linear (other kinds of attention, convolutions over clips), each shape of an item runs at its first use. Too
many shapes raise an error. Attention is counted separately, per visible pair of a query and a key. `pairs` counts these
pairs from lengths.

    model FLOPs     required by the mathematics: visible pairs, backward twice the forward of attention
    executed FLOPs  computed: pairs of visited blocks, five products in attention's backward, recomputed layers

Norms, activations, softmax, lookups and optimizers are not counted, as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from interlace.attention.hf.limits import EVERYTHING
from interlace.attention.plan import AttentionPlan
from interlace.masks import NEUTRAL, BitfieldMask
from interlace.model.counting.fake_run import Attends, Found, Products, Run, Uncountable, blank_inputs
from interlace.model.counting.layers import counted
from interlace.model.inputs.base import Item
from interlace.model.inputs.clips import ClipInputs
from interlace.model.inputs.images import ImageInputs
from interlace.model.inputs.patches import PatchInputs
from interlace.model.inputs.tiles import TileInputs
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.projector import unit_of
from interlace.model.sample import Media

if TYPE_CHECKING:
    from interlace.model.modality import ModalityModule
    from interlace.model.multimodal import MultimodalModel

SHAPES = 64  # maximum shapes of items to run if no rule fits, some 0.2 s each
KEPT = 4096  # maximum cached works of items if a rule fits


# ---------------------------------------------------------------------- the language model


class Language(NamedTuple):
    """FLOPs of the language model: products per token and per target, and attention by kinds of layers."""

    token: Products
    target: Products
    attention: tuple[Attends, ...]


def count_language(mllm: MultimodalModel, features: Mapping[str, torch.Tensor]) -> Language:
    """Count the FLOPs of the language model.

    features: encoder -> its features [n, D], with or without gradients, for encoders whose items a sample has.
    Raises Uncountable if its products are not linear in samples and targets.
    """
    run, length = Run(mllm, LANGUAGE_MODEL), counted(mllm, LANGUAGE_MODEL).length
    if length < len(features) + 2:
        raise Uncountable(f"the language model has positions for {length} tokens")

    def found(count: int, targets: int) -> tuple[Found, AttentionPlan]:
        made = blank_inputs(mllm, features, count, targets, run.mode, length)
        plan: AttentionPlan = made["plan"]
        return run(made), plan

    (one, plan), (more, _), (proof, _) = (found(*each) for each in ((1, 1), (1, 4), (2, 3)))
    token, target = [], []
    for a, b, c in zip(one.inside, more.inside, proof.inside, strict=True):
        per_target, rest = divmod(b - a, 3)
        if rest or c != 2 * (a - per_target) + 6 * per_target:
            raise Uncountable(f"FLOPs of {type(mllm.language_model).__name__} are not linear in tokens and targets")
        token.append(round((a - per_target) / length))
        target.append(per_target)
    kinds = {}
    for each in (plan, *(document.plan for document in plan.__dict__.get("_documents", ()))):
        kinds[each.full_q_ptr.data_ptr()] = EVERYTHING
        kinds |= {made.full_q_ptr.data_ptr(): limits for limits, made in each.__dict__.get("_narrowed", {}).items()}
    attention = []
    for call, _ in one.attention:
        if call.limits not in kinds:
            raise Uncountable(f"{type(mllm.language_model).__name__} uses its own attention mask")
        attention.append(call._replace(limits=kinds[call.limits]))
    return Language(Products(*token), Products(*target), tuple(attention))


# ---------------------------------------------------------------------- encoders


class Work(NamedTuple):
    """FLOPs of an encoder for one item: products, and attention with the documents that the item forms."""

    products: Products
    attention: tuple[tuple[Attends, tuple[int, ...]], ...]


class Encoder:
    """FLOPs of an encoder for items. Raises Uncountable for an encoder that cannot run without weights."""

    def __init__(self, mllm: MultimodalModel, name: str) -> None:
        self.mllm, self.name = mllm, name
        self.encoder = mllm.encoders[name]
        self._run = Run(mllm, name)
        probes = _probes(self.encoder)
        counts = [self._count(item) for item in probes]
        self._works = {_key(item): _work(*each) for item, each in zip(probes, counts, strict=True)}
        self.output = counts[0][0].output
        self.gradients = self.output.requires_grad
        self._rule = self._learn(probes, counts)

    def of(self, item: Media) -> Work:
        """The work of an item. A shape without a rule runs once. Raises Uncountable for too many such shapes."""
        shown = Item(item.shape, item.about)
        key = _key(shown)
        work = self._works.get(key)
        if work is not None:
            return work
        if self._rule is None and len(self._works) >= SHAPES:
            raise Uncountable(
                f"the FLOPs of {self.name} are not a function of the item size, and items have more than {SHAPES} "
                "sizes, each of which would need its own run"
            )
        if len(self._works) >= KEPT:
            self._works.clear()
        work = self._works[key] = self._rule(shown) if self._rule is not None else _work(*self._count(shown))
        return work

    def _count(self, item: Item) -> tuple[Found, list[tuple[int, ...]]]:
        media = Media(item.shape, self.encoder.tokens(*item), torch.zeros(item.shape), about=item.about)
        inputs = self.encoder.collate([media])
        products = self._run(inputs)
        return products, [_documents(plan) for _, plan in products.attention]

    def _learn(
        self, probes: Sequence[Item], counts: Sequence[tuple[Found, list[tuple[int, ...]]]]
    ) -> Callable[[Item], Work] | None:
        """Rule that gives the work of an item from its numbers of tokens; None if no such rule fits."""
        if len(probes) == 1:
            return None
        kinds = [each._replace(limits=None) for each, _ in counts[0][0].attention]
        if any([each._replace(limits=None) for each, _ in one.attention] != kinds for one, _ in counts):
            return None
        inside = self._line(probes, [one.inside for one, _ in counts])
        projected = self._line(probes, [one.projected for one, _ in counts])
        cuts = [self._cut(probes, [documents[i] for _, documents in counts]) for i in range(len(kinds))]
        if inside is None or projected is None or any(cut is None for cut in cuts):
            return None

        def rule(item: Item) -> Work:
            attention = tuple((kind, cut(item)) for kind, cut in zip(kinds, cuts, strict=True) if cut is not None)
            return Work(inside(item).plus(projected(item)), attention)

        return rule

    def _line(self, probes: Sequence[Item], measured: Sequence[Products]) -> Callable[[Item], Products] | None:
        """Linear rule for products: a constant plus a multiple of an item's tokens, inside the layers or after them."""
        for count in (self.encoder.encoder_length, self.encoder.tokens):
            numbers = [count(*item) for item in probes]
            lines = [line for values in zip(*measured, strict=True) if (line := _through(numbers, values)) is not None]
            if len(lines) == len(Products._fields):
                return partial(_on_lines, count, lines)
        return None

    def _cut(
        self, probes: Sequence[Item], measured: Sequence[tuple[int, ...]]
    ) -> Callable[[Item], tuple[int, ...]] | None:
        """Rule that gives the documents of an item: the whole item, or its frames or tiles."""
        length = self.encoder.encoder_length

        def whole(item: Item) -> tuple[int, ...]:
            return (length(*item),)

        def pieces(item: Item) -> tuple[int, ...]:
            count = int(item.about["grid_thw"][0]) if "grid_thw" in item.about else item.shape[0]
            return (length(*item) // count,) * count

        rules = [whole, pieces] if isinstance(self.encoder.feed, (PatchInputs, TileInputs)) else [whole]
        for rule in rules:
            if all(rule(item) == documents for item, documents in zip(probes, measured, strict=True)):
                return rule
        return None


def _key(item: Item) -> Hashable:
    return (item.shape, *sorted(item.about.items())) if item.about else item.shape


def _work(counts: Found, documents: Sequence[tuple[int, ...]]) -> Work:
    kinds = [each._replace(limits=None) for each, _ in counts.attention]
    return Work(counts.inside.plus(counts.projected), tuple(zip(kinds, documents, strict=True)))


def _on_lines(count: Callable[..., int], lines: Sequence[tuple[int, int]], item: Item) -> Products:
    tokens = count(*item)
    return Products(*(base + slope * tokens for base, slope in lines))


def _through(numbers: Sequence[int], values: Sequence[int]) -> tuple[int, int] | None:
    """(base, slope) of the line through all points, as integers; None if there is no such line."""
    low, high = min(numbers), max(numbers)
    if low == high:
        return (values[0], 0) if len(set(values)) == 1 else None
    a, b = values[numbers.index(low)], values[numbers.index(high)]
    slope, rest = divmod(b - a, high - low)
    base = a - slope * low
    if rest or any(base + slope * n != value for n, value in zip(numbers, values, strict=True)):
        return None
    return base, slope


def _documents(plan: AttentionPlan) -> tuple[int, ...]:
    """Lengths of the documents of a plan. Raises Uncountable for a mask that is not made of whole documents."""
    queries = plan.queries()
    runs: list[int] = []
    for row in queries.doc:
        ids, counts = torch.unique_consecutive(row, return_counts=True)
        if len(ids.unique()) < len(ids):
            raise Uncountable("documents of an encoder's mask are not contiguous")
        runs += [n for document, n in zip(ids.tolist(), counts.tolist(), strict=True) if document >= 0]
    mask = BitfieldMask.from_tokens(queries, plan.sinks)
    companions = [(getattr(queries, name), value) for name, value in NEUTRAL.items() if name != "doc"]
    limited = bool((queries.bits < 0).any()) or any(bool((field != value).any()) for field, value in companions)
    if limited and int(mask.to_dense().sum()) != sum(n * n for n in runs):
        raise Uncountable("an encoder's layers use attention windows")
    return tuple(runs)


def _probes(encoder: ModalityModule) -> list[Item]:
    """Items of several sizes, including large ones: a window larger than an item has no effect."""
    feed = encoder.feed
    if isinstance(feed, PatchInputs):
        grids = [(1, 8, 12), (1, 28, 36), (1, 48, 64)]
        grids += [(3, 24, 16)] if feed.videos else []
        return [feed.item(*grid) for grid in grids]
    if isinstance(feed, TileInputs):
        return [*feed.examples, feed.default]
    if isinstance(feed, ImageInputs):
        if not feed.any_size:
            return [feed.default]
        unit = unit_of(encoder.projector)
        sizes = [(2, 3), (4, 11), (1, 5)]
        rows, columns = feed.patch[0] * unit, feed.patch[1] * unit
        return [Item((feed.channels, a * rows, b * columns)) for a, b in sizes]
    full = feed.default
    if isinstance(feed, ClipInputs):
        if not feed.any_length:
            return [full]
        return [feed.with_length(full.shape[feed.time] * part // 8) for part in (8, 5, 3)]
    frames = sorted({max(feed.stride, full.shape[1] * part // 8) for part in (8, 5, 3)})
    return [Item((full.shape[0], n)) for n in frames]
