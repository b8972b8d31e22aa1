"""Checks of mask tensors: Python can read their values; tensors made from them may be kept for later."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


def readable(*tensors: Tensor | None) -> bool:
    """True if Python can read the values of all of `tensors`.

    `torch.compiler.is_compiling` is not used: it is also true in plain code while another thread compiles.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    traced = (FakeTensor, FunctionalTensor)
    return not any(tensor is not None and (isinstance(tensor, traced) or _is_batched(tensor)) for tensor in tensors)


def _is_batched(tensor: Tensor) -> bool:
    """True if torch.func.vmap batches `tensor`, at any level of nested transforms."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def keepable(*tensors: Tensor) -> bool:
    """True if tensors made now may be kept for later. False in traced code and under a transform of torch.func."""
    transformed = not torch.compiler.is_dynamo_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    return not transformed and readable(*tensors)


def batching() -> bool:
    """True if a torch.func.vmap is active, at any level."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)
