"""``interlace mask``: a picture of the attention mask of packed training samples."""

from __future__ import annotations

import argparse

from interlace.train.blame import check_at_least, writing
from interlace.train.config.load import load


def mask(options: argparse.Namespace) -> int:
    """``interlace mask``: the attention mask of the first training samples of a config, packed into one row."""
    from interlace.train.data.feed import datasets, indexed
    from interlace.train.data.texts import tokenizer_of
    from interlace.train.models.build import build

    check_at_least(1, options, "samples")
    config = load(options.config, options.set)
    tokenizer = tokenizer_of(config, source=str(options.config))
    model = build(config, tokenizer, source=str(options.config))
    train_data = indexed(*datasets(config, model, tokenizer, source=str(options.config)))
    samples = [train_data.sample(i, 0) for i in range(min(options.samples, len(train_data)))]
    drawn = model.collate(samples, only=["language_model"])["mask"]
    with writing("--out", options.out):
        drawn.plot(options.out, names=dict(enumerate(model.encoders, start=1)))
    print(f"{options.out}: {len(samples)} samples, {drawn.length} tokens")
    return 0
