"""Bitfields from HuggingFace's mask functions: exact or refused, for every composition."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_overlay,
    or_masks,
    packed_sequence_mask_function,
    padding_mask_function,
    sdpa_mask,
    sliding_window_overlay,
)

from interlace.attention import AttentionPlan, bitfield_attention, hf
from interlace.attention.hf.carriers import Carrier
from interlace.attention.hf.masks import Sides, Unknown, differs, masks, translate
from interlace.masks import BitfieldMask
from tests.attention.hf_masks import BATCH, ask, blocks, dense


@pytest.fixture(autouse=True)
def forget_warnings():
    hf._warned.clear()


LENGTH = 12


@st.composite
def runs(draw, least):
    """int64 [BATCH, LENGTH] of runs of equal ids, from `least`."""
    rows = []
    for _ in range(BATCH):
        row, value = [], least
        while len(row) < LENGTH:
            row += [value] * draw(st.integers(1, 5))
            value += 1
        rows.append(row[:LENGTH])
    return torch.tensor(rows)


@st.composite
def images(draw):
    """Block ids: runs, some of which are text (-1)."""
    ids = draw(runs(0))
    return torch.where(torch.tensor([draw(st.booleans()) for _ in range(LENGTH)])[ids], ids, -1)


# Blocks whose numbers recur later have gaps.
GAPS = st.builds(lambda ids, cycle: torch.where(ids >= 0, ids % cycle, -1), images(), st.integers(1, 3))
LEAVES = st.one_of(
    st.just(causal_mask_function),
    st.integers(1, 8).map(sliding_window_overlay),
    runs(0).map(packed_sequence_mask_function),
    images().map(blocks),
    GAPS.map(blocks),
    st.integers(1, 6).map(lambda size: chunked_overlay(size, torch.tensor([0, 2]))),
    st.lists(st.booleans(), min_size=BATCH * LENGTH, max_size=BATCH * LENGTH).map(
        lambda bits: padding_mask_function(torch.tensor(bits).view(BATCH, LENGTH))
    ),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.tuples(st.sampled_from([and_masks, or_masks]), st.lists(inner, min_size=2, max_size=3)).map(
        lambda made: made[0](*made[1])
    ),
    max_leaves=5,
)


def understood(function, first=0):
    """Reason why `function` is refused, for queries from `first` on; None if its masks are correct."""
    at = Sides(torch.arange(first, LENGTH)[None], torch.arange(LENGTH)[None])
    try:
        queries, keys = masks(translate(function, at), at, BATCH, None)
    except Unknown as error:
        return str(error)
    b = torch.arange(BATCH)[:, None, None]
    wanted = function(b, torch.zeros_like(b), at.q[:, :, None], at.k[:, None, :])
    assert torch.equal(queries.to_dense(keys), wanted.expand(BATCH, LENGTH - first, LENGTH))
    return None


@settings(max_examples=150)
@given(TREES, st.integers(0, 4))
def test_any_composition_is_exact_or_refused(function, first):
    understood(function, first)


def test_what_a_bitfield_cannot_say_is_named():
    ids = torch.tensor([0, 0, 0, -1, -1, 0, 0, 0, 1, 1, 1, 1]).expand(BATCH, -1)
    window = and_masks(sliding_window_overlay(3), causal_mask_function)
    assert "gaps" in understood(or_masks(window, blocks(ids)))  # block 0 reaches beyond the window, over a gap
    assert understood(or_masks(window, blocks(torch.where(ids == 1, 1, -1)))) is None  # so does block 1, without a gap
    assert understood(or_masks(causal_mask_function, blocks(ids))) is None
    seen = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    seen[0, 3] = False
    masked = and_masks(causal_mask_function, padding_mask_function(seen))
    assert understood(or_masks(masked, blocks(ids))) is None
    seen[0, 6] = False
    assert "masked elsewhere" in understood(or_masks(masked, blocks(ids)))
    two = packed_sequence_mask_function(torch.arange(LENGTH).expand(BATCH, -1) // 7)
    assert "packed documents" in understood(or_masks(and_masks(two, causal_mask_function), blocks(ids)))
    assert understood(and_masks(or_masks(causal_mask_function, blocks(ids)), two)) is None
    assert "two block patterns" in understood(or_masks(blocks(ids), blocks(ids)))


def gemma_like(ids, window):
    return (
        or_masks(causal_mask_function, blocks(ids)),
        and_masks(or_masks(causal_mask_function, blocks(ids)), sliding_window_overlay(window)),
        or_masks(and_masks(sliding_window_overlay(window), causal_mask_function), blocks(ids)),
    )


@given(images(), st.integers(1, 8), st.integers(0, 3))
def test_image_blocks_windows_and_padding_are_understood(ids, window, padded):
    """Gemma-3's mask compositions in 4.57 and in 5 never stay dense, also with blocks longer than the window."""
    seen = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    seen[1, :padded] = False
    for function in gemma_like(ids, window):
        result = ask(function, LENGTH, LENGTH, attention_mask=seen)
        assert hasattr(result, "interlace_plan")
        wanted = ask(function, LENGTH, LENGTH, attention_mask=seen, ask=sdpa_mask)[:, 0]
        assert torch.equal(dense(result)[seen], wanted[seen])


@given(st.integers(1, 9), st.integers(2, 6), st.integers(0, 5))
def test_longer_static_caches_and_cached_prefixes(window, queries, offset):
    seen = torch.ones(BATCH, offset + queries, dtype=torch.bool)
    seen[0, :1] = False
    function = and_masks(sliding_window_overlay(window), causal_mask_function)
    given = {"offset": offset, "attention_mask": seen}
    result = ask(function, queries, LENGTH, **given)
    assert hasattr(result, "interlace_plan")
    wanted = ask(function, queries, LENGTH, **given, ask=sdpa_mask)[:, 0]
    rows = seen[:, offset:]
    assert torch.equal(dense(result)[rows], wanted[rows])


@pytest.mark.parametrize("length", [LENGTH, 300], ids=["all pairs", "sampled"])
def test_unknown_mask_functions_stay_dense_with_one_warning(length):
    def every_third(batch_idx, head_idx, q_idx, kv_idx):
        return (kv_idx % 3 == 0) & (kv_idx <= q_idx)

    function = or_masks(sliding_window_overlay(2), every_third)
    with pytest.warns(
        UserWarning, match=r"or\(sliding_window_overlay, .*every_third\) is run as a dense mask.*every_third is unknown"
    ) as caught:
        result = [ask(function, length, length) for _ in range(2)]
    assert len(caught) == 1
    for mask in result:
        assert mask.dtype == torch.bool and torch.equal(mask, ask(function, length, length, ask=sdpa_mask))


@pytest.mark.parametrize("length", [LENGTH, 300], ids=["all pairs", "sampled"])
def test_a_known_name_with_another_meaning_is_found_out(length):
    def sliding_window_overlay(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window

        inner_mask.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
        return inner_mask

    function = and_masks(sliding_window_overlay(2), causal_mask_function)
    with pytest.warns(UserWarning, match=r"and\(.*\) is run as a dense mask.*differs from the function, at \(batch"):
        result = ask(function, length, length)
    assert torch.equal(result, ask(function, length, length, ask=sdpa_mask))


def test_a_cell_of_another_kind_is_refused_not_guessed():
    def blockwise_overlay(block_sequence_ids):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return block_sequence_ids[q_idx] == block_sequence_ids[kv_idx]

        inner_mask.__qualname__ = "blockwise_overlay.<locals>.inner_mask"
        return inner_mask

    function = or_masks(causal_mask_function, blockwise_overlay(torch.arange(LENGTH)))
    with pytest.warns(UserWarning, match=r"is run as a dense mask.*1 dimensions"):
        ask(function, LENGTH, LENGTH)


def test_constants_and_two_sided_windows():
    def overlay(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return abs(q_idx - kv_idx) < sliding_window

        inner_mask.__qualname__ = "_bidirectional_window_overlay.<locals>.inner_mask"
        return inner_mask

    everything = or_masks(causal_mask_function, lambda *args: torch.tensor(True, dtype=torch.bool))
    both_ways = or_masks(and_masks(sliding_window_overlay(3), causal_mask_function), overlay(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function in (everything, both_ways):
            result = ask(function, LENGTH, LENGTH)
            assert torch.equal(dense(result), ask(function, LENGTH, LENGTH, ask=sdpa_mask)[:, 0])


@pytest.mark.parametrize("wording", ["4.57 to 5.0", "5.8"])
def test_every_wording_of_gemmas_images(wording):
    """Also if a static cache is longer than the ids."""
    ids = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1], [0, 0, -1, -1, 1, 1, 1, 1]])

    def token_type_ids_mask_function(group_ids, image_group_ids, token_type_ids):
        def at(table, b, index):
            return torch.where(index < 8, table[b, index.clamp(max=7)], -1)

        def old(batch_idx, head_idx, q_idx, kv_idx):
            kinds = [at(token_type_ids, batch_idx, index) for index in (q_idx, kv_idx)]
            groups = [at(image_group_ids, batch_idx, index) for index in (q_idx, kv_idx)]
            return (kinds[0] == 1) & (kinds[1] == 1) & (groups[0] == groups[1])

        def new(batch_idx, head_idx, q_idx, kv_idx):
            q_group, kv_group = at(group_ids, batch_idx, q_idx), at(group_ids, batch_idx, kv_idx)
            return (q_group == kv_group) & (q_group >= 0)

        inner_mask = new if wording == "5.8" else old
        inner_mask.__qualname__ = "token_type_ids_mask_function.<locals>.inner_mask"
        return inner_mask

    images = token_type_ids_mask_function(ids, ids, (ids >= 0).long())
    for function in (or_masks(causal_mask_function, images), and_masks(or_masks(causal_mask_function, images))):
        result = ask(function, 8, LENGTH)
        assert hasattr(result, "interlace_plan")
        assert torch.equal(dense(result), ask(function, 8, LENGTH, ask=sdpa_mask)[:, 0])


def test_differs_names_the_pair():
    at = Sides(torch.arange(4)[None], torch.arange(4)[None])
    mask = BitfieldMask.causal(1, 4)
    assert differs(causal_mask_function, at, mask, mask, None) is None
    assert differs(sliding_window_overlay(2), at, mask, mask, None) == (0, 0, 1)


def qkv(length, heads=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, length, 8, generator=generator) for _ in range(3)]


def test_cu_seqlens_alone_and_beside_a_models_own_mask():
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    q, k, v = qkv(10)
    doc = torch.tensor([[0] * 3 + [1] * 5 + [-1] * 2], dtype=torch.int32)
    module = torch.nn.Module()
    full = BitfieldMask(BitfieldMask.full(1, 10).bits, doc=doc)
    result, _ = hf.attention(module, q, k, v, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, is_causal=False)
    torch.testing.assert_close(result, bitfield_attention(q, k, v, full).transpose(1, 2))
    causal = BitfieldMask(BitfieldMask.causal(1, 10).bits, doc=doc, window=2)
    wanted = bitfield_attention(q, k, v, causal).transpose(1, 2)
    result, _ = hf.attention(module, q, k, v, None, cu_seq_lens_q=ends, sliding_window=2)
    torch.testing.assert_close(result, wanted)
    # The model's own mask does not include the boundaries; both apply.
    own = Carrier.of(AttentionPlan.build(BitfieldMask.causal(1, 10, window=2)), None, False)
    for _ in range(2):
        result, _ = hf.attention(module, q, k, v, own, cu_seq_lens_q=ends, sliding_window=1)
        torch.testing.assert_close(result, wanted)
    with pytest.raises(ValueError, match="ends after the last of 10 tokens"):
        hf.attention(module, q, k, v, None, cu_seq_lens_q=ends + 4, is_causal=False)
    with pytest.raises(ValueError, match="different lengths"):
        hf.attention(module, q, k, v, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends.clamp(max=6))
    with pytest.raises(ValueError, match="two-sided window"):
        hf.attention(module, q, k, v, None, cu_seq_lens_q=ends, is_causal=False, sliding_window=2)
    with pytest.raises(ValueError, match="dense attention mask"):
        hf.attention(module, q, k, v, torch.ones(1, 1, 10, 10).bool(), cu_seq_lens_q=ends)


@pytest.mark.parametrize("name", sorted(hf.REFUSED))
def test_unsupported_attention_arguments_are_refused(name):
    q, k, v = qkv(4)
    for mask in (None, hf.carrier(AttentionPlan.build(BitfieldMask.causal(1, 4)))):
        with pytest.raises(ValueError, match=f"passes '{name}'.*eager"):
            hf.attention(torch.nn.Module(), q, k, v, mask, **{name: torch.zeros(1)})


def test_masks_of_other_shapes_and_unmarked_images_are_refused():
    q, k, v = qkv(4)
    with pytest.raises(ValueError, match=r"the attention mask of a layer has shape \[1, 4\]"):
        hf.attention(torch.nn.Module(), q, k, v, torch.ones(1, 4).bool())
    positions = {"position_ids": torch.tensor([[0, 1, 0, 1]])}
    with pytest.raises(ValueError, match="by position_ids only"):
        hf._flash_attention(torch.nn.Module(), q, k, v, None, **positions)
    hf._flash_attention(torch.nn.Module(), q[:, :, :1], k, v, None, **positions)


def test_softcap_without_a_plan_is_dense_and_right():
    q, k, v = qkv(5)
    wanted = bitfield_attention(q, k, v, BitfieldMask.causal(1, 5), softcap=0.5).transpose(1, 2)
    seen = torch.ones(1, 1, 5, 5).tril().bool()
    additive = torch.zeros(1, 1, 5, 5).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (seen, additive):
        result, _ = hf.attention(torch.nn.Module(), q, k, v, mask, softcap=0.5)
        torch.testing.assert_close(result, wanted)
