"""Text generation in one process: media are encoded once, keys and values are cached, one token per prompt and step.

The prompts lie packed in one row, like training samples. Each step appends one token per prompt that still runs, in
its prompt's document, so the row grows as [ a a a b b | a b | a b | b | ... ] and the bitfield mask keeps the prompts
apart: no padding, no reordering of the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from interlace.attention import AttentionPlan
from interlace.attention.hf import carrier, use_plan
from interlace.masks import BitfieldMask, Tokens, word
from interlace.model.language import embed, plan_of
from interlace.model.sample import Sample

if TYPE_CHECKING:
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
    """Token ids that continue each of `prompts`, at most `max_new_tokens`, ending before the first id in `stop`.

    An answer also ends where prompt and answer fill the language model's positions, so that of a prompt that fills
    them alone is empty. temperature 0 takes the likeliest token; above, tokens are drawn from softmax(logits /
    temperature), limited to the smallest set whose probability reaches `top_p`, with `generator`. Placeholder ids are
    never produced. The model is put into evaluation mode for the call. Raises ValueError for options out of range and,
    as collation does, for a prompt that does not fit the model.
    """
    if temperature < 0 or not 0 < top_p <= 1 or max_new_tokens < 0:
        raise ValueError(
            f"temperature {temperature} must be >= 0, top_p {top_p} in (0, 1], max_new_tokens {max_new_tokens} >= 0"
        )
    if not prompts:
        return []
    room = [max_new_tokens] * len(prompts)
    if mllm.max_length is not None:
        room = [min(max_new_tokens, mllm.max_length - len(prompt)) for prompt in prompts]
    never = list(mllm.placeholders.values())
    answers: list[list[int]] = [[] for _ in prompts]
    training = mllm.training
    mllm.eval()
    try:
        row = _Row(mllm, prompts)
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


class _Row:
    """The packed prompts and what has been added to them, as the language model's cache holds them."""

    def __init__(self, mllm: MultimodalModel, prompts: Sequence[Sample]):
        self.module: Any = mllm.language_model
        self.settings = mllm.language_settings
        self.device = next(self.module.parameters()).device
        batch = mllm.collate(prompts)
        features = mllm.encode({name: batch[name] for name in mllm.encoders if name in batch})
        self.inputs: dict[str, Any] = {**batch, "features": features}
        # Not the kind of cache that the config asks for: sliding ones drop the oldest keys of the row, whose prompt is
        # not the one that has moved on. The mask knows each prompt's window.
        self.cache = DynamicCache()
        self.last = torch.tensor([len(prompt) for prompt in prompts], device=self.device).cumsum(0) - 1

    def read(self) -> Tensor:
        """Logits [prompts, V], fp32, of the token after each prompt."""
        inputs = self.settings.preprocess(dict(self.inputs)) if self.settings.preprocess else self.inputs
        inputs = embed(self.module, self.settings, inputs, self.device)
        plan = plan_of(inputs, self.device)
        self.keys, self.sinks = plan.queries(), plan.sinks
        self.ends = self.keys(lambda field: field[:, self.last])
        positions = inputs["position_ids"].to(self.device)
        self.positions = positions[:, self.last]
        return self._run(plan, positions, self.last, inputs_embeds=inputs["inputs_embeds"])

    def add(self, running: list[int], tokens: list[int]) -> Tensor:
        """Append one token to each of the prompts `running`; logits [running, V], fp32, of the tokens after them."""
        index = torch.tensor(running, device=self.device)
        self.positions[:, index] += 1
        self.ends.pos[:, index] += 1
        ends = self.ends(lambda field: field[:, index])
        new = ends._replace(bits=torch.full_like(ends.bits, word(0, causal=True)), span=torch.full_like(ends.span, -1))
        self.keys = Tokens(*(torch.cat(pair, dim=1) for pair in zip(self.keys, new, strict=True)))
        plan = AttentionPlan.build(self._mask(new), self._mask(self.keys))
        ids = torch.tensor([tokens], device=self.device)
        return self._run(plan, self.positions[:, index], torch.arange(len(running), device=self.device), input_ids=ids)

    def _mask(self, tokens: Tokens) -> BitfieldMask:
        return BitfieldMask(
            tokens.bits, doc=tokens.doc, span=tokens.span, pos=tokens.pos, window=tokens.window, sinks=self.sinks
        )

    def _run(self, plan: AttentionPlan, positions: Tensor, wanted: Tensor, **given: Tensor) -> Tensor:
        postprocess = self.settings.postprocess
        options: dict[str, Any] = {}
        if postprocess is None and "logits_to_keep" in inspect.signature(self.module.forward).parameters:
            options["logits_to_keep"] = wanted  # the vocabulary is large, and a row of prompts long
        with use_plan(plan, backend=self.settings.backend):
            output = self.module(
                **given,
                **options,
                attention_mask=carrier(plan, backend=self.settings.backend),
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
            )
        if postprocess is not None:
            output = postprocess(self.inputs, output)
        logits: Tensor = output.logits[0]
        return (logits if options else logits[wanted]).float()


def _choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> list[int]:
    """A token id for each row of `logits` [n, V]."""
    if temperature == 0:
        return logits.argmax(-1).tolist()
    probability, order = torch.softmax(logits / temperature, dim=-1).sort(dim=-1, descending=True, stable=True)
    # A token stays if what is likelier does not reach top_p yet: the first one always does.
    probability[probability.cumsum(-1) - probability >= top_p] = 0
    drawn = torch.multinomial(probability, 1, generator=generator)
    return order.gather(-1, drawn).squeeze(-1).tolist()
