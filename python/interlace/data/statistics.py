"""What a run's report says about its data: counts and length distributions, computed without decoding."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from interlace.data.base import MultimodalDataset

PERCENTILES = {"min": 0, "p10": 10, "median": 50, "p90": 90, "max": 100}


def summary(dataset: MultimodalDataset, *, samples: int | None = None, epoch: int = 0) -> dict[str, Any]:
    """Plain data (JSON-ready) on the first ``samples`` (default: all) of an epoch.

    Keys: dataset, split, samples, distinct_stamps; kinds and languages (samples of each); items (media items per
    modality); tokens: per modality (per item) and for "text" and "sample" (per sample) min, p10, median, p90, max,
    mean, total; answer_tokens (targets of the loss); failed and skipped: file -> reason, and reason -> files.
    """
    count = len(dataset) if samples is None else min(samples, len(dataset))
    kinds: Counter[str] = Counter()
    languages: Counter[str] = Counter()
    stamps = set()
    tokens: dict[str, list[int]] = {"sample": [], "text": [], **{m: [] for m in dataset.tokens}}
    answers = 0
    for index in range(count):
        recipe = dataset.recipe(index, epoch)
        kinds[recipe.kind] += 1
        languages[recipe.language] += 1
        stamps.add(recipe.stamp)
        lengths = dataset.lengths(index, epoch)
        for modality, values in lengths.items():
            tokens[modality] += [sum(values)] if modality == "text" else values
        tokens["sample"].append(sum(sum(values) for values in lengths.values()))
        answers += len(dataset.answer(index, epoch))
    return {
        "dataset": dataset.name,
        "split": dataset.split,
        "samples": count,
        "distinct_stamps": len(stamps),
        "kinds": dict(kinds.most_common()),
        "languages": dict(languages.most_common()),
        "items": {m: len(tokens[m]) for m in dataset.tokens},
        "tokens": {m: _distribution(values) for m, values in tokens.items()},
        "answer_tokens": answers,
        "failed": dict(sorted(dataset.failures.items())),
        "skipped": dict(Counter(dataset.skipped.values()).most_common()),
    }


def _distribution(values: list[int]) -> dict[str, float]:
    if not values:
        return {"total": 0}
    points = {name: float(np.percentile(values, q)) for name, q in PERCENTILES.items()}
    return {**points, "mean": round(float(np.mean(values)), 2), "total": int(np.sum(values))}
