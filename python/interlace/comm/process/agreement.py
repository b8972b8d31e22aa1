"""Agreement of ranks: which arguments of an operation must be equal on all ranks, and which may differ.

    operation                    equal on all ranks                                 may differ between ranks
    all_gather_into_tensor       shape and dtype of the input                       shape of the output
    unshard                      the same, and shards                               length
    reduce_scatter_tensor        shape and dtype of the input, op                   shape of the output
    all_reduce                   shape and dtype of the tensor, op
    all_to_all_single            shape and dtype of a row; the split size that a
                                 sends to b equals the one that b expects           total number of rows
    all_gather_matmul            shape and dtype of x, chunks, layout, regather     weights: how many, their rows N
    matmul_reduce_scatter        shape and dtype of x except K, N, chunks, layout   K
    context_parallel_attention   shapes and dtype of q, k, v; shards, mask; scale,  return_lse, backend, blocks of the
                                 softcap, deterministic, chunks of key heads        plan
    a tensor-parallel module     its path -> style, sequence_parallel, any_length,
                                 num_chunks, regather, sum_gradients; names,
                                 shapes and dtypes of parameters                    weights that are loaded into it
    all of them                  whether a backward pass will communicate           strides, async_op, timeouts

`deterministic` must be equal because gradients of keys are sums over ranks: one rank with non-deterministic results
changes the bits on all ranks. Arguments of the middle column travel in the header of every batch, at no extra message.
The receiver compares them before it accepts any bytes, and reports differences with both values. A mask and shards are
too large for a header. Their fingerprints are sent instead, computed once per microbatch and kept with the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from interlace import _device
from interlace._core import fingerprint
from interlace.balance import TokenShards
from interlace.masks import BitfieldMask

BETWEEN_ARGUMENTS = "; "  # separator in the text; no value contains it


class Arguments:
    """Arguments of an operation that must be equal on all ranks, by name; see the table above.

    A value may be any object whose text identifies it. It is converted to text when the first header is written, on the
    transport's thread. If a GPU still computes the value, that thread waits for it.
    """

    def __init__(self, **values: object) -> None:
        self._values = values

    @cached_property
    def text(self) -> str:
        return BETWEEN_ARGUMENTS.join(f"{name}={value}" for name, value in self._values.items())


NO_ARGUMENTS = Arguments()


class Fingerprint:
    """64-bit fingerprint of texts and tensors: equal inputs give equal fingerprints.

    A mask of 1 M tokens takes a few ms, at memory speed. Tensors on a GPU are copied to the host asynchronously.
    Reading the text waits for that copy.
    """

    def __init__(self, text: str, tensors: Sequence[Tensor]) -> None:
        seed = hashlib.blake2b(f"{text} {[list(t.shape) for t in tensors]}".encode(), digest_size=8)
        self._value = int.from_bytes(seed.digest(), "little")
        self._copies = [_on_host(tensor) for tensor in tensors]
        gpus = [tensor.device for tensor in tensors if _device.on_gpu(tensor.device)]
        self._copied = torch.accelerator.current_stream(gpus[0]).record_event() if gpus else None
        if not gpus:
            self._finish()

    def __str__(self) -> str:
        if self._copied is not None:
            self._copied.synchronize()  # waits for the stream up to this event, not for the device
            self._finish()
        return f"fingerprint {self._value:016x}"

    def _finish(self) -> None:
        for copy in self._copies:
            self._value = fingerprint(copy, self._value)
        self._copies, self._copied = [], None


def fingerprint_of_mask(mask: BitfieldMask) -> Fingerprint:
    """Fingerprint of the mask's meaning, independent of its notation (no window, or one that covers everything)."""
    return Fingerprint(f"{mask.sinks} sinks", mask.tokens())


def fingerprint_of_shards(shards: TokenShards) -> str:
    """Fingerprint of the assignment of tokens to ranks; computed on first use and cached."""
    if "_fingerprint" not in shards.__dict__:
        arrays = [torch.from_numpy(np.ascontiguousarray(x, np.int64)) for x in (shards.block_order, shards.lengths)]
        shards.__dict__["_fingerprint"] = str(Fingerprint(f"{shards.ranks} ranks, blocks of {shards.block}", arrays))
    return str(shards.__dict__["_fingerprint"])


def arguments_of(dtype: torch.dtype, backward: bool, **options: object) -> Arguments:
    """Arguments of an operation: dtype of its tensors, whether a backward pass will communicate, and options by name.

    options: everything else that must agree: shapes (torch.Size), flags, numbers and fingerprints.
    """
    return _arguments(dtype, backward, tuple(options.items()))


@lru_cache(4096)  # the same arguments repeat in every step
def _arguments(dtype: torch.dtype, backward: bool, options: tuple[tuple[str, object], ...]) -> Arguments:
    values = {name: list(value) if isinstance(value, torch.Size) else value for name, value in options}
    return Arguments(**values, dtype=str(dtype).removeprefix("torch."), backward=backward)


def _on_host(tensor: Tensor) -> np.ndarray:
    if not _device.on_gpu(tensor.device):
        return tensor.detach().contiguous().numpy()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True).numpy()
