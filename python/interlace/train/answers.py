"""Answers to held-out samples: batches of prompts for `interlace.model.generate`, and what of a sample is a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from interlace.model import IGNORE, generate


def answer(
    model: Any, prompts: Sequence[Any], *, end: int, max_new_tokens: int, batch_size: int = 64
) -> list[list[int]]:
    """Greedy continuations of `prompts` (samples whose ``input_ids`` end where the answer begins), without `end`.

    Each answer ends before the token `end`, after `max_new_tokens`, or where the model's positions do.
    """
    answers: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        answers += generate(model, prompts[start : start + batch_size], max_new_tokens=max_new_tokens, stop=(end,))
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
