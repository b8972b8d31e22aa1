"""What every rank must pass alike to an operation, and what each may choose for itself: decided here, for all of them.

    operation                    the same on every rank                             each rank's own
    all_gather_into_tensor       shape and dtype of the input                       shape of the output
    unshard                      the same, and shards                               length
    reduce_scatter_tensor        shape and dtype of the input, op                   shape of the output
    all_reduce                   shape and dtype of the tensor, op
    all_to_all_single            shape and dtype of a row; what a gives b is
                                 what b takes from a                                rows in all
    all_gather_matmul            shape and dtype of x, chunks, layout, regather     weights: how many, their rows N
    matmul_reduce_scatter        shape and dtype of x but for K, N, chunks, layout  K
    context_parallel_attention   shapes and dtype of q, k, v; shards, mask; scale,  return_lse, backend, blocks of the
                                 softcap, deterministic, chunks of key heads        plan
    a tensor-parallel module     its path -> style, sequence_parallel, any_length,
                                 num_chunks, regather, sum_gradients; names,
                                 shapes and dtypes of parameters                    weights that it is loaded with
    all of them                  whether a backward pass will communicate           strides, async_op, timeouts

`deterministic` belongs to the first, since gradients of keys are sums over ranks: one rank that does not repeat its
bits spoils those of all. What is on the left travels in the header of every batch of the operation, so that it costs
no message; the receiver compares it before it takes any bytes, and says what differs, with both values. A mask and
shards are too large for that: their fingerprints travel, made once per microbatch and kept with the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from interlace import _device
from interlace._core import fingerprint
from interlace.balance import TokenShards
from interlace.comm.transports.base import Arguments
from interlace.masks import BitfieldMask


class Fingerprint:
    """Of texts and tensors, 64 bits: equal where they are. 1 M tokens of a mask take a few ms, at the speed of memory.

    Tensors on a GPU are copied to the host while it goes on; who wants the text first waits for that copy.
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
            self._copied.synchronize()  # with what the stream did until then, not with the device
            self._finish()
        return f"fingerprint {self._value:016x}"

    def _finish(self) -> None:
        for copy in self._copies:
            self._value = fingerprint(copy, self._value)
        self._copies, self._copied = [], None


def fingerprint_of_mask(mask: BitfieldMask) -> Fingerprint:
    """Of what it says, however it was written (no window, say, or one that reaches everything)."""
    return Fingerprint(f"{mask.sinks} sinks", mask.tokens())


def fingerprint_of_shards(shards: TokenShards) -> str:
    """Of which rank has which tokens; made on first use and kept."""
    if "_fingerprint" not in shards.__dict__:
        arrays = [torch.from_numpy(np.ascontiguousarray(x, np.int64)) for x in (shards.block_order, shards.lengths)]
        shards.__dict__["_fingerprint"] = str(Fingerprint(f"{shards.ranks} ranks, blocks of {shards.block}", arrays))
    return str(shards.__dict__["_fingerprint"])


def arguments_of(dtype: torch.dtype, backward: bool, **options: object) -> Arguments:
    """Of an operation: the dtype of its tensors, whether a backward pass will communicate, and what else must agree:
    shapes (torch.Size), flags, numbers and fingerprints, by name."""
    return _arguments(dtype, backward, tuple(options.items()))


@lru_cache(4096)  # those of one step come again in the next
def _arguments(dtype: torch.dtype, backward: bool, options: tuple[tuple[str, object], ...]) -> Arguments:
    values = {name: list(value) if isinstance(value, torch.Size) else value for name, value in options}
    return Arguments(**values, dtype=str(dtype).removeprefix("torch."), backward=backward)


def _on_host(tensor: Tensor) -> np.ndarray:
    if not _device.on_gpu(tensor.device):
        return tensor.detach().contiguous().numpy()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True).numpy()
