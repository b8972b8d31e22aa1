"""Ranks of a step that were not given the same, or did not sum the same, are told what differs; nobody trains on it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.run import PipelineError, parallelize
from interlace.run.agreement import Reductions, of_samples
from interlace.run.distributed import DistributedChannel
from tests.run.test_parity import make_plan
from tests.tiny import random_microbatches, tiny_mllm

# What rank 1 does otherwise, and what both ranks are told.
DIFFERENT = {
    "freezing": "parameters is fingerprint [0-9a-f]{16} on rank 0 but fingerprint [0-9a-f]{16} on rank 1",
    "layers": "parameters is fingerprint",
    "placement": "plan is fingerprint",
    "schedule": "schedule is one_f_one_b on rank 0 but gpipe on rank 1",
    "autocast": "autocast is None on rank 0 but torch.bfloat16 on rank 1",
    "evaluation": "train is True on rank 0 but False on rank 1",
    "microbatches": "microbatches is 4 on rank 0 but 3 on rank 1; samples is 8 on rank 0 but 6 on rank 1",
    "order": "content is fingerprint",
    "grouping": "content is fingerprint",
    "one label": "content is fingerprint",
    "one image": "content is fingerprint",
}


def step(rank: int, ways: list[str]) -> list[tuple[str, bool]]:
    """(what this rank is told, whether it has gradients afterwards) where rank 1 differs in one of `ways`."""
    told = []
    for way in ways:
        odd = way if rank == 1 else ""
        mllm = tiny_mllm(layers=3 if odd == "layers" else 2, encoders=("vision",))
        if odd == "freezing":
            mllm.freeze("vision")
        plan = make_plan(mllm, "replicated" if odd == "placement" else "parallel", 2)
        parallel = parallelize(
            mllm, plan, transport="distributed", timeout=20, schedule="gpipe" if odd == "schedule" else "1f1b",
            autocast=torch.bfloat16 if odd == "autocast" else None,
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
        told.append((text, trained))
    return told


def test_ranks_that_were_given_something_else_do_not_start(pool: Any) -> None:
    ways = ["", *DIFFERENT, ""]
    here, there = pool.returned(2, step, ways, timeout=180)
    assert here[0] == here[-1] == there[0] == there[-1] == ("", True)
    for way, mine, theirs in zip(DIFFERENT, here[1:], there[1:], strict=False):
        assert mine == theirs, way
        assert mine[0].startswith("the ranks were not given the same, so none runs this step: "), (way, mine)
        assert re.search(DIFFERENT[way], mine[0]) and not mine[1], (way, mine)


def test_what_the_digest_of_samples_says() -> None:
    batches = random_microbatches(tiny_mllm(encoders=("vision",)), "all")
    undecoded = copy.deepcopy(batches)
    for group in undecoded:
        for sample in group:
            for image in sample.media["vision"]:
                image.data = None
    assert of_samples(undecoded).text == of_samples(batches).text  # ranks that do not run the encoder
    assert of_samples(batches[::-1]).text != of_samples(batches).text


# ---------------------------------------------------------------------- sums over ranks


def sums(rank: int, keys: list[str], world: int) -> str:
    """Sums under names of its own, which gloo cannot tell apart; then the ranks talk of something else."""
    channel = DistributedChannel(["a"], 20.0)
    ranks = list(range(world))
    channel.add_groups([ranks])
    try:
        for key in keys[rank].split():
            total = torch.full((3,), float(rank))
            channel.all_reduce(total, ranks, key)
            assert total.tolist() == [sum(ranks)] * 3
        assert channel.exchange(rank, "loss") == ranks
    except PipelineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["a b c", "a b c", "a b c"], ""),
        (["a b c", "a c b", "a b c"], "rank 0 made 3 sums, the last of c, 3 float32; rank 1 made 3, the last of b, 3 "),
        (["a b", "a b", "c b"], "rank 0 made 2 sums, the last of b, 3 float32; rank 2 made 2, the last of b, 3 f"),
    ],
)
def test_sums_of_different_things_are_found_when_the_ranks_talk_next(pool: Any, keys: list[str], says: str) -> None:
    for rank, told in enumerate(pool.returned(3, sums, keys, 3)):
        assert says in told and bool(says) == ("ranks 0,1,2 have not summed the same" in told), (rank, told)


SUMS = st.lists(st.tuples(st.sampled_from([(0, 1), (0, 2), (0, 1, 2)]), st.sampled_from("ab"), st.integers(1, 2)))


@given(SUMS, SUMS, st.booleans())
def test_any_two_lists_of_sums_are_the_same_or_told_apart(first: Any, second: Any, same: bool) -> None:
    lists = [first, first if same else second, first]
    texts = []
    for rank, made in enumerate(lists):
        reductions = Reductions()
        for ranks, key, size in made:
            if rank in ranks:
                reductions.add(ranks, key, torch.empty(size))
        texts.append(reductions.text())

    def of(group: tuple[int, ...]) -> list[Any]:
        return [[sum_ for sum_ in lists[rank] if sum_[0] == group] for rank in group]

    alike = all(mine == of(group)[0] for group in ((0, 1), (0, 2), (0, 1, 2)) for mine in of(group))
    assert (Reductions.disagreement(texts) == "") == alike


@given(st.lists(st.text(), min_size=2, max_size=3))
def test_what_is_no_list_of_sums_is_refused(texts: list[str]) -> None:
    said = Reductions.disagreement(texts)
    if any(text.splitlines() for text in texts):
        assert re.match(r"what rank \d says of its sums cannot be read$|ranks .* have not summed the same", said)
