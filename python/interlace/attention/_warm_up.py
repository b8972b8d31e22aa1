"""warm_up: compiles the kernels of later attention calls, several at a time.

The launches are those of the backends, made from meta tensors. Later calls of this process find the kernels in memory.
Other processes find them in Triton's cache on disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from interlace.attention import gluon
from interlace.attention.backend import Attention
from interlace.attention.op import choose_backend
from interlace.attention.plan import AttentionPlan
from interlace.masks import BitfieldMask

if TYPE_CHECKING:
    from interlace.kernels.bitfield_launch import Call

log = logging.getLogger("interlace.attention")
LENGTH = 1024


def warm_up(
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float | None = None,
    device: torch.device | str = "cuda",
    backward: bool = True,
    backend: str | None = None,
    threads: int | None = None,
    progress: Callable[[str], object] = log.info,
) -> int:
    """Compile the GPU kernels for attention on such tensors, including those that build plans. Returns their number.

    q_heads, kv_heads, head_dim, value_dim (default: head_dim), dtype, softcap, backend: as in `bitfield_attention`; any
    softcap covers all values. Tensors are assumed to be laid out as in HuggingFace's models, [batch, tokens, heads,
    head_dim] transposed, with a number of tokens that is a multiple of 16. Other layouts may need further kernels,
    which are compiled at their first launch. backward: also for gradients, with deterministic=True.
    threads: number of kernels compiled at a time (default: one per core). progress: called with one line per kernel.

    Returns 0 at once if the backend has nothing to compile: on CPUs, and for the reference.
    """
    device, value_dim = torch.device(device), value_dim or head_dim
    with FakeTensorMode():
        q, v = (torch.empty(1, 1, 1, columns, dtype=dtype, device=device) for columns in (head_dim, value_dim))
        names = backend or choose_backend(q, v), backend or choose_backend(q, v, forward=False)
    if device.type == "cpu" or names[0] not in ("triton", "gluon"):
        return 0
    import triton

    from interlace.kernels.bitfield_launch import architecture_of, on_device

    def tensor(heads: int, columns: int) -> torch.Tensor:
        return torch.empty(1, LENGTH, heads, columns, dtype=dtype, device="meta").transpose(1, 2)

    tensors = (tensor(q_heads, head_dim), tensor(kv_heads, head_dim), tensor(kv_heads, value_dim))
    plan = AttentionPlan.build(BitfieldMask.causal(1, LENGTH), device="meta", cap=1)
    compiler = _Compiler(threads or os.cpu_count() or 1)
    with on_device(device), compiler, triton.AsyncCompileMode(compiler):
        job = Attention(*tensors, plan, 1.0, softcap)
        for call in [*plan_calls(plan), *_calls(*names, job, architecture_of(device), backward)]:
            call.kernel.warmup(grid=(1,), **call.arguments, **call.options)
        for number, _ in enumerate(as_completed(compiler.pending), 1):
            progress(f"compiling attention kernels {number}/{len(compiler.pending)}")
    return len(compiler.pending)


class _Compiler(ThreadPoolExecutor):
    """Threads that compile; Triton and LLVM release Python's lock. pending: one future per kernel."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="attention-kernels")
        self.pending: list[Future[Any]] = []

    def submit(self, *arguments: Any, **options: Any) -> Future[Any]:
        self.pending.append(super().submit(*arguments, **options))
        return self.pending[-1]


def plan_calls(plan: AttentionPlan) -> Iterator[Call]:
    """The launches that build a plan like `plan`, a plan on meta."""
    from interlace.kernels.bitfield_plan import class_calls, document_calls, list_calls, map_calls

    classes = torch.empty(plan.batch, plan.q_blocks, plan.k_blocks, dtype=torch.int8, device="meta")
    lists = plan.tensors()[:8]
    tokens, sizes = (plan.queries(), plan.keys()), (plan.sinks, plan.block)
    yield from class_calls(*tokens, *sizes, classes)
    yield from list_calls(classes, lists[0::2], lists[1::2])
    yield from document_calls(*tokens, *sizes, lists, (plan.q_doc, plan.k_doc))
    for side, maps in enumerate((plan.part_q_map, plan.part_k_map)):
        yield from map_calls(*tokens, *sizes, lists[4 * side + 2], lists[4 * side + 3], maps, side == 0)


def _calls(forward: str, backward: str, job: Attention, architecture: int, gradients: bool) -> Iterator[Call]:
    """The launches of attention forward and backward on meta tensors by the named backends."""
    from interlace.kernels.bitfield_launch import backward_calls, forward_calls

    q, k, v, plan, scale, softcap = job
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device="meta")
    lse = torch.empty(q.shape[:3], device="meta")
    if forward == "gluon":
        from interlace.kernels.bitfield_gluon_launch import gluon_forward_calls

        yield from gluon_forward_calls(q, k, v, plan, out, lse, scale, softcap)
    else:
        yield from forward_calls(q, k, v, plan, out, lse, scale, softcap, architecture)
    if not gradients:
        return
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (q, k, v))
    if backward == "gluon" and gluon.unsupported_backward(job) is None:
        from interlace.kernels.bitfield_gluon_backward_launch import gluon_backward_calls

        yield from gluon_backward_calls(out, None, q, k, v, out, lse, plan, dq, dk, dv, scale)
    else:
        yield from backward_calls(out, None, q, k, v, out, lse, plan, dq, dk, dv, scale, softcap, architecture)
