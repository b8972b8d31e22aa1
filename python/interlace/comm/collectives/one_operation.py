"""Collectives within an autograd function, visible to torch's dispatch modes as one operation.

Transports move bytes below torch. A mode that caches results of operations (selective activation checkpointing) would
see the received tensors as empty, and would repeat the collectives during recomputation. Without an active mode nothing
is added: torch.library takes tens of microseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

_numbers = itertools.count()
_computations: dict[int, Callable[[], list[Tensor]]] = {}  # a schema cannot hold functions: they are passed by number


def as_one_operation(compute: Callable[[], list[Tensor]], like: Tensor) -> list[Tensor]:
    """`compute()`, seen by dispatch modes as one ``interlace::collective`` on the device of `like`.

    For the forward of an autograd function. Its results must be new tensors.
    """
    if not torch._C._len_torch_dispatch_stack():
        return compute()
    number = next(_numbers)
    _computations[number] = compute
    try:
        return _collective(like, number)
    finally:
        del _computations[number]


@torch.library.custom_op("interlace::collective", mutates_args=())
def _collective(like: Tensor, number: int) -> list[Tensor]:
    return _computations[number]()


@_collective.register_fake
def _shapes(like: Tensor, number: int) -> list[Tensor]:
    return _computations[number]()  # uses a no-op transport (see `interlace.estimate.traced`)
