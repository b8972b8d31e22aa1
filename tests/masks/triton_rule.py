"""The truth table of the mask rule against the Triton kernels. `tests.attention.interpreter` runs the cases."""

from __future__ import annotations

from collections.abc import Callable

import torch

from interlace.masks import Tokens
from tests.attention.plan_lists import states
from tests.masks import table
from tests.masks.seen import backward_sees, forward_sees


def predicate() -> None:
    """The kernels' predicate on every pair, by attention forward and backward without bitmaps."""
    for queries, keys in table.masks():
        table.agree(forward_sees("triton", queries, keys, 64), queries, keys, "bitfield_common.allowed, forward")
        table.agree(backward_sees("triton", queries, keys, 64), queries, keys, "bitfield_common.allowed, backward")


def bitmaps() -> None:
    """Bitmaps of all blocks, along queries and along keys."""
    from interlace.kernels.bitfield_plan import map_calls

    block = 32
    for queries, keys in table.masks():
        q, k = (mask.tokens()(torch.Tensor.contiguous) for mask in (queries, keys))
        for of_queries, lines, others in ((True, queries, keys), (False, keys, queries)):
            rows, columns = -(-lines.length // block), -(-others.length // block)
            ptr = torch.arange(0, (lines.batch * rows + 1) * columns, columns, dtype=torch.int32)
            idx = torch.arange(columns, dtype=torch.int32).repeat(lines.batch * rows)
            maps = torch.zeros(len(idx), block + 1, 1, dtype=torch.int32)
            for call in map_calls(q, k, queries.sinks, block, ptr, idx, maps, of_queries):
                call.run()
            bits = ((maps[:, :block] >> torch.arange(block)) & 1).bool()  # [blocks, lines, others]
            dense = bits.view(lines.batch, rows, columns, block, block).transpose(2, 3).flatten(3).flatten(1, 2)
            seen = dense[:, : lines.length, : others.length]
            table.agree(seen if of_queries else seen.mT, queries, keys, "bitfield_plan.map_kernel")


def bounds() -> None:
    """Bounds decide no block wrongly, and every block of one token."""
    from interlace.kernels.bitfield_plan import UNDECIDED, class_calls

    for block, field in [(1, ""), *((2, field) for field in Tokens._fields)]:
        queries, keys = table.masks(fastest=field)[-1]  # the most sinks: some keys are sinks and some are not
        wanted = states(queries.to_dense(keys), block)
        classes = torch.empty(wanted.shape, dtype=torch.int8)
        tokens = [mask.tokens()(torch.Tensor.contiguous) for mask in (queries, keys)]
        for call in class_calls(*tokens, queries.sinks, block, classes)[:-1]:
            call.run()
        decided, what = classes != UNDECIDED.value, f"classify_kernel: block {block}, {field} fastest"
        assert torch.equal(classes[decided], wanted[decided].to(torch.int8)), what
        assert block > 1 or bool(decided.all()), f"{what}: undecided"


def elements() -> None:
    """Blocks that no bound has decided are decided by their elements."""
    from interlace.kernels.bitfield_plan import UNDECIDED, class_calls

    queries, keys = table.masks()[-1]
    wanted = states(queries.to_dense(keys), 8)
    classes = torch.full(wanted.shape, UNDECIDED.value, dtype=torch.int8)
    tokens = [mask.tokens()(torch.Tensor.contiguous) for mask in (queries, keys)]
    class_calls(*tokens, queries.sinks, 8, classes)[-1].run()
    assert torch.equal(classes, wanted.to(torch.int8)), "decide_kernel"


CASES: dict[str, Callable[[], None]] = {
    "rule: predicate": predicate,
    "rule: bitmaps": bitmaps,
    "rule: bounds of blocks": bounds,
    "rule: elements of blocks": elements,
}
