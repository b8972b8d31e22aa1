"""``interlace mask``: a picture of the attention mask of packed training samples."""

from __future__ import annotations

import argparse

from interlace.train.config.load import ConfigError, load


def mask(options: argparse.Namespace) -> int:
    """``interlace mask``: the attention mask of the first training samples of a config, packed into one row."""
    from interlace.train.data.feed import datasets, indexed
    from interlace.train.data.texts import tokenizer_of
    from interlace.train.models.build import build

    if options.samples < 1:
        raise ConfigError(f"--samples {options.samples}: at least 1")
    config = load(options.config, options.set)
    tokenizer = tokenizer_of(config, source=str(options.config))
    model = build(config, tokenizer, source=str(options.config))
    train_data = indexed(*datasets(config, model, tokenizer, source=str(options.config)))
    samples = [train_data.sample(i, 0) for i in range(min(options.samples, len(train_data)))]
    drawn = model.collate(samples, only=["language_model"])["mask"]
    try:
        drawn.plot(options.out, names=dict(enumerate(model.encoders, start=1)))
    except OSError as error:
        raise ConfigError(f"--out {options.out}: cannot write there: {error.strerror}") from None
    print(f"{options.out}: {len(samples)} samples, {drawn.length} tokens")
    return 0
