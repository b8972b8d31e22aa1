"""Helpers of test_flops.py and of other tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from interlace.estimate.step_flops import Flops


def counted(run: Any) -> int:
    """FLOPs of `run` and of its backward."""
    with FlopCounterMode(display=False) as counter:
        made = run()
        if made.requires_grad:
            made.sum().backward()
    return int(counter.get_total_flops())


def total(found: Mapping[str, Flops]) -> Flops:
    """Sum over all modules."""
    return Flops(*(sum(column) for column in zip((0, 0), *found.values(), strict=True)))
