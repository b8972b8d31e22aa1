"""Text generation in one process: media are encoded once, keys and values are cached, one token per step."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.attention.hf import carrier, use_plan
from interlace.model.language import LanguageSettings, embed, plan_of
from interlace.model.sample import Sample

if TYPE_CHECKING:
    from interlace.model.multimodal import MultimodalModel


@torch.no_grad()
def generate(
    mllm: MultimodalModel,
    prompt: Sample,
    *,
    max_new_tokens: int = 64,
    stop: Collection[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Token ids that continue `prompt`, at most `max_new_tokens`, ending before the first id in `stop`.

    temperature 0 takes the likeliest token; above, tokens are drawn from softmax(logits / temperature), limited to the
    smallest set whose probability reaches `top_p`, with `generator`. Placeholder ids are never produced. The model is
    put into evaluation mode for the call. Raises ValueError for options out of range or a prompt that leaves no room
    within the language model's positions.
    """
    if temperature < 0 or not 0 < top_p <= 1 or max_new_tokens < 0:
        raise ValueError(
            f"temperature {temperature} must be >= 0, top_p {top_p} in (0, 1], max_new_tokens {max_new_tokens} >= 0"
        )
    room = max_new_tokens if mllm.max_length is None else min(max_new_tokens, mllm.max_length - len(prompt))
    if room < max_new_tokens and room <= 0:
        raise ValueError(
            f"prompt {prompt.name!r} of {len(prompt)} tokens leaves no room in the language model's {mllm.max_length} "
            "positions: shorten it or its media"
        )
    training = mllm.training
    mllm.eval()
    try:
        return _continue(mllm, prompt, room, frozenset(stop), temperature, top_p, generator)
    finally:
        mllm.train(training)


def _continue(
    mllm: MultimodalModel,
    prompt: Sample,
    room: int,
    stop: frozenset[int],
    temperature: float,
    top_p: float,
    generator: torch.Generator | None,
) -> list[int]:
    batch = mllm.collate([prompt])
    features = mllm.encode({name: batch[name] for name in mllm.encoders if name in batch})
    step = _Step(mllm.language_model, mllm.language_settings, {**batch, "features": features})
    never = torch.tensor(sorted(mllm.placeholders.values()), dtype=torch.int64)
    ids: list[int] = []
    while len(ids) < room:
        logits = step(ids[-1] if ids else None).float()
        logits[never.to(logits.device)] = -torch.inf
        token = _choose(logits, temperature, top_p, generator)
        if token in stop:
            break
        ids.append(token)
    return ids


class _Step:
    """Next-token logits: the first call reads the prompt under its bitfield mask, later ones add a token each.

    A new token sees all of its document, so later calls need no mask beside the cache.
    """

    def __init__(self, module: nn.Module, settings: LanguageSettings, inputs: dict[str, Any]):
        self.module: Any = module
        self.settings, self.inputs = settings, inputs
        self.cache: Any = None
        self.position = inputs["input_ids"].shape[1]
        self.device = next(module.parameters()).device

    def __call__(self, token: int | None) -> Tensor:
        if token is None:
            inputs = self.settings.preprocess(dict(self.inputs)) if self.settings.preprocess else self.inputs
            inputs = embed(self.module, self.settings, inputs, self.device)
            plan = plan_of(inputs, self.device)
            given = {
                "inputs_embeds": inputs["inputs_embeds"],
                "attention_mask": carrier(plan, backend=self.settings.backend),
            }
            position = inputs["position_ids"].to(self.device)
        else:
            plan = None
            given = {"input_ids": torch.tensor([[token]], device=self.device), "past_key_values": self.cache}
            position = torch.tensor([[self.position]], device=self.device)
            self.position += 1
        with use_plan(plan, backend=self.settings.backend):
            output = self.module(**given, position_ids=position, use_cache=True)
        self.cache = output.past_key_values
        if self.settings.postprocess is not None:
            output = self.settings.postprocess(self.inputs, output)
        logits: Tensor = output.logits[0, -1]
        return logits


def _choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probability, order = torch.softmax(logits / temperature, dim=-1).sort(descending=True, stable=True)
    # A token stays if what is likelier does not reach top_p yet: the first one always does.
    probability[probability.cumsum(-1) - probability >= top_p] = 0
    return int(order[torch.multinomial(probability, 1, generator=generator)])
