"""Answers to held-out samples: batches of prompts for `interlace.model.generate`, and prompts from samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from interlace.model import IGNORE, MultimodalModel, Sample, generate


def answer(
    model: MultimodalModel, prompts: Sequence[Sample], *, end: int, max_new_tokens: int, batch_size: int = 64
) -> list[list[int]]:
    """Greedy continuations of `prompts` (samples whose ``input_ids`` end where the answer begins), without `end`.

    Each answer ends before the token `end`, after `max_new_tokens`, or at the model's last position.
    """
    answers: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        answers += generate(model, prompts[start : start + batch_size], max_new_tokens=max_new_tokens, stop=(end,))
    return answers


def prompt_of(sample: Sample, placeholders: Mapping[str, int | Sequence[int]]) -> Sample:
    """Prompt of a training sample: the part before its first answer (the first position that has a target)."""
    targets = (sample.labels != IGNORE).nonzero()
    stop = int(targets[0]) + 1 if len(targets) else len(sample.input_ids)
    ids = sample.input_ids[:stop]
    media = {}
    for name, items in sample.media.items():
        tokens = torch.isin(ids, torch.tensor(placeholders[name])).sum()
        ends = torch.tensor([item.tokens for item in items]).cumsum(0)
        media[name] = items[: int((ends <= tokens).sum())]
    return replace(sample, input_ids=ids, labels=torch.full((stop,), IGNORE), media=media)


def truth_of(sample: Sample, end: int) -> list[int]:
    """First target answer of a training sample, before `end`. Template tokens after `end` are dropped."""
    targets = (sample.labels != IGNORE).nonzero().squeeze(1)
    apart = (targets.diff() > 1).nonzero()
    wanted = sample.labels[targets[: int(apart[0]) + 1] if len(apart) else targets].tolist()
    return wanted[: wanted.index(end)] if end in wanted else wanted
