"""What the trainer's cuts and predictions go by: lengths of the config's data, and how modules cut a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from interlace.data import ByteTokenizer
from interlace.layout import Layout
from interlace.train.build import build, build_layout
from interlace.train.commands import planning
from interlace.train.costs import budget_loads, flop_costs
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
    mixture = {"image": 0.2, "speech": 0.1, "image_speech": 0.1, "images": 0.3, "text": 0.1}
    mixture |= {"category": 0.1, "language": 0.1}
    overrides += [f"data.mixture.{kind}={weight}" for kind, weight in mixture.items()]
    config, model = _config(*overrides, "train.batch_size=200"), _build()
    clip, features = 50, 25  # a second of speech, in front of a downsampling by 2
    # One batch of 200 samples in which every kind has its share: (images, clips, bytes of text) of each.
    batch = [(1, 0, 20)] * 40 + [(0, 1, 20)] * 20 + [(1, 1, 20)] * 20 + [(0, 0, 40)] * 20
    batch += [(count, 0, 20 * count) for count in (2, 3, 4)] * 20
    batch += [(1, 0, len("What is it?") + 16)] * 20 + [(0, 1, len("Which language?") + 16)] * 20
    expected = {
        "vision": dense([6 for images, _, _ in batch for _ in range(images)], causal=False),
        "audio": dense([clip for _, clips, _ in batch for _ in range(clips)], causal=False),
        "language_model": dense([6 * i + features * c + t for i, c, t in batch], causal=True),
    }
    found = budget_loads(config, model)
    assert set(found) == set(expected)
    for name, (tokens, keys) in expected.items():
        assert (found[name].tokens, found[name].keys) == pytest.approx((tokens, keys)), name


def test_digits_have_one_picture_and_nothing_to_hear() -> None:
    found = budget_loads(_config("train.microbatches=2", "train.batch_size=16"), _build())
    assert (found["vision"].tokens, found["vision"].keys) == (8 * 4, 4)
    assert (found["audio"].tokens, found["audio"].keys) == (0, 0)
    assert (found["language_model"].tokens, found["language_model"].keys) == (8 * 9, 5)


def flops(costs: Any, name: str) -> float:
    return float(costs[name].times.forward.sum())


def test_long_samples_cost_more_attention_than_short_ones() -> None:
    """Attention over samples of 4,000 tokens was charged 512 keys, like that over any others."""
    others = ("image", "speech", "image_speech", "images", "category", "language")
    text = [f"data.mixture.{kind}=0.0" for kind in others]
    text += ["data.dataset=stamps", "model.language_model.config.max_position_embeddings=8192"]
    per_token = {}
    for size in (100, 2000):
        config = _config(*text, f"data.max_caption_bytes={size}")
        model = build(config, ByteTokenizer())
        lengths = budget_loads(config, model)["language_model"]
        assert lengths.keys == size + 0.5  # of two captions, a query sees the half
        per_token[size] = flops(flop_costs(config, model), "language_model") / lengths.tokens
    # Two layers, 4 * keys * width for scores and values.
    assert per_token[2000] - per_token[100] == pytest.approx(2 * 4 * 1900 * 16)


def test_stages_that_share_ranks_weigh_what_passes_through_them() -> None:
    """With equal layers and one token each, three ranks would take two stages each, whatever the data."""
    modules = [f"parallel.{name}.pp=2" for name in ("vision", "audio", "language_model")]
    config = _config("parallel.placement=parallel", "parallel.ranks=3", *modules)  # digits: nothing to hear
    model = _build()
    layout = build_layout(config, model)
    costs = flop_costs(config, model)
    assert flops(costs, "audio") == 0
    heaviest = {name: flops(costs, name) for name in ("vision", "language_model")}
    ranks = {name: {r for s in layout.stages() if s.module == name for r in s.lane.ranks} for name in heaviest}
    assert len(ranks["vision"] | ranks["language_model"]) == 3


def play(*overrides: str) -> Any:
    """What `interlace simulate` plays at a TFLOP/s per rank."""
    config, model = _config("train.batch_size=16", "train.microbatches=4", *overrides), _build()
    costs = planning._counted(config, model, 1.0)
    return planning._simulated(config, model, planning._own(config, model, "tiny.toml"), costs, 4)


def test_a_replica_stands_for_all_where_modules_have_one_dp() -> None:
    one, two = play("train.batch_size=8"), play("parallel.dp=2")
    assert (one.num_ranks, two.num_ranks) == (2, 2)
    assert two.makespan == pytest.approx(one.makespan)


@pytest.mark.parametrize(
    "layout",
    [
        "{placement='parallel', vision={dp=2}}",
        "{placement='parallel', vision={dp=2, chunks=1}}",
        "{placement='parallel', vision={chunks=2}}",
        "{placement='parallel', vision={pp=2}, language_model={dp=2}}",
        "{placement='shared', vision={dp=2}, audio={dp=2}, language_model={pp=2}}",
    ],
)
def test_replicas_and_chunks_move_work_and_make_none(layout: str) -> None:
    """A step computes the same samples, however its modules cut them: all ranks together are busy for equally long."""
    found = play(f"parallel={layout}")
    assert sum(found.busy_per_rank) == pytest.approx(sum(play("parallel.placement=parallel").busy_per_rank))


def test_chunks_of_a_chain_in_place_of_unequal_replicas_are_as_many_in_all() -> None:
    config = _config("parallel={placement='parallel', vision={dp=4, chunks=2}, language_model={dp=2}}")
    model = _build()
    own = planning._own(config, model, "tiny.toml")
    assert planning._chunks(config, own, 3) == {"vision": 2, "audio": 3, "language_model": 3}
    chain = Layout.balanced(model, 3)
    assert planning._chunks(config, chain, 3) == {"vision": 8, "audio": 6, "language_model": 6}
    shared = _config("parallel={placement='shared', dp=2}")
    own = planning._own(shared, model, "tiny.toml")
    assert planning._chunks(shared, own, 3) == {"vision": 1, "audio": 1, "language_model": 3}
    assert planning._chunks(shared, chain, 3) == {"vision": 3, "audio": 3, "language_model": 3}
