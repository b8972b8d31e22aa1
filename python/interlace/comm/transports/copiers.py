"""Copies between tensors of one process, and the engines that perform them on CUDA.

Between two tensors of one GPU, a copy by the framework is a kernel on its SMs, and so is cudaMemcpyAsync. Only a
batched copy that requests overlap with computation goes to a copy engine. So it emulates a link when several virtual
ranks share one GPU (`run_local(copier=engine_copies)`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Copier = Callable[[Sequence[tuple[Tensor, Tensor]]], None]
"""Copies (to, from) pairs of contiguous tensors of equal size and dtype; on CUDA, on the current stream."""


def plain_copies(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies of the framework: memcpy on a CPU; a kernel within one GPU; a copy engine between two."""
    for to, source in pairs:
        to.copy_(source)


def engine_copies(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """One batched copy on the copy engines: the SMs stay free for computation.

    Raises RuntimeError with the driver's message; the current stream must not be the default one.
    """
    pairs = [(to, source) for to, source in pairs if to.numel()]
    if pairs:
        copy_bytes(
            [to.data_ptr() for to, _ in pairs],
            [source.data_ptr() for _, source in pairs],
            [source.nbytes for _, source in pairs],
        )


def copy_bytes(to: list[int], source: list[int], sizes: list[int]) -> None:
    """cudaMemcpyBatchAsync on the current stream: sizes[i] bytes from address source[i] to address to[i]."""
    runtime = _runtime()
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    attributes.flags = runtime.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute
    stream = torch.cuda.current_stream().cuda_stream
    if stream == 0:
        raise RuntimeError("batched copies cannot run on the default stream: use a stream of your own")
    (status,) = runtime.cudaMemcpyBatchAsync(to, source, sizes, len(sizes), [attributes], [0], 1, stream)
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaMemcpyBatchAsync: {status.name}")


def engine_missing() -> str:
    """The reason why `engine_copies` cannot run in this process; "" if it can."""
    if not torch.cuda.is_available():
        return "no GPU or no driver"
    try:
        runtime = _runtime()
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}): pip install 'interlace[cuda13]'"
    if not hasattr(runtime, "cudaMemcpyBatchAsync"):
        return "this cuda-bindings has no cudaMemcpyBatchAsync: install cuda-bindings>=13"
    return ""


def _runtime() -> Any:
    from cuda.bindings import runtime

    return runtime
