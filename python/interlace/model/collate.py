"""Collation of the language model's inputs: samples side by side in one row, with their mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from interlace.masks import CAUSAL, OWN_SHIFT, BitfieldMask
from interlace.model.sample import Sample


def pack(samples: Sequence[Sample], placeholders: Mapping[str, int], device: torch.device) -> dict[str, Any]:
    """``input_ids``, ``labels``, ``position_ids`` (int64 [1, T]) and ``mask`` (BitfieldMask [1, T]) of samples.

    Every sample is a document. Text and media tokens see everything before them in their document; the tokens of one
    media item also see each other both ways (a span). Streams: text 0, then the modalities in ``placeholders``'
    order. Raises ValueError naming the sample when its placeholders and its media do not match.
    """
    stream = {name: i + 1 for i, name in enumerate(placeholders)}
    own, span, document, position = [], [], [], []
    spans = 0
    for index, sample in enumerate(samples):
        length = len(sample.input_ids)
        sample_own = torch.zeros(length, dtype=torch.int64)
        sample_span = torch.full((length,), -1, dtype=torch.int32)
        for name, token in placeholders.items():
            where = (sample.input_ids == token).nonzero().squeeze(1)
            items = sample.media.get(name, [])
            expected = sum(item.tokens for item in items)
            if len(where) != expected:
                raise ValueError(
                    f"sample {sample.name!r} has {len(where)} placeholder tokens (id {token}) for {name!r}, its "
                    f"{len(items)} items need {expected}: check that the tokenizer's placeholder id is the model's and "
                    "that each item stands as Media.tokens placeholders"
                )
            sample_own[where] = stream[name]
            for place in where.split([item.tokens for item in items]):
                sample_span[place] = spans
                spans += 1
        own.append(sample_own)
        span.append(sample_span)
        document.append(torch.full((length,), index, dtype=torch.int32))
        position.append(torch.arange(length))
    attends = sum(1 << s for s in range(len(stream) + 1))
    bits = CAUSAL | (torch.cat(own) << OWN_SHIFT) | attends
    mask = BitfieldMask(bits[None], doc=torch.cat(document)[None], span=torch.cat(span)[None])
    return {
        "input_ids": torch.cat([sample.input_ids for sample in samples])[None].to(device),
        "labels": torch.cat([sample.labels for sample in samples])[None].to(device),
        "position_ids": torch.cat(position)[None].to(device),
        "mask": mask.to(device),
    }
