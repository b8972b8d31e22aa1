"""AttentionPlan against the dense mask: the kind of every block, and every list and work item."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.attention import AttentionPlan
from interlace.attention.plan import KEY_PARTIAL_COST, PARTIAL_COST
from interlace.masks import BitfieldMask, visible
from tests.attention import cases
from tests.attention.plan_lists import listed, states
from tests.mask_strategies import mask_pairs


def check_work(plan: AttentionPlan, side: str, cap: int | None) -> None:
    """The work items of a side tile its rows exactly, longest first, with slots in order."""
    mark = "" if side == "q" else "k_"
    names = [f"work_{mark}{name}" for name in ("row", "start", "stop", "slot")]
    items = list(zip(*(getattr(plan, name).tolist() for name in names)))
    slots = getattr(plan, f"row_{mark}slots").tolist()
    slot_row = getattr(plan, f"slot_{mark}row").tolist()
    lengths = getattr(plan, f"full_{side}_ptr").diff() + getattr(plan, f"part_{side}_ptr").diff()
    items = [item for item in items if item[0] >= 0]
    full = getattr(plan, f"full_{side}_ptr").diff().tolist()
    sizes = [stop - start for _, start, stop, _ in items]
    masked = [max(0, stop - max(start, full[row])) for row, start, stop, _ in items]
    more = (PARTIAL_COST if side == "q" else KEY_PARTIAL_COST) - 1
    costs = [size + more * part for size, part in zip(sizes, masked)]
    assert all(one >= other - 1e-6 for one, other in itertools.pairwise(costs))
    assert cap is None or max(sizes, default=0) <= cap
    for r, length in enumerate(lengths.tolist()):
        mine = sorted(item for item in items if item[0] == r)
        assert [start for _, start, _, _ in mine] == [0] + [stop for _, _, stop, _ in mine[:-1]]
        assert mine[-1][2] == length
        if len(mine) == 1:
            assert mine[0][3] == -1 and slots[r] == slots[r + 1]
        else:
            assert [slot for *_, slot in mine] == list(range(slots[r], slots[r + 1]))
            assert slot_row[slots[r] : slots[r + 1]] == [r] * len(mine)


def check_documents(plan: AttentionPlan, mask: BitfieldMask, keys: BitfieldMask | None) -> None:
    """All unused tokens, and no others, are removed from their documents; visibility is unchanged."""
    dense = mask.to_dense(keys)
    for doc, side, part in (
        (plan.q_doc, mask, dense.any(2)),
        (plan.k_doc, mask if keys is None else keys, dense.any(1)),
    ):
        assert torch.equal(doc, torch.where(part, side.tokens().doc, -1).int())
    assert torch.equal(visible(plan.queries().rows(), plan.keys().columns(), plan.sinks), dense)


def check(mask: BitfieldMask, keys: BitfieldMask | None, block: int, cap: int | None) -> AttentionPlan:
    plan = AttentionPlan.build(mask, keys, block=block, cap=cap)
    check_documents(plan, mask, keys)
    wanted = states(mask.to_dense(keys), block)
    assert torch.equal(listed(plan, "q"), wanted) and torch.equal(listed(plan, "k"), wanted)
    assert torch.equal(plan.row_blocks(), (wanted > 0).sum(-1).int())
    check_work(plan, "q", cap)
    check_work(plan, "k", cap)
    return plan


@settings(max_examples=150)
@given(mask_pairs(), st.sampled_from([1, 4, 7, 16]), st.sampled_from([None, 1, 3]))
def test_random_masks_are_classified_exactly(pair, block, cap):
    check(*pair, block, cap)


@pytest.mark.parametrize("name", cases.masks())
@pytest.mark.parametrize("block", [16, 128])
def test_known_masks_are_classified_exactly(name, block):
    check(*cases.masks()[name], block, cap=3)


@settings(max_examples=25)
@given(mask_pairs(longest=400, shortest=200), st.sampled_from([3, 8, 70, 130]))
def test_many_blocks_are_classified_exactly(pair, block):
    """More blocks than are classified as one group, and blocks of more queries than one word has bits."""
    check(*pair, block, cap=5)


def test_threads_change_nothing():
    mask, _ = cases.masks()["packed"]
    before = torch.get_num_threads()
    plans = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            plans.append(AttentionPlan.build(mask, block=4))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*(plan.tensors() for plan in plans)))


def test_a_million_tokens():
    """64 causal documents of 16,384 tokens: 128 blocks each, the diagonal partial and all before it full."""
    document = torch.arange(64, dtype=torch.int32).repeat_interleave(16384)[None]
    plan = AttentionPlan.build(BitfieldMask(BitfieldMask.causal(1, 1 << 20).bits, doc=document))
    stats = plan.stats()
    assert (stats.full, stats.partial) == (64 * 128 * 127 // 2, 64 * 128)
    first = torch.arange(8192) // 128 * 128
    assert torch.equal(plan.part_q_idx, torch.arange(8192).int())
    assert torch.equal(plan.full_q_ptr.diff(), (torch.arange(8192) - first).int())


@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 5, 5), (2, 0, 0), (1, 0, 9), (1, 9, 0)])
def test_nothing_to_attend(batch, q_len, k_len):
    plan = AttentionPlan.build(BitfieldMask.full(batch, q_len), BitfieldMask.full(batch, k_len))
    assert plan.row_blocks().sum() == 0 and plan.stats().density == 0.0
    assert plan.row_blocks().shape == (batch, plan.q_blocks)


def test_stats():
    stats = AttentionPlan.build(BitfieldMask.causal(1, 64), block=16, cap=2).stats()
    assert (stats.blocks, stats.full, stats.partial, stats.density) == (16, 6, 4, 10 / 16)
    assert (stats.rows, stats.split_rows, stats.work_items, stats.longest_item) == (4, 2, 6, 2)
    assert stats.imbalance == pytest.approx(4 / 2.5)


def test_lists_have_room_for_two():
    plan = AttentionPlan.build(BitfieldMask.causal(1, 3))
    assert plan.full_q_idx.tolist() == [-1, -1] and plan.part_q_idx.tolist() == [0, -1]
    assert plan.work_row.tolist() == [0, -1] and plan.slot_row.tolist() == [-1, -1]


def test_companions_are_filled_in():
    plan = AttentionPlan.build(BitfieldMask.causal(1, 3, window=2), BitfieldMask.causal(1, 5))
    assert plan.q_doc.tolist() == [[0, 0, 0]] and plan.k_span.tolist() == [[-1] * 5]
    assert plan.q_window.tolist() == [[2, 2, 2]] and plan.k_pos.tolist() == [[0, 1, 2, 3, 4]]
    assert AttentionPlan.build(BitfieldMask.causal(1, 2)).q_window.tolist() == [[1 << 30] * 2]
    assert {t.dtype for t in plan.tensors()} == {torch.int32, torch.int64}


def test_moves_and_round_trips():
    plan = AttentionPlan.build(BitfieldMask.causal(1, 40), block=16)
    assert plan.to("cpu") is plan
    assert {t.device.type for t in plan.to("meta").tensors()} == {"meta"}
    again = AttentionPlan.from_tensors(plan.tensors(), plan.block, plan.sinks)
    assert all(a is b for a, b in zip(again.tensors(), plan.tensors()))
    leaves, spec = torch.utils._pytree.tree_flatten(plan)
    assert torch.equal(torch.utils._pytree.tree_unflatten(leaves, spec).work_row, plan.work_row)


def test_plans_compare_by_identity():
    mask = BitfieldMask.causal(1, 4)
    plan = AttentionPlan.build(mask)
    assert plan == plan and plan != AttentionPlan.build(mask) and plan in {plan}


def test_refusals():
    mask = BitfieldMask.causal(1, 8)
    with pytest.raises(TypeError, match="BitfieldMask"):
        AttentionPlan.build(mask.bits)
    with pytest.raises(ValueError, match="same batch"):
        AttentionPlan.build(mask, BitfieldMask.causal(2, 8))
    with pytest.raises(ValueError, match="block is 0"):
        AttentionPlan.build(mask, block=0)
    with pytest.raises(ValueError, match="cap is 0"):
        AttentionPlan.build(mask, cap=0)
    plan = AttentionPlan.build(mask)
    with pytest.raises(ValueError, match="8 queries and 8 keys, but q and k hold batch 1, 7 queries"):
        plan.check(1, 7, 8, torch.device("cpu"))
    with pytest.raises(ValueError, match="is on cpu but q is on meta"):
        plan.check(1, 8, 8, torch.device("meta"))
