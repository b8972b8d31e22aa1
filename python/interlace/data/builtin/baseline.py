"""The unigram byte baseline: the loss of a model that knows only the frequency of each byte in the answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from interlace.data.builtin.byte_tokenizer import ByteTokenizer


def unigram_nats(
    train: Iterable[Iterable[int]], heldout: Iterable[Iterable[int]], vocab_size: int = ByteTokenizer.vocab_size
) -> float:
    """Mean cross entropy (nats per token) on ``heldout`` of token frequencies counted on ``train``.

    Both: target token ids, one iterable per sample (``dataset.answer(i)``). The result is comparable with the
    model's held-out loss over the same targets. Add-one smoothing over ``vocab_size``. Raises ValueError when empty.
    """
    counts = Counter(token for sample in train for token in sample)
    asked = Counter(token for sample in heldout for token in sample)
    if not counts or not asked:
        raise ValueError("unigram_nats needs at least one train and one held-out target token")
    for token in (*counts, *asked):
        if not 0 <= token < vocab_size:
            raise ValueError(f"target token {token} is outside the vocabulary 0..{vocab_size - 1}")
    log_total = math.log(sum(counts.values()) + vocab_size)
    nats = sum(n * (log_total - math.log(counts[token] + 1)) for token, n in asked.items())
    return nats / sum(asked.values())
