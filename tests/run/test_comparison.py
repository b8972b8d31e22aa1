"""Ranks with different inputs or different sums in a step get an error that says what differs, before the update."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from interlace.layout import Layout, ParallelSpec
from interlace.model import Media
from interlace.run import parallelize
from interlace.run.comparison import of_samples
from tests.run.parity import make_layout
from tests.tiny import random_microbatches, tiny_mllm

# Difference of rank 1, and the error on both ranks.
DIFFERENT = {
    "freezing": "parameters is fingerprint [0-9a-f]{16} on rank 0 but fingerprint [0-9a-f]{16} on rank 1",
    "layers": "parameters is fingerprint",
    "placement": "layout is fingerprint",
    "schedule": "schedule is 1f1b on rank 0 but gpipe on rank 1",
    "autocast": "autocast is None on rank 0 but torch.bfloat16 on rank 1",
    "sequence": "sequence_parallel is True on rank 0 but False on rank 1",
    "evaluation": "train is True on rank 0 but False on rank 1",
    "microbatches": "groups is 4 on rank 0 but 3 on rank 1; samples is 8 on rank 0 but 6 on rank 1",
    "order": "content is fingerprint",
    "grouping": "content is fingerprint",
    "one label": "content is fingerprint",
    "one image": "content is fingerprint",
}


def step(rank: int, ways: list[str]) -> list[tuple[str, bool]]:
    """(error on this rank, whether it has gradients afterwards) if rank 1 differs in one of `ways`."""
    lines = []
    for way in ways:
        odd = way if rank == 1 else ""
        mllm = tiny_mllm(layers=3 if odd == "layers" else 2, encoders=("vision",))
        if odd == "freezing":
            mllm.freeze("vision")
        layout = make_layout(mllm, "replicated" if odd == "placement" else "parallel", 2)
        parallel = parallelize(
            mllm, layout, transport="distributed", timeout=20, schedule="gpipe" if odd == "schedule" else "1f1b",
            autocast=torch.bfloat16 if odd == "autocast" else None, sequence_parallel=odd != "sequence",
        )  # fmt: skip
        batches = copy.deepcopy(random_microbatches(mllm, "all"))
        if odd == "microbatches":
            batches.pop()
        elif odd == "order":
            batches.reverse()
        elif odd == "grouping":
            batches[0].append(batches[1].pop())
        elif odd == "one label":
            batches[2][0].labels[-2] = 3
        elif odd == "one image":
            image = batches[0][0].media["vision"][0]
            image.shape = (image.shape[0], image.shape[2], image.shape[1] + 4)
        try:
            (parallel.evaluate if odd == "evaluation" else parallel.step)(batches)
            text = ""
        except ValueError as error:
            text = str(error)
        trained = any(parameter.grad is not None for _, parameter in parallel.named_parameters())
        lines.append((text, trained))
    return lines


def test_ranks_that_were_given_something_else_do_not_start(pool: Any) -> None:
    ways = ["", *DIFFERENT, ""]
    here, there = pool.returned(2, step, ways, timeout=180)
    assert here[0] == here[-1] == there[0] == there[-1] == ("", True)
    for way, mine, theirs in zip(DIFFERENT, here[1:], there[1:], strict=False):
        assert mine == theirs, way
        assert mine[0].startswith("the inputs of the ranks differ, so no rank runs this step: "), (way, mine)
        assert re.search(DIFFERENT[way], mine[0]) and not mine[1], (way, mine)


def refused_after_a_step(rank: int, dp: int) -> list[tuple[str, bool]]:
    """(error on this rank, whether its gradients of the previous step are unchanged) if batches differ, or one is
    refused. Without images the language model of dp = 1 does not communicate.
    """
    lines = []
    for odd in ("differs", "refused"):
        mllm = tiny_mllm(encoders=("vision",) if dp == 1 else ())
        layout = Layout.from_specs(mllm, {name: ParallelSpec(dp=dp) for name in mllm.modules_order()})
        parallel = parallelize(mllm, layout, transport="distributed", timeout=20)
        parallel.step(random_microbatches(mllm, "all"))
        before = {name: None if p.grad is None else p.grad.clone() for name, p in parallel.named_parameters()}
        batches = random_microbatches(mllm, "text", seed=rank if odd == "differs" else 0)
        try:
            parallel.step([] if odd == "refused" and rank == 0 else batches)
            text = ""
        except ValueError as error:
            text = str(error)
        same = all(
            p.grad is None if before[name] is None else p.grad is not None and torch.equal(p.grad, before[name])
            for name, p in parallel.named_parameters()
        )
        lines.append((text, same))
    return lines


@pytest.mark.parametrize("dp", [1, 2])
def test_refused_step_keeps_the_gradients_of_earlier_steps(dp: int, pool: Any) -> None:
    here, there = pool.returned(2, refused_after_a_step, dp, timeout=180)
    assert "inputs of the ranks differ" in here[0][0] == there[0][0]
    assert "at least one sample" in here[1][0] and "rank 0 rejected" in there[1][0]
    assert all(same for told in (here, there) for _, same in told), (here, there)


def test_what_the_digest_of_samples_says() -> None:
    batches = random_microbatches(tiny_mllm(encoders=("vision",)), "all")
    undecoded = copy.deepcopy(batches)
    for group in undecoded:
        for sample in group:
            sample.media["vision"] = [Media(image.shape, image.tokens) for image in sample.media["vision"]]
    assert of_samples(undecoded).text == of_samples(batches).text  # ranks that do not run the encoder
    assert of_samples(batches[::-1]).text != of_samples(batches).text
