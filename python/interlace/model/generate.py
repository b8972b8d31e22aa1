"""Text generation in one process: media are encoded once, keys and values are cached, one token per prompt and step.

The prompts are packed into one row, like training samples. Each step appends one token per unfinished prompt, in the
document of its prompt. The row grows as [ a a a b b | a b | a b | b | ... ], and the bitfield mask separates the
prompts. So there is no padding and no reordering of the cache. Exceptions: a language model that does not pack
(rows.py) processes each prompt separately. The cache is off for a model whose cached results differ from uncached ones,
which a probe detects. It is also off for a prompt that may exceed the length at which the model's rotary frequencies
change.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils

from interlace.attention import AttentionPlan
from interlace.attention.hf import use_plan
from interlace.masks import BitfieldMask, Tokens, word
from interlace.model.inputs.placeholders import every_id
from interlace.model.language import LanguageSettings, as_model_wants, embed, plan_after, plan_of
from interlace.model.rows import PACKED
from interlace.model.sample import Sample, check_samples
from interlace.model.stages.deepstack import handing
from interlace.model.stages.slice import takes

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import CacheLayerMixin

    from interlace.model.multimodal import MultimodalModel


@torch.no_grad()
def generate(
    mllm: MultimodalModel,
    prompts: Sequence[Sample],
    *,
    max_new_tokens: int = 64,
    stop: Collection[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Generate token ids that continue each of `prompts`: at most `max_new_tokens`, ending before the first id in
    `stop`.

    An answer also ends when prompt and answer fill the language model's positions. It is empty if the prompt alone
    fills them.
    temperature: 0 takes the most likely token. Above 0, tokens are drawn from softmax(logits / temperature).
    top_p: limits the draw to the smallest set of tokens whose probability reaches `top_p`.
    generator: random generator for the draw.
    Placeholder ids are never produced. The model is in evaluation mode during the call. Raises ValueError for options
    out of range and, like collation, for a prompt that does not fit the model.
    """
    if temperature < 0 or not 0 < top_p <= 1 or max_new_tokens < 0:
        raise ValueError(
            f"temperature {temperature} must be >= 0, top_p {top_p} in (0, 1], max_new_tokens {max_new_tokens} >= 0"
        )
    check_samples("generate", prompts)
    if not prompts:
        return []
    room = [max_new_tokens] * len(prompts)
    if mllm.max_length is not None:
        room = [min(max_new_tokens, mllm.max_length - len(prompt)) for prompt in prompts]
    never = sorted(every_id(mllm.placeholders))
    answers: list[list[int]] = [[] for _ in prompts]
    training = mllm.training
    mllm.eval()
    try:
        row = _open(mllm, prompts, room)
        running = [i for i in range(len(prompts)) if room[i] > 0]
        logits = row.read()[running] if running else None
        while logits is not None:
            logits[:, never] = -torch.inf
            chosen = dict(zip(running, _choose(logits, temperature, top_p, generator), strict=True))
            running = [i for i in running if chosen[i] not in stop]
            for i in running:
                answers[i].append(chosen[i])
            running = [i for i in running if len(answers[i]) < room[i]]
            logits = row.add(running, [chosen[i] for i in running]) if running else None
    finally:
        mllm.train(training)
    return answers


class Reading:
    """Prompts in one row and their generated tokens, with or without a cache of keys and values.

    With a cache, each step processes only the new tokens. Without a cache, there is one prompt, and each step processes
    all its tokens again: slow, but correct for every model.
    """

    def __init__(self, module: PreTrainedModel, settings: LanguageSettings, inputs: dict[str, Any], cached: bool):
        self.module = module
        self.settings = settings
        self.device = next(module.parameters()).device
        self.inputs = inputs
        self.cache = _cache(self.module, settings.packing) if cached else None
        self.last = _last_tokens(inputs["mask"]).to(self.device)

    def read(self) -> Tensor:
        """Logits [prompts, V], fp32, of the token after each prompt."""
        if self.settings.preprocess is not None:
            self.inputs = self.settings.preprocess(dict(self.inputs))
        self.ids = self.inputs["input_ids"].to(self.device)
        made = self._embed()
        plan = plan_after(plan_of(self.inputs), self.inputs, made).to(self.device)
        self.keys, self.sinks = plan.queries(), plan.sinks
        self.ends = self.keys(lambda field: field[:, self.last])
        self.every = self.inputs["position_ids"].to(self.device)
        self.positions = self._last_positions(plan.q_doc)
        with handing(self.module, made["deepstack"]):
            return self._run(plan, self.every, self.last, **_given(made))

    def add(self, running: list[int], tokens: list[int]) -> Tensor:
        """Append one token to each of the prompts `running`; returns logits [running, V], fp32, of the next tokens."""
        index = torch.tensor(running, device=self.device)
        self.positions[:, index] += 1
        self.ends.pos[:, index] += 1
        ends = self.ends(lambda field: field[:, index])
        new = ends._replace(bits=torch.full_like(ends.bits, word(0, causal=True)), span=torch.full_like(ends.span, -1))
        self.keys = Tokens(*(torch.cat(pair, dim=1) for pair in zip(self.keys, new, strict=True)))
        keys = BitfieldMask.from_tokens(self.keys, self.sinks)
        ids = torch.tensor([tokens], device=self.device)
        self.every = torch.cat([self.every, self.positions[:, index]], dim=1)
        if self.cache is None:
            self.ids = torch.cat([self.ids, ids], dim=1)
            wanted = torch.tensor([self.ids.shape[1] - 1], device=self.device)
            made = self._embed()
            with handing(self.module, made["deepstack"]):
                return self._run(AttentionPlan.build(keys), self.every, wanted, **_given(made))
        plan = AttentionPlan.build(BitfieldMask.from_tokens(new, self.sinks), keys)
        return self._run(plan, self.positions[:, index], torch.arange(len(running), device=self.device), input_ids=ids)

    def _last_positions(self, doc: Tensor) -> Tensor:
        """Last position of each prompt, [1, prompts] or [1, prompts, k]. Text continues after the largest position."""
        if self.every.dim() == 2:
            return self.every[:, self.last]
        furthest = [self.every[0, doc[0] == doc[0, last]].max() for last in self.last]
        return torch.stack(furthest)[None, :, None].expand(1, -1, self.every.shape[-1]).clone()

    def _embed(self) -> dict[str, Any]:
        """Inputs with embeddings of all ids so far. Recomputed each time, because some models scale them in place."""
        return embed(self.module, self.settings, {**self.inputs, "input_ids": self.ids}, [], self.device)

    def _run(self, plan: AttentionPlan, positions: Tensor, wanted: Tensor, **given: Tensor) -> Tensor:
        postprocess = self.settings.postprocess
        options: dict[str, Any] = {}
        if postprocess is None and "logits_to_keep" in inspect.signature(self.module.forward).parameters:
            options["logits_to_keep"] = wanted  # the vocabulary is large, and a row of prompts is long
        cache_name = "cache" if takes(self.module, "cache") else "past_key_values"  # transformers before 5.24
        cache = {} if self.cache is None else {cache_name: self.cache}
        if takes(self.module, "use_cache"):
            cache["use_cache"] = self.cache is not None
        with use_plan(plan, backend=self.settings.backend):
            output = self.module(**given, **options, **cache, position_ids=as_model_wants(positions))
        if postprocess is not None:
            output = postprocess(self.inputs, output)
        logits: Tensor = output.logits[0]
        return (logits if "logits_to_keep" in options else logits[wanted]).float()


def _given(made: dict[str, Any]) -> dict[str, Tensor]:
    """Inputs that the model takes instead of ids."""
    return {name: made[name] for name in ("inputs_embeds", "per_layer_inputs") if made[name] is not None}


class Readings:
    """Prompts that share nothing; each has its own `Reading`."""

    def __init__(self, readings: list[Reading]):
        self.readings = readings

    def read(self) -> Tensor:
        return torch.cat([reading.read() for reading in self.readings])

    def add(self, running: list[int], tokens: list[int]) -> Tensor:
        return torch.cat([self.readings[i].add([0], [token]) for i, token in zip(running, tokens)])


def _open(mllm: MultimodalModel, prompts: Sequence[Sample], room: Sequence[int]) -> Reading | Readings:
    # Beyond the limit, positions are rotated differently, including those of cached keys.
    limit = mllm.language_settings.limit
    fits = [limit is None or len(prompt) + most <= limit for prompt, most in zip(prompts, room, strict=True)]
    caches_right = mllm.caches_right()

    def reading(together: Sequence[Sample], cached: bool) -> Reading:
        batch = mllm.collate(together)
        features = mllm.encode({name: batch[name] for name in mllm.encoders if name in batch})
        return Reading(mllm.language_model, mllm.language_settings, {**batch, "features": features}, cached)

    if mllm.language_settings.packing == PACKED and caches_right and all(fits):
        return reading(prompts, True)
    return Readings([reading([prompt], caches_right and fit) for prompt, fit in zip(prompts, fits)])


def _cache(module: PreTrainedModel, packing: str) -> DynamicCache:
    """An empty cache that keeps all keys.

    The config's own kind of cache is not suitable: a sliding cache drops the oldest keys of the row, which may belong
    to a different prompt. The plan needs all keys, and already applies each prompt's window. Layers with a state
    instead of keys use the config's cache.
    """
    if packing == PACKED:
        return DynamicCache()
    cache = DynamicCache(config=module.config)
    cache.layers = [_unlimited(layer) for layer in cache.layers]
    return cache


def _unlimited(layer: CacheLayerMixin) -> CacheLayerMixin:
    if not getattr(layer, "is_sliding", False):
        return layer
    return cache_utils.DynamicLayer() if type(layer) is cache_utils.DynamicSlidingWindowLayer else layer


def _last_tokens(mask: BitfieldMask) -> Tensor:
    """Index of each document's last token in its row, int64 [documents]."""
    doc = mask.tokens().doc[0]
    return torch.unique_consecutive(doc, return_counts=True)[1].cumsum(0) - 1


def _choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> list[int]:
    """Choose a token id for each row of `logits` [n, V]."""
    if temperature == 0:
        return logits.argmax(-1).tolist()
    probability, order = torch.softmax(logits / temperature, dim=-1).sort(dim=-1, descending=True, stable=True)
    # A token stays if the more likely tokens do not reach top_p yet. The first one always stays.
    probability[probability.cumsum(-1) - probability >= top_p] = 0
    drawn = torch.multinomial(probability, 1, generator=generator)
    return order.gather(-1, drawn).squeeze(-1).tolist()
