"""What the trainer's cuts go by: the lengths of the config's data, in every module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from interlace.data import ByteTokenizer
from interlace.plan import ParallelPlan, StagePlan
from interlace.run import stage_graph
from interlace.train.build import build, build_plan
from interlace.train.costs import budget_lengths, flop_costs
from tests.train.test_build import _build, _config


def dense(lengths: list[int], causal: bool) -> tuple[int, float]:
    """Tokens of a packed row of these items, and keys per token, counted in its dense mask."""
    item = np.repeat(np.arange(len(lengths)), lengths)
    seen = item[:, None] == item
    if causal:
        seen &= np.tri(len(item), dtype=bool)
    return len(item), seen.sum() / len(item)


def test_lengths_are_those_of_the_mixture_with_full_images_clips_and_captions() -> None:
    overrides = ["data.dataset=stamps", "data.max_images=4", "data.max_caption_bytes=20", "data.max_image_tokens=6"]
    mixture = {"image": 0.3, "speech": 0.2, "image_speech": 0.1, "images": 0.3, "text": 0.1}
    overrides += [f"data.mixture.{kind}={weight}" for kind, weight in mixture.items()]
    config, model = _config(*overrides, "train.batch_size=200"), _build()
    clip, features = 50, 25  # a second of speech, in front of a downsampling by 2
    # One batch of 200 samples in which every kind has its share: (images, clips, captions) of each.
    batch = [(1, 0, 1)] * 60 + [(0, 1, 1)] * 40 + [(1, 1, 1)] * 20 + [(0, 0, 2)] * 20
    batch += [(count, 0, count) for count in (2, 3, 4)] * 20
    expected = {
        "vision": dense([6 for images, _, _ in batch for _ in range(images)], causal=False),
        "audio": dense([clip for _, clips, _ in batch for _ in range(clips)], causal=False),
        "language_model": dense([6 * i + features * c + 20 * t for i, c, t in batch], causal=True),
    }
    found = budget_lengths(config, model)
    assert set(found) == set(expected)
    for name, (tokens, keys) in expected.items():
        assert (found[name].tokens, found[name].keys) == pytest.approx((tokens, keys)), name


def test_digits_have_one_picture_and_nothing_to_hear() -> None:
    found = budget_lengths(_config("train.microbatches=2", "train.batch_size=16"), _build())
    assert (found["vision"].tokens, found["vision"].keys) == (8 * 4, 4)
    assert (found["audio"].tokens, found["audio"].keys) == (0, 0)
    assert (found["language_model"].tokens, found["language_model"].keys) == (8 * 9, 5)


def flops(costs: Any, name: str) -> float:
    return float(costs[name].times.forward.sum())


def test_long_samples_cost_more_attention_than_short_ones() -> None:
    """Attention over samples of 4,000 tokens was charged 512 keys, like that over any others."""
    text = [f"data.mixture.{kind}=0.0" for kind in ("image", "speech", "image_speech", "images")]
    text += ["data.dataset=stamps", "model.language_model.config.max_position_embeddings=8192"]
    per_token = {}
    for size in (100, 2000):
        config = _config(*text, f"data.max_caption_bytes={size}")
        model = build(config, ByteTokenizer())
        lengths = budget_lengths(config, model)["language_model"]
        assert lengths.keys == size + 0.5  # of two captions, a query sees the half
        per_token[size] = flops(flop_costs(config, model), "language_model") / lengths.tokens
    # Two layers, 4 * keys * width for scores and values.
    assert per_token[2000] - per_token[100] == pytest.approx(2 * 4 * 1900 * 16)


def test_stages_that_share_ranks_weigh_what_passes_through_them() -> None:
    """With equal layers and one token each, three ranks would take two stages each, whatever the data."""
    modules = [f"parallel.{name}.pp=2" for name in ("vision", "audio", "language_model")]
    config = _config("parallel.placement=parallel", "parallel.ranks=3", *modules)  # digits: nothing to hear
    model = _build()
    plan = build_plan(config, model)
    costs = flop_costs(config, model)
    assert flops(costs, "audio") == 0
    heaviest = {name: flops(costs, name) for name in ("vision", "language_model")}
    ranks = {name: {r for s in plan.stages if s.module == name for r in s.ranks} for name in heaviest}
    assert len(ranks["vision"] | ranks["language_model"]) == 3


def test_a_plan_whose_stages_are_split_is_no_plan_of_copies() -> None:
    """tp * cp > 1, as `search_configuration` may propose: a simulation took the ranks of a stage for copies."""
    model = _build()
    stages = tuple(
        StagePlan(name, 0, 0, len(model.layers(name)), (2 * i, 2 * i + 1))
        for i, name in enumerate(model.modules_order())
    )
    with pytest.raises(ValueError, match=r"vision stage 0 is split over ranks \(0, 1\)"):
        stage_graph(model, ParallelPlan(stages, 6))
