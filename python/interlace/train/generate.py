"""Greedy answers from a model in one process.

The encoders run once. The prompts of a batch are packed into one row, like training samples, and the language model
reads the row again for each new token: for the answers of a caption's length that a run shows, this costs less code
than a cache for every family of models, and little time. An answered prompt leaves the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

IGNORE = -100


@torch.no_grad()
def answer(
    model: Any, prompts: Sequence[Any], *, end: int, max_new_tokens: int, batch_size: int = 64
) -> list[list[int]]:
    """Greedy continuations of `prompts` (samples whose ``input_ids`` end where the answer begins), without `end`.

    Each answer ends before the token `end` or after `max_new_tokens`.
    """
    answers: list[list[int]] = []
    training = model.training
    model.eval()
    try:
        for start in range(0, len(prompts), batch_size):
            answers += _answer_batch(model, list(prompts[start : start + batch_size]), end, max_new_tokens)
    finally:
        model.train(training)
    return answers


def prompt_of(sample: Any) -> Any:
    """The part of a training sample that comes before its answer (the first position that has a target)."""
    targets = (sample.labels != IGNORE).nonzero()
    stop = int(targets[0]) + 1 if len(targets) else len(sample.input_ids)
    return replace(sample, input_ids=sample.input_ids[:stop], labels=torch.full((stop,), IGNORE))


def truth_of(sample: Any, end: int) -> list[int]:
    """The answer that a training sample wants, without `end`."""
    wanted = sample.labels[sample.labels != IGNORE].tolist()
    return wanted[:-1] if wanted and wanted[-1] == end else wanted


def _answer_batch(model: Any, prompts: list[Any], end: int, max_new_tokens: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]
    features = _features(model, prompts)
    language_model = model.slice("language_model", 0, len(model.layers("language_model"))).eval()
    running = list(range(len(prompts)))
    for _ in range(max_new_tokens):
        samples = [_extended(prompts[i], answers[i]) for i in running]
        lasts = torch.tensor([len(sample.input_ids) for sample in samples]).cumsum(0) - 1
        inputs = model.collate_module("language_model", samples)
        inputs["features"] = {name: torch.cat([items[i] for i in running]) for name, items in features.items()}
        chosen = language_model.logits_of(inputs)[0, lasts].argmax(-1).tolist()
        for i, token in zip(running, chosen, strict=True):
            if token != end:
                answers[i].append(token)
        running = [i for i, token in zip(running, chosen, strict=True) if token != end]
        if not running:
            break
    return answers


def _features(model: Any, prompts: list[Any]) -> dict[str, list[torch.Tensor]]:
    """Encoder name -> features [tokens of its items, D] of each prompt; encoders without any item are left out."""
    features = {}
    for name in model.encoders:
        counts = [sum(item.tokens for item in prompt.media.get(name, [])) for prompt in prompts]
        if any(counts):
            features[name] = list(model.encoders[name](**model.collate_module(name, prompts)).split(counts))
    return features


def _extended(prompt: Any, tokens: list[int]) -> Any:
    ids = torch.cat([prompt.input_ids, torch.tensor(tokens, dtype=prompt.input_ids.dtype)])
    return replace(prompt, input_ids=ids, labels=torch.full_like(ids, IGNORE))
