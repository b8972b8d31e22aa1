"""What ranks tell each other within an autograd function, as one operation that torch's dispatch modes see.

Transports move bytes below torch: a mode that keeps the results of operations (selective activation checkpointing) sees
the tensors that they fill as empty ones, and would have ranks meet again in the recomputation. Where no mode looks on,
nothing is added: torch.library takes tens of microseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

_numbers = itertools.count()
_computations: dict[int, Callable[[], list[Tensor]]] = {}  # a schema takes no functions: they pass by number


def as_one_operation(compute: Callable[[], list[Tensor]], like: Tensor) -> list[Tensor]:
    """`compute()`, which dispatch modes see as one ``interlace::collective`` on the device of `like`.

    It is for the forward of an autograd function. Its results must be new tensors.
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
    return _computations[number]()  # over a transport that carries nothing (see `interlace.run.traced`)
