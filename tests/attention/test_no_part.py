"""Unused tokens never affect results, even if NaN or infinite: padding, queries without keys, keys without queries.

Results are bitwise equal to those with zeros in these rows.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from tests.attention import cases
from tests.attention.no_part import OF_KEYS, OF_QUERIES, POISONS, compare, hidden, small
from tests.mask_strategies import mask_pairs
from tests.sampling import given_by_tier


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["empty rows", "shuffled part", "50 x 1", "window"])
def test_known_masks(backend, dtype, name):
    for poison in POISONS:
        compare(backend, *cases.masks()[name], dtype, poison)
    compare(backend, *cases.masks()[name], dtype, torch.nan, block=128, softcap=2.0, dims=(9, 20))


@given_by_tier(30, 100,
    mask_pairs(longest=150), st.sampled_from([1, 16, 64, 100]), st.sampled_from([None, 3.0]),
    st.fixed_dictionaries({name: st.sampled_from([0.0, *POISONS]) for name in OF_QUERIES + OF_KEYS}),
    st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([(8, 8), (5, 20), (16, 7)]),
)  # fmt: skip
def test_any_mask_and_any_poison(pair, block, softcap, poison, dtype, dims):
    for backend in ("reference", "cpu"):
        compare(backend, *pair, dtype, poison, block=block, softcap=softcap, dims=dims)


def test_several_threads_and_pieces_of_a_head():
    mask, keys = cases.masks()["empty rows"]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        compare("cpu", mask, keys, torch.float32, torch.nan, dims=(64, 32))
        compare("cpu", mask, keys, torch.bfloat16, torch.nan, dims=(64, 64))
    finally:
        torch.set_num_threads(before)


def test_who_is_hidden_in_the_small_mask():
    blind, unseen = (side[0].nonzero().flatten().tolist() for side in hidden(small(), None))
    assert blind == [5, *range(50, 60)] and unseen == [9, *range(50, 60)]
    for dims in ((16, 16), (5, 20)):
        compare("cpu", small(), None, torch.float32, torch.nan, dims=dims)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_finite_values_there_change_no_bits_either(backend):
    for name in ("empty rows", "shuffled part"):
        compare(backend, *cases.masks()[name], torch.float32, 1e30)
