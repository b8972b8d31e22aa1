"""Helpers of test_channel_local.py and of other tests."""

from __future__ import annotations

from typing import Any

import torch

from interlace.comm.channels.base import Tag

DUE = Tag("a", 0, 3, 3, False)


def out_of_order(here: Any) -> Any:
    """Rank 0 sends three parts to rank 1, which receives the last one first. Some ranks also communicate in lanes."""
    parts = [DUE._replace(chunk=chunk) for chunk in range(3)]
    joined = here.connect([(0, 1)])[0, 1]
    if here.rank == 0:
        for size, tag in enumerate(parts):
            here.send(torch.full((size, 2), 1.0 + size), 1, tag, rows=10 + size)
        came: list[Any] = []
    else:
        came = [here.receive_part(0, parts[i], parts if i == 2 else ()) for i in (2, 0, 1)]
    joined.barrier()
    here.finish()
    here.close()
    return [(part.tensor.tolist(), part.rows) for part in came]


ARRIVED = [([[3.0, 3.0]] * 2, 12), ([], 10), ([[2.0, 2.0]], 11)]
