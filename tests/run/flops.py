"""Helpers of test_flops.py and of other tests."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import FlopCounterMode


def counted(run: Any) -> int:
    """FLOPs of `run` and of its backward."""
    with FlopCounterMode(display=False) as counter:
        made = run()
        if made.requires_grad:
            made.sum().backward()
    return int(counter.get_total_flops())
