"""Helpers of test_workers.py and of other tests."""

from __future__ import annotations

from typing import Any

from interlace.data import Loader, Media, Sample


def numbers(batch: list[Any]) -> list[Any]:
    """A batch in comparable form; rows stay rows. Media that are not loaded are represented by their shapes."""
    if batch and isinstance(batch[0], list):
        return [numbers(row) for row in batch]
    return [
        (
            sample.input_ids.tolist(),
            sample.labels.tolist(),
            sample.name,
            {
                name: [
                    (item.shape, item.tokens, item.about, item.data.tolist() if item.loaded else None) for item in of
                ]
                for name, of in sample.media.items()
            },
        )
        for sample in batch
    ]


def take(loader: Loader, count: int) -> list[Any]:
    return [numbers(next(loader)) for _ in range(count)]


def seen(batch: list[Any]) -> list[Media]:
    """Input of a rank with the image encoder, for every other sample."""
    samples: list[Sample] = [s for row in batch for s in row] if batch and isinstance(batch[0], list) else batch
    return [item for sample in samples[::2] for item in sample.media["vision"]]
