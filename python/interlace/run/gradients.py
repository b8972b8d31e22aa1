"""REDUCE_GRAD: gradients of parameters that live on several ranks become one sum, the same bits on each.

Three reasons for a parameter to live on several ranks: data-parallel replicas of a stage, redundant copies in the
replicated placement, and weights tied across stages (input embedding and output head). A parameter without gradient
anywhere keeps none, so that absent modalities leave parameters and optimizer state untouched, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from interlace.run.channel import Channel


def sum_over_ranks(
    parameters: Sequence[nn.Parameter], ranks: Sequence[int], channel: Channel, key: str
) -> Iterator[str]:
    """Sum ``.grad`` of ``parameters`` (same list on each of ``ranks``) in fixed rank order.

    Generator: yields what it waits for while in-process peers have to move first.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if len(ranks) == 1 or not trainable:
        return
    flags = torch.tensor([float(p.grad is not None) for p in trainable], device=trainable[0].device)
    for dtype in sorted({p.dtype for p in trainable}, key=str):
        group = [p for p in trainable if p.dtype == dtype]
        pieces = [p.grad.reshape(-1) if p.grad is not None else p.new_zeros(p.numel()) for p in group]
        flat = torch.cat(pieces)
        yield from _all_reduce(flat, ranks, channel, f"{key} {dtype}")
        for p, piece in zip(group, flat.split([p.numel() for p in group]), strict=True):
            p.grad = piece.view_as(p)
    yield from _all_reduce(flags, ranks, channel, f"{key} flags")
    for p, count in zip(trainable, flags.tolist(), strict=True):
        if count == 0:
            p.grad = None


def _all_reduce(tensor: Tensor, ranks: Sequence[int], channel: Channel, key: str) -> Iterator[str]:
    while not channel.all_reduce(tensor, ranks, key):
        yield f"ranks {list(ranks)} reduce {key}"
