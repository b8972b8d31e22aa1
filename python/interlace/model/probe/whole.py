"""Probe of a whole model: agreement of its modules with HuggingFace's own class, and visibility inside media.

A stand-in of the whole model (stand_in.py) processes a text with two items by its own forward with eager attention. Its
modules process the same text as in a MultimodalModel. In some models the tokens of an item attend to each other in both
directions (Gemma 3); in others they are causal, like text (LLaVA). The variant that agrees is used. If neither agrees
(scaled features, a fully visible prefix), the model is refused: a loss curve would not reveal the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from interlace._text import one_line
from interlace.attention.hf import NAME
from interlace.model.collate import JOINED, collate_language
from interlace.model.inputs.base import Item
from interlace.model.inputs.kinds import Feed
from interlace.model.inputs.patches import GRID, UNIT, PatchInputs
from interlace.model.inputs.placeholders import Ids, token_ids
from interlace.model.inputs.tiles import TileInputs
from interlace.model.language import LanguageSettings, run_language
from interlace.model.probe.cache import remembered
from interlace.model.probe.inconclusive import attempt, raise_if_no_memory
from interlace.model.probe.language import WORDS, plain_ids, trim
from interlace.model.probe.separation import TOLERANCE, far, random_rows
from interlace.model.probe.stand_in import Unanswerable, cheaply, stand_in
from interlace.model.sample import IGNORE, Media, Sample
from interlace.model.stages.slice import find_layers, takes
from interlace.model.whole.parts import decoder_layers
from interlace.model.whole.positions import RopeIndex
from interlace.model.whole.tower import WholeEncoder, tower_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRID_OF_IMAGES = "image_grid_thw"
TEXT = (3, 2, 4)  # tokens before, between and after two items


class TakenApart(NamedTuple):
    """Arguments of a MultimodalModel for the modules of a whole model."""

    encoders: dict[str, WholeEncoder]
    language_model: PreTrainedModel
    placeholders: dict[str, Ids]
    bidirectional: bool | str
    positions: RopeIndex | None
    deepstack: int


def bidirectional_media(whole: PreTrainedModel, given: TakenApart) -> bool | str:
    """Attention direction inside media: True = both directions, False = causal, JOINED = also across adjacent items.

    given: its modules, without this setting.
    Raises ValueError if the modules' logits differ from the whole model's, or if the probe cannot run.
    """
    [encoder] = given.encoders.values()
    known = (encoder.layer_path, repr(encoder.feed), tuple(given.placeholders.items()), given.deepstack)
    return remembered("whole", whole, known, lambda: _bidirectional(whole, encoder, given))


def _bidirectional(whole: PreTrainedModel, encoder: WholeEncoder, given: TakenApart) -> bool | str:
    name = type(whole).__name__
    with cheaply():
        try:
            layers = decoder_layers(whole) or find_layers(whole)
            twin, trial, reference = _reference(whole, layers, encoder, given)
        except Unanswerable as error:
            raise ValueError(
                f"{name} cannot be probed, so it is unknown whether its modules compute the same: {error}"
            ) from None
        except Exception as error:  # a model may raise anything
            raise_if_no_memory(error)
            raise ValueError(
                f"{name} does not run by itself on a text with two items ({type(error).__name__}: {one_line(error)}), "
                "so it is unknown whether its modules compute the same: it cannot be split"
            ) from error
        errors = _errors(twin, layers, trial, reference, (False, True))
        joined = errors[0] > TOLERANCE >= errors[1] and _joins(twin, layers, encoder, given)
    if min(errors) > TOLERANCE:
        raise ValueError(
            f"{name} gives other logits split into its modules than whole (relative error {min(errors):.0e} on "
            "random weights): it changes features before they enter the text, or has its own mask or positions. Train "
            "it with HuggingFace's class"
        )
    return JOINED if joined else errors[0] > TOLERANCE


def _joins(twin: PreTrainedModel, layers: str, encoder: WholeEncoder, given: TakenApart) -> bool:
    """True if adjacent items attend to each other: Gemma 3 separates items only by runs of placeholders."""

    def joins() -> bool:
        twin.set_attn_implementation("eager")
        touching = _Trial(twin, encoder, given, between=0)
        apart, joined = _errors(twin, layers, touching, touching.own(), (True, JOINED))
        return joined <= TOLERANCE < apart

    return attempt(joins, False)  # a model may not support adjacent items


def _errors(twin: PreTrainedModel, layers: str, trial: _Trial, own: Tensor, ways: Sequence[bool | str]) -> list[float]:
    """Error of the modules' logits against `own`, those of the whole, for each attention direction inside items."""
    parts = trial.encoder.parts
    language_model = parts.language_model(twin)
    features: Tensor = tower_of(twin, parts)(**trial.batch).last_hidden_state.flatten(0, 1)
    language_model.set_attn_implementation(NAME)
    return [far([trial.logits(language_model, layers, features, way)], [own]) for way in ways]


def _reference(
    whole: PreTrainedModel, layers: str, encoder: WholeEncoder, given: TakenApart
) -> tuple[PreTrainedModel, _Trial, Tensor]:
    """A stand-in of the whole, its probe, and its logits; only the first WORDS logits if possible."""
    for words in (WORDS, None):
        twin: PreTrainedModel = stand_in(whole, layers, encoder.layer_path)
        twin.set_attn_implementation("eager")
        if words is not None:
            trim(twin, words)
        trial = _Trial(twin, encoder, given)
        try:
            return twin, trial, trial.own()
        except Exception as problem:  # a model may raise anything
            raise_if_no_memory(problem)
            if words is None:
                raise
    raise AssertionError


class _Trial:
    def __init__(self, twin: PreTrainedModel, encoder: WholeEncoder, given: TakenApart, between: int = TEXT[1]):
        self.twin, self.encoder, self.given = twin, encoder, given
        [(self.name, ids)] = given.placeholders.items()
        self.token = token_ids(ids)[0]
        chosen = two_items(encoder.feed)
        counts = [encoder.tokens(*item) for item in chosen]
        self.items = [
            Media(item.shape, count, random_rows(item.shape, seed), about=item.about)
            for seed, (item, count) in enumerate(zip(chosen, counts))
        ]
        first, second = (torch.full((count,), self.token) for count in counts)
        plain = plain_ids(twin, (TEXT[0], between, TEXT[2]))
        self.ids = torch.cat([plain[0], first, plain[1], second, plain[2]])
        self.batch = encoder.feed.kwargs(encoder.feed.collate(self.items), range(2), torch.zeros(()))

    def own(self) -> Tensor:
        """Logits [T, V] by HuggingFace's whole model."""
        ids = self.ids[None]
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name in ("token_type_ids", "mm_token_type_ids"):
            if takes(self.twin, name):
                given[name] = (ids == self.token).long()
        items = {GRID_OF_IMAGES if name == GRID else name: value for name, value in self.batch.items()}
        argument = self.encoder.feed.argument
        if takes(self.twin, "feature_attention_mask"):
            given["feature_attention_mask"] = torch.ones(2, items[argument].shape[-1], dtype=torch.long)
        logits: Tensor
        try:
            logits = self.twin(**given, **items).logits[0]
        except (ValueError, RuntimeError, IndexError) as problem:  # models that take items sample by sample
            raise_if_no_memory(problem)
            logits = self.twin(**given, **{**items, argument: items[argument][None]}).logits[0]
        return logits

    def logits(
        self, language_model: PreTrainedModel, layers: str, features: Tensor, bidirectional: bool | str
    ) -> Tensor:
        """Logits [T, V] by the modules."""
        settings = LanguageSettings(layers, self.given.placeholders, deepstack=self.given.deepstack)
        sample = Sample(self.ids, torch.full_like(self.ids, IGNORE), {self.name: self.items})
        batch = collate_language(
            [sample],
            {self.name: self.encoder},
            self.given.placeholders,
            bidirectional=bidirectional,
            positions_of=self.given.positions,
        )
        inputs = {**batch, "features": {self.name: features}}
        logits: Tensor = run_language(language_model, settings, inputs, None).logits[0]
        return logits


def two_items(feed: Feed) -> list[Item]:
    """Two items, of different sizes if the encoder supports that."""
    if isinstance(feed, PatchInputs):
        return [feed.item(1, UNIT, 2 * UNIT), feed.item(1, 2 * UNIT, 2 * UNIT)]
    if isinstance(feed, TileInputs):
        return [feed.examples[0], feed.examples[-1]]
    return [feed.default, feed.default]
