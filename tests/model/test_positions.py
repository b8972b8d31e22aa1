"""M-RoPE positions against stored numbers: an oracle from the installed transformers would share its bugs.

positions.json has one case per line: token ids, the grids of the media in order (in patches, of which 2 x 2 are merged)
and positions. transformers 4.57.1 computed them, with the code of the families' authors; two cases say otherwise.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from interlace.model import Media, Sample
from interlace.model.whole.positions import RopeIndex
from tests.model import wholes

CASES = json.loads((Path(__file__).parent / "positions.json").read_text())
BY_FAMILY = [(family, case) for case in CASES for family in case["families"]]
NAMES = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "glm4v": "Glm4v",
    "glm4v_moe": "Glm4vMoe",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
}


@pytest.fixture(scope="module")
def indexes() -> dict[str, RopeIndex]:
    """Positions of models without weights: they follow from the config alone."""
    result = {}
    for family, name in NAMES.items():
        config = getattr(transformers, f"{name}Config")(image_token_id=wholes.TOKEN, video_token_id=wholes.VIDEO)
        config.text_config.num_hidden_layers = config.vision_config.depth = 1
        with torch.device("meta"):
            base = getattr(transformers, f"{name}Model")(config)
        result[family] = RopeIndex(base, "vision", (wholes.TOKEN, wholes.VIDEO))
    return result


def sample_of(case: dict[str, Any]) -> Sample:
    ids = torch.tensor(case["ids"])
    kinds, counts = ids.unique_consecutive(return_counts=True)
    places = [(int(kind), int(count)) for kind, count in zip(kinds, counts) if kind in (wholes.TOKEN, wholes.VIDEO)]
    media = []
    for (kind, count), grid in zip(places, case["items"], strict=True):
        seconds = case.get("seconds", 0.0) if kind == wholes.VIDEO else 0.0
        about = wholes.patches(*grid, seconds=seconds).about
        media.append(Media((math.prod(grid), 24), count, None, about=about))
    return Sample(ids, torch.full_like(ids, -100), {"vision": media}, case["case"])


@pytest.mark.parametrize(("family", "case"), BY_FAMILY, ids=[f"{family}-{case['case']}" for family, case in BY_FAMILY])
def test_positions_are_those_of_the_authors(indexes: dict[str, RopeIndex], family: str, case: dict[str, Any]) -> None:
    assert indexes[family](sample_of(case)).T.tolist() == case["positions"]


@pytest.mark.parametrize("case", [case for case in CASES if "ernie4_5_vl_moe" not in case["families"]])
def test_the_oracle_of_other_tests_has_them_too(case: dict[str, Any]) -> None:
    assert wholes.positions(sample_of(case)).tolist() == case["positions"]


def test_a_truncated_sample_keeps_its_positions(indexes: dict[str, RopeIndex]) -> None:
    [case] = [case for case in CASES if case["case"] == "image and videos" and case.get("seconds") == 1.0]
    sample = sample_of(case)
    whole = indexes["qwen2_5_vl"](sample)
    behind = len(sample) - 1 - sample.input_ids.tolist()[::-1].index(wholes.TOKEN)
    for length in (behind + 1, behind + 3):  # without the second video, and with some of the text before it
        media = {"vision": sample.media["vision"][:2]}
        cut = Sample(sample.input_ids[:length], sample.labels[:length], media, "cut")
        assert torch.equal(indexes["qwen2_5_vl"](cut), whole[:length])
