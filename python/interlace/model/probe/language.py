"""Probe of a language model: packing, agreement with its own forward, cuts and cache (see probe/separation.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.attention import AttentionPlan
from interlace.attention.hf import NAME
from interlace.masks import BitfieldMask
from interlace.model.collate import collate_language
from interlace.model.generate import Reading, Readings
from interlace.model.language import LanguageSettings, merge_tokens, run_language
from interlace.model.loss import head_of
from interlace.model.probe.cache import remembered
from interlace.model.probe.inconclusive import attempt, raise_if_no_memory, record_failure
from interlace.model.probe.separation import (
    TOLERANCE,
    Case,
    Packing,
    both_modes,
    far,
    fastest,
    find_cuts,
    holds,
    note_returns,
    one_by_one,
)
from interlace.model.probe.stand_in import SMALL, Unanswerable, cheaply, stand_in
from interlace.model.rows import ALONE, PACKED, ROWS
from interlace.model.sample import IGNORE, Sample
from interlace.model.stages.slice import carve, takes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LENGTHS = ((9, 5), (70, 37))  # tokens of two samples; the longer ones reveal mixing of tokens up to 106 apart
WORDS = 512  # number of logits of a stand-in for a large vocabulary
CUT_LENGTH = 5
STEPS = 3


def language_packing(module: PreTrainedModel, settings: LanguageSettings) -> Packing:
    """Packing kind of this language model.

    Raises ValueError if its logits for token ids, by its own eager attention, differ from those in a MultimodalModel,
    which passes embeddings and a causal mask. Possible causes: it uses the ids in other ways, it is not causal, or its
    masks or scores contain something unknown to bitfield attention.
    """
    return remembered("packing", module, (settings.layer_path, settings.max_length), lambda: _packing(module, settings))


def _packing(module: PreTrainedModel, settings: LanguageSettings) -> Packing:
    with cheaply():
        for words in (WORDS, None):
            try:
                model: PreTrainedModel = stand_in(module, settings.layer_path)
            except Unanswerable as error:
                return one_by_one(type(module).__name__, error)
            if words is not None:
                trim(model, words)
            few, many = (
                _Trial(model, settings, plain_ids(module, lengths, settings.max_length)) for lengths in LENGTHS
            )
            own = few.own()
            if own is not None:
                break
        model.set_attn_implementation(NAME)
        if own is None:
            record_failure(Unanswerable("it does not run by itself"))
        else:
            few.check(own)
        layers: Any = model.get_submodule(settings.layer_path)
        returned, read = note_returns(layers), set[int]()
        for i, layer in enumerate(layers):
            layer.register_forward_hook(lambda *_, index=i: read.add(index))
        cases = [
            *both_modes(few.together, few.alone),
            Case("longer samples", many.together, many.alone, needed=False),
        ]
        packing = fastest(type(module).__name__, (PACKED, ROWS), cases)
        if packing.name == ALONE:
            packing = replace(packing, limit=_original_length(module.config))
        else:
            packing = few.limited(packing)
        ends_with_head = few.ends_with_head()
        unread = set(range(len(layers))) - read if read else ()
        return replace(packing, returned=tuple(returned), ends_with_head=ends_with_head, unread=tuple(sorted(unread)))


def trim(model: PreTrainedModel, words: int) -> None:
    """Reduce the head of a stand-in to the first logits: a full vocabulary costs more than everything else."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight.numel() > SMALL and head.out_features > words:
        head.weight = nn.Parameter(head.weight[:words], requires_grad=False)
        head.bias = None if head.bias is None else nn.Parameter(head.bias[:words], requires_grad=False)


class _Trial:
    def __init__(self, model: PreTrainedModel, settings: LanguageSettings, ids: list[Tensor]):
        self.model, self.settings, self.ids = model, settings, ids
        self._alone: list[Tensor] | None = None

    def own(self) -> list[Tensor] | None:
        """Logits [T, V] of each sample by the model's own eager attention; None if it cannot run this way."""
        options = {"use_cache": False} if takes(self.model, "use_cache") else {}
        try:
            self.model.set_attn_implementation("eager")
            logits = [self.model(input_ids=row[None], **options).logits[0] for row in self.ids]
        except Exception as problem:  # a model may raise anything; without result there is no comparison
            raise_if_no_memory(problem)
            return None
        return logits if all(bool(x.isfinite().all()) for x in logits) else None

    def check(self, own: list[Tensor]) -> None:
        """Raise ValueError unless a sample alone gets its `own` logits."""
        try:
            error = far(self.alone(), own)
        except Exception as problem:  # it cannot run at all; the error shows again in a real run
            record_failure(problem)
            return
        if error > TOLERANCE:
            raise ValueError(
                f"{type(self.model).__name__} gives other logits inside a MultimodalModel than by itself (relative "
                f"error {error:.0e} on random weights): it is not causal, or uses token ids beyond their embeddings, "
                "or changes attention by more than a mask. Use another language model"
            )

    def alone(self, training: bool = False) -> list[Tensor]:
        """Logits [T, V] of each sample in a batch of its own."""
        if not training and self._alone is not None:
            return self._alone
        made = [logits for row in self.ids for logits in self._run(ALONE, [row], training)]
        self._alone = self._alone if training else made
        return made

    def together(self, packing: str, training: bool = False) -> list[Tensor]:
        """Logits [T, V] of all samples in one batch."""
        return self._run(packing, self.ids, training)

    def limited(self, packing: Packing) -> Packing:
        """`packing` with its limit: the length of other samples up to which a sample gets the same logits as alone."""
        length, max_length = len(self.ids[1]), self.settings.max_length
        wanted = self.alone()[:1]

        def right(end: int) -> bool:
            return far(self._run(packing.name, self.ids, False, shift=end - length)[:1], wanted) <= TOLERANCE

        if max_length is None or max_length <= length or right(max_length):
            return packing
        limit = _original_length(self.model.config)
        if limit is None or limit <= length or not right(limit):
            alone = one_by_one(type(self.model).__name__, "rotary frequencies, or more, depend on the longest sample")
            return replace(alone, limit=0 if limit is None else limit)
        return replace(packing, limit=limit)

    def ends_with_head(self) -> bool:
        """True if the logits are exactly the head's output, so that a loss can be computed from the head's input.

        The head's output is replaced by large values here, to reveal a soft cap, which hardly changes small values.
        """
        head = head_of(self.model)
        given: list[Tensor] = []

        def answer(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            given.append(torch.randn(output.shape, generator=torch.Generator().manual_seed(0)) * 100)
            return given[-1]

        if head is None:
            return False
        with head.register_forward_hook(answer):
            logits = attempt(lambda: self._run(ALONE, self.ids[:1], False)[0], None)
        return logits is not None and len(given) == 1 and torch.equal(logits, given[0][0])

    def _run(self, packing: str, ids: list[Tensor], training: bool, shift: int = 0) -> list[Tensor]:
        self.model.train(training)
        inputs = _batch(ids, packing, shift)
        logits = run_language(self.model, _plain(self.settings, packing), inputs, None).logits
        return list(logits[inputs["mask"].doc >= 0].split([len(row) for row in ids]))


def language_takes_any_order(module: PreTrainedModel, settings: LanguageSettings) -> bool:
    """True if tokens get the same logits in any order of a row, as long as they keep their positions.

    This holds if layers mix tokens by attention alone. A rank may then hold any subset of the tokens. False if the
    probe fails.
    """
    known = (settings.layer_path, settings.max_length)
    return remembered("order", module, known, lambda: holds(lambda: _order(module, settings)))


def _order(module: PreTrainedModel, settings: LanguageSettings) -> bool:
    model = _switched(module, settings)
    batch = _batch(plain_ids(module, LENGTHS[0], settings.max_length), PACKED)
    ids, positions = batch["input_ids"], batch["position_ids"]
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))
    plan = AttentionPlan.build(batch["mask"].select(order[None]))
    other = {"input_ids": ids[:, order], "position_ids": positions[:, order], "plan": plan}
    plain = _plain(settings, PACKED)
    expected, shuffled = (run_language(model, plain, given, None).logits[0] for given in (batch, other))
    return far([shuffled], [expected[order]]) <= TOLERANCE


def allowed_cuts(
    module: PreTrainedModel, settings: LanguageSettings, returned: Sequence[int | None]
) -> list[bool | str]:
    """For each layer: True if a stage may start with it, because later layers need only the hidden state.

    returned: see Packing.
    """
    count = _count(module, settings)

    def prepare() -> Callable[[Sequence[int]], Tensor]:
        model, plain = _switched(module, settings, keep=count), _plain(settings, ALONE)
        inputs = _batch(plain_ids(module, [CUT_LENGTH], settings.max_length), ALONE)

        def run(bounds: Sequence[int]) -> Tensor:
            hidden: Any = None
            for start, stop in pairwise(bounds):
                part = carve(model, settings.layer_path, start, stop, returned=returned)
                hidden = run_language(part, plain, inputs, hidden)
            logits: Tensor = hidden.logits
            return logits[0]

        return run

    known = (settings.layer_path, settings.max_length, tuple(returned))
    return remembered("cuts", module, known, lambda: find_cuts(count, prepare))


def caches_right(module: PreTrainedModel, settings: LanguageSettings) -> bool:
    """True if cached generation gives the same logits as uncached generation, for the model's packing."""
    known = (settings.layer_path, settings.packing, settings.limit, settings.max_length)
    return remembered("cache", module, known, lambda: holds(lambda: _caches(module, settings)))


def _caches(module: PreTrainedModel, settings: LanguageSettings) -> bool:
    longest = max(1, min(CUT_LENGTH, (settings.max_length or CUT_LENGTH) - STEPS))
    model, plain = _switched(module, settings, keep=_count(module, settings)), _plain(settings, settings.packing)
    ids = plain_ids(module, [longest, max(1, longest - 3)])
    groups = [ids] if settings.packing == PACKED else [[row] for row in ids]
    readings = [Reading(model, plain, _batch(group, settings.packing), True) for group in groups]
    # Prompt after prompt in every step, as in generate: some models keep their own state.
    cached = _steps(readings[0] if len(groups) == 1 else Readings(readings), len(ids))
    for i, row in enumerate(ids):
        again = _steps(Reading(model, plain, _batch([row], settings.packing), False), 1)
        if far([cached[:, i]], [again[:, 0]]) > TOLERANCE:
            return False
    return True


def _steps(reading: Reading | Readings, prompts: int) -> Tensor:
    """Logits [STEPS + 1, prompts, V] after the prompts, which continue with tokens 1, 2, ..."""
    every = list(range(prompts))
    return torch.stack([reading.read(), *(reading.add(every, [step + 1] * prompts) for step in range(STEPS))])


def _count(module: PreTrainedModel, settings: LanguageSettings) -> int:
    """Number of layers."""
    return len(list(module.get_submodule(settings.layer_path).children()))


def _switched(module: PreTrainedModel, settings: LanguageSettings, **options: int) -> PreTrainedModel:
    """A stand-in with this package's attention."""
    model: PreTrainedModel = stand_in(module, settings.layer_path, **options)
    model.set_attn_implementation(NAME)
    return model


def _plain(settings: LanguageSettings, packing: str) -> LanguageSettings:
    """The settings without user callbacks and media options."""
    return replace(settings, placeholders={}, merge=merge_tokens, preprocess=None, postprocess=None, packing=packing)


def plain_ids(module: PreTrainedModel, lengths: Sequence[int], most: int | None = None) -> list[Tensor]:
    """Token ids without a special meaning for the model, at most `most` per row."""
    text = module.config.get_text_config()
    named = set(_numbers(module.config)) | set(_numbers(text))
    plain = [token for token in range(min(int(text.vocab_size), 4096)) if token not in named] or [0]
    g = torch.Generator().manual_seed(1)
    return [torch.tensor(plain)[torch.randint(len(plain), (min(n, most or n),), generator=g)] for n in lengths]


def _numbers(config: PretrainedConfig) -> list[int]:
    values = [value for key, value in vars(config).items() if "token" in key or key.endswith(("_id", "_index"))]
    flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [item for item in flat if isinstance(item, int)]


def _original_length(config: PretrainedConfig) -> int | None:
    """Maximum length with the original rotary frequencies, if the config has it."""
    text = vars(config.get_text_config())
    tables = [text, *(table for table in text.values() if isinstance(table, dict))]
    lengths = [table.get("original_max_position_embeddings") for table in tables]
    return min((int(value) for value in lengths if value), default=None)


def _batch(ids: list[Tensor], packing: str, shift: int = 0) -> dict[str, Any]:
    """A batch of samples with these ids. Positions of the last sample begin at `shift`."""
    samples = [Sample(row, torch.full_like(row, IGNORE)) for row in ids]
    batch = collate_language(samples, {}, {}, rows=packing == ROWS)
    if shift:
        last = batch["mask"].doc == (0 if packing == ROWS else len(ids) - 1)
        if packing == ROWS:
            last[:-1] = False
        batch["position_ids"] = batch["position_ids"] + shift * last
        tokens = batch["mask"].tokens()._replace(pos=batch["position_ids"].to(torch.int32))
        batch["mask"] = BitfieldMask.from_tokens(tokens, batch["mask"].sinks)
        batch["plan"] = AttentionPlan.build(batch["mask"])
    return batch
