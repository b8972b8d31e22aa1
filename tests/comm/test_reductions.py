"""Records of sums over ranks are equal exactly if the sums were the same: as text, and as numbers that add up."""

from __future__ import annotations

import re
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from interlace.comm.process.reductions import BITS, Reductions

SUMS = st.lists(st.tuples(st.sampled_from([(0, 1), (0, 2), (0, 1, 2)]), st.sampled_from("ab"), st.integers(1, 2)))


@given(SUMS, SUMS, st.booleans())
def test_any_two_lists_of_sums_are_the_same_or_told_apart(first: Any, second: Any, same: bool) -> None:
    lists = [first, first if same else second, first]
    texts, shares = [], []
    for rank, made in enumerate(lists):
        reductions = Reductions()
        for ranks, key, size in made:
            if rank in ranks:
                reductions.add(ranks, key, torch.empty(size))
        texts.append(reductions.text())
        shares.append(reductions.share(rank))
        assert 0 <= shares[-1] < 1 << BITS

    def of(group: tuple[int, ...]) -> list[Any]:
        return [[sum_ for sum_ in lists[rank] if sum_[0] == group] for rank in group]

    alike = all(mine == of(group)[0] for group in ((0, 1), (0, 2), (0, 1, 2)) for mine in of(group))
    assert (Reductions.disagreement(texts) == "") == alike
    assert (sum(shares) % (1 << BITS) == 0) == alike


@given(st.lists(st.text(), min_size=2, max_size=3))
def test_what_is_no_list_of_sums_is_refused(texts: list[str]) -> None:
    said = Reductions.disagreement(texts)
    if any(text.splitlines() for text in texts):
        assert re.match(r"rank \d sent an unreadable list of its sums$|ranks .* have different sums", said)
