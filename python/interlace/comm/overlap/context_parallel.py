"""Exact attention over sequences whose tokens are distributed to several ranks (Cornstarch 2025-11 sections 5.1 and
6.2).

Every rank has the queries, keys and values of its own tokens. Keys and values of all ranks are gathered, a few heads at
a time: the next heads are transferred during the attention of the current ones. The backward pass gathers them again,
which saves their memory. The gradients of the keys and values of one chunk of heads are sent to their owners while the
next chunk computes. Owners add them in float32 in rank order.

                       forward                                          backward
    transport   g0 g1      g2      g3                  g0 g1      g2  r0    g3  r1        r2      r3
    attention        a0        a1      a2     a3             b0        b1       b2     b3

Any TokenShards (`balance.distribute_tokens`) can assign tokens to ranks. Keys stay in gathered order, rank after rank:
a mask's positions are data, so neither keys nor results are reordered for attention.

One TokenShards is used for everything of a microbatch. Labels are shifted first, since a token's successor may be on
another rank:

    blocks = AttentionPlan.build(mask).row_blocks()                     # mask: BitfieldMask [B, T]
    shards = distribute_tokens(blocks, group.world, lengths=T)          # or method="zigzag", or a custom function
    plan = ContextParallelPlan.build(mask, shards, group.rank)          # used by every layer
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    tokens, positions = (shard(x, shards, group.rank) for x in (input_ids, position_ids))
    labels = shard(labels, shards, group.rank, pad=-100)
    ...
    out = context_parallel_attention(q, k, v, plan, shards, group=group)    # q [B, heads, tokens_per_rank, D] by layer
    ...
    loss = F.cross_entropy(logits.mT, labels, reduction="sum") / number_of_labels_of_all_ranks
    loss.backward()                                     # then add up the parameters' gradients over the ranks
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from interlace import _device
from interlace.attention import AttentionPlan
from interlace.attention.backend import accumulate_dtype
from interlace.attention.op import (
    cast_for_autocast,
    check_dtypes,
    check_options,
    check_shapes,
    run_backward,
    run_forward,
)
from interlace.balance import TokenShards
from interlace.comm.collectives.one_operation import as_one_operation
from interlace.comm.collectives.reverse_mode import check_reverse_mode
from interlace.comm.collectives.rows import reduce_in_order
from interlace.comm.collectives.shards import check_rank, check_ranks, shard_mask
from interlace.comm.process.agreement import (
    Arguments,
    Fingerprint,
    arguments_of,
    fingerprint_of_mask,
    fingerprint_of_shards,
)
from interlace.comm.process.groups import Group
from interlace.comm.process.trace import computing
from interlace.comm.transports.base import Ticket, Transport, swap
from interlace.comm.transports.choose import resolve
from interlace.masks import BitfieldMask

_NAME = "context_parallel_attention"  # prefix of its transfers in errors and traces
LEAST_BYTES = 1 << 20  # of keys and values per chunk and pair of ranks; smaller chunks are latency-bound
LEAST_ROWS = 16_384  # (query, head) rows per chunk on a GPU: one block of 128 for each of about 100 multiprocessors


@dataclass(frozen=True, eq=False)
class ContextParallelPlan:
    """Mask of a microbatch for one rank: its own rows against the keys of all ranks. See `build`.

    fingerprint: of the mask of the whole microbatch, which must be equal on all ranks; None with one rank.
    """

    shards: TokenShards
    rank: int
    plan: AttentionPlan
    fingerprint: Fingerprint | None

    @classmethod
    def build(
        cls,
        mask: BitfieldMask,
        shards: TokenShards,
        rank: int,
        *,
        block: int | None = None,
        cap: int | None = None,
        heads: int = 8,
        kv_heads: int | None = None,
    ) -> ContextParallelPlan:
        """Built once per microbatch for all layers, on the mask's device; no communication.

        Args:
            mask: [B, T], of the whole microbatch, equal on all ranks.
            shards: of these tokens.
            rank: this rank.
            block: tokens per block; default: shards.block if the kernels support it, else 128.
            cap, heads, kv_heads: see `AttentionPlan.build`; heads of one chunk.

        Raises:
            ValueError: mask and shards do not fit, a rank out of range, arguments that `AttentionPlan.build` rejects.
        """
        if not isinstance(mask, BitfieldMask):
            raise TypeError(f"mask must be a BitfieldMask, got {type(mask).__name__}")
        if block is None:
            block = shards.block if shards.block in (16, 32, 64) else 128
        rank = check_rank(shards, rank)
        rows, keys = shard_mask(mask, shards, rank), shard_mask(mask, shards)
        plan = AttentionPlan.build(rows, keys, block=block, cap=cap, heads=heads, kv_heads=kv_heads)
        return cls(shards, rank, plan, fingerprint_of_mask(mask) if shards.ranks > 1 else None)


@torch.compiler.disable
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BitfieldMask | ContextParallelPlan,
    shards: TokenShards,
    *,
    group: Group = None,
    heads_per_chunk: int | Literal["auto"] = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`bitfield_attention` of whole sequences; each rank has the tokens that `shards` assigns to it.

    Collective, forward and backward: all ranks call it with equal shapes, mask, shards and options, which are compared
    (`return_lse` and `backend` may differ). Results are bitwise reproducible for the same inputs, number of threads and
    heads per chunk.

    Args:
        q: [B, Hq, tokens_per_rank, D]. k: [B, Hkv, tokens_per_rank, D]. v: [B, Hkv, tokens_per_rank, Dv]. This rank's
            tokens in the order of `shards.tokens(rank)`, as `shard(x, shards, rank, dim=2)` returns them. The content
            of padding is ignored.
        mask: of the whole microbatch [B, T], or the result of `ContextParallelPlan.build`, which avoids building it in
            every layer.
        shards: of this microbatch.
        group: a Transport, ProcessGroup, DeviceMesh or None (see `interlace.comm.process.groups`).
        heads_per_chunk: number of key heads, with the query heads that share them, that are gathered and attended to at
            a time; need not divide Hkv. "auto": the smallest number with transfers of 1 MiB per peer that, on a GPU,
            fills it. Memory for two chunks is used: 2 * B * heads * padded_length * (D + Dv) numbers, in the backward
            pass three times as much.
        scale, softcap, return_lse, deterministic, backend: see `bitfield_attention`.

    Returns:
        out [B, Hq, tokens_per_rank, Dv] contiguous in q's dtype, or (out, lse [B, Hq, tokens_per_rank]). Rows of
        padding are 0.

    Raises:
        TypeError, ValueError: tensors, mask, shards and group do not fit each other, with the reason. CommError: a peer
            is lost or late, or its arguments differ.
    """
    check_shapes(q, k, v)
    check_reverse_mode(_NAME, q, k, v)
    if not isinstance(shards, TokenShards):
        raise TypeError(f"shards must be a TokenShards (balance.distribute_tokens), got {type(shards).__name__}")
    transport = resolve(group, q.device)
    check_ranks(shards, transport)
    expected = (len(shards.block_order), shards.tokens_per_rank)
    for name, tensor in (("q", q), ("k", k)):
        if (tensor.shape[0], tensor.shape[2]) != expected:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: batch {tensor.shape[0]} and {tensor.shape[2]} tokens, but "
                f"every rank of shards holds {expected[0]} sequences of {expected[1]} tokens (shard(x, shards, rank, "
                "dim=2))"
            )
    options = check_options(q, scale, softcap, deterministic, backend)
    q, k, v = cast_for_autocast(q, k, v)
    check_dtypes(q, k, v)
    chunks = _chunks(q, k, v, transport.world, heads_per_chunk)
    cp_plan = _plan(mask, shards, transport.rank, q, k, len(chunks))
    arguments = arguments_of(
        q.dtype, torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
        q=q.shape, k=k.shape, v=v.shape, shards=fingerprint_of_shards(shards), mask=cp_plan.fingerprint,
        scale=options[0], softcap=options[1], deterministic=options[2], chunks=len(chunks),
    )  # fmt: skip
    with transport.used_for(_NAME):
        out, lse = _ContextParallel.apply(q, k, v, _Job(transport, arguments, cp_plan.plan, chunks, *options))
    return (out, lse) if return_lse else out


def _plan(
    mask: BitfieldMask | ContextParallelPlan, shards: TokenShards, rank: int, q: Tensor, k: Tensor, chunks: int
) -> ContextParallelPlan:
    if isinstance(mask, BitfieldMask):
        heads, kv_heads = -(-q.shape[1] // chunks), -(-k.shape[1] // chunks)
        mask = ContextParallelPlan.build(mask, shards, rank, heads=heads, kv_heads=kv_heads)
    elif not isinstance(mask, ContextParallelPlan):
        raise TypeError(f"mask must be a BitfieldMask or a ContextParallelPlan, got {type(mask).__name__}")
    if mask.shards is not shards:
        raise ValueError("mask was built for other shards: use one TokenShards for all parts of a microbatch")
    if mask.rank != rank:
        raise ValueError(f"mask was built for rank {mask.rank}, but this is rank {rank} of the group")
    if mask.plan.device != q.device:
        raise ValueError(f"the mask is on {mask.plan.device} but q is on {q.device}: build it from mask.to(q.device)")
    return mask


def _chunks(q: Tensor, k: Tensor, v: Tensor, world: int, heads: int | str) -> list[slice]:
    """Ranges of key heads, of equal length except the last; the same on every rank."""
    total = k.shape[1]
    if heads == "auto":
        if world == 1:
            heads = total
        else:
            head_bytes = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
            heads = -(-LEAST_BYTES // head_bytes)
            if _device.on_gpu(k.device):
                heads = max(heads, -(-LEAST_ROWS * total // (q.shape[0] * q.shape[1] * q.shape[2])))
            heads = -(-total // -(-total // min(heads, total)))  # the same number of chunks, with even lengths
    elif isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise ValueError(f'heads_per_chunk must be a number of key heads >= 1, or "auto"; got {heads!r}')
    return [slice(first, min(first + heads, total)) for first in range(0, total, heads)]


@dataclass(frozen=True)
class _Job:
    """Shared data of the passes of one call."""

    transport: Transport
    arguments: Arguments
    plan: AttentionPlan
    chunks: list[slice]  # ranges of key heads
    scale: float
    softcap: float | None
    deterministic: bool
    backend: str

    def queries(self, chunk: slice, q: Tensor, k: Tensor) -> slice:
        """The query heads that share the key heads of `chunk`."""
        group = q.shape[1] // k.shape[1]
        return slice(chunk.start * group, chunk.stop * group)


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: _Job) -> tuple[Tensor, Tensor]:
        def compute() -> list[Tensor]:
            out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
            lse = torch.empty(q.shape[:3], dtype=accumulate_dtype(q.dtype), device=q.device)
            with torch.autocast(q.device.type, enabled=False):
                keys = _GatheredHeads(job, k, v)
                for number, chunk in enumerate(job.chunks):
                    rows = job.queries(chunk, q, k)
                    with keys.ready(number) as (k_all, v_all), computing(job.transport, f"attention, {_named(chunk)}"):
                        out[:, rows], lse[:, rows] = run_forward(
                            q[:, rows], k_all, v_all, job.plan, job.scale, job.softcap, job.backend
                        )
            return [out, lse]

        out, lse = as_one_operation(compute, q)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        in_use = job.transport.used_for(f"backward of {_NAME}")
        with in_use, torch.no_grad(), torch.autocast(job.transport.device.type, enabled=False):
            q, k, v, out, lse = ctx.saved_tensors
            # Other ranks may use an output that this rank does not: all ranks must join the collectives.
            dout = torch.zeros_like(out) if dout is None else dout.contiguous()
            grads = dq, dk, dv = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
            keys = _GatheredHeads(job, k, v)
            owners = _ScatteredGradients(job)
            for number, chunk in enumerate(job.chunks):
                rows = job.queries(chunk, q, k)
                with keys.ready(number) as (k_all, v_all), computing(job.transport, f"backward, {_named(chunk)}"):
                    dq[:, rows], *parts = run_backward(
                        dout[:, rows], None if dlse is None else dlse[:, rows], q[:, rows], k_all, v_all,
                        out[:, rows], lse[:, rows], job.plan, job.scale, job.softcap, job.deterministic, job.backend,
                        wide=True,
                    )  # fmt: skip
                owners.start(parts, (dk[:, chunk], dv[:, chunk]), _named(chunk))
            owners.finish()
        if torch.is_grad_enabled():  # create_graph=True
            grads = _NoSecondDerivative.apply(*(grad.requires_grad_() for grad in grads))
        return *grads, None


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("context_parallel_attention does not support second derivatives")


class _GatheredHeads:
    """Keys and values of all ranks, chunk by chunk, in two buffers: one is filled while the other is used.

    A buffer is refilled as soon as its chunk has been used, so two chunks are always in flight or in use.
    """

    BUFFERS = 2

    def __init__(self, job: _Job, k: Tensor, v: Tensor) -> None:
        self.transport, self.arguments, self.chunks = job.transport, job.arguments, job.chunks
        transport, chunks = self.transport, self.chunks
        self.sources = (k.contiguous(), v.contiguous())
        self.tickets: dict[int, Ticket] = {}
        if transport.world > 1:
            largest = max(chunk.stop - chunk.start for chunk in chunks)
            size = transport.world * sum(source[:, :largest].numel() for source in self.sources)
            self.buffers = [k.new_empty(size) for _ in range(min(self.BUFFERS, len(chunks)))]
            for number in range(len(self.buffers)):
                self._start(number)

    @contextmanager
    def ready(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A block in which chunk `number` may be used: (keys, values), each [B, heads, all tokens, D]. Call in
        order.
        """
        if self.transport.world == 1:
            keys, values = (source[:, self.chunks[number]] for source in self.sources)
            yield keys, values
            return
        self.tickets.pop(number).wait()
        start = time.perf_counter()
        keys, values = (part.flatten(2, 3) for part in self._buffer(number))
        yield keys, values
        if self.transport.trace is not None:
            self.transport.trace.add("read", self._name(number), start, time.perf_counter())
        if number + len(self.buffers) < len(self.chunks):
            self._start(number + len(self.buffers))

    def _start(self, number: int) -> None:
        transport, chunk = self.transport, self.chunks[number]
        start = time.perf_counter()
        own = [source[:, chunk] for source in self.sources]
        gathered = [destination.unbind(2) for destination in self._buffer(number)]
        for source, destination in zip(own, gathered):
            destination[transport.rank].copy_(source)
        trace = transport.trace
        filled = None if trace is None else lambda: trace.add("write", self._name(number), start, time.perf_counter())
        label = f"{_NAME}, gather of {_named(chunk)}"
        self.tickets[number] = swap(
            transport, lambda _: _pieces(*own), lambda peer: _pieces(*(part[peer] for part in gathered)),
            label, self.arguments, filled,
        )  # fmt: skip

    def _buffer(self, number: int) -> list[Tensor]:
        """k and v of a chunk, [B, heads, world, tokens, D or Dv]; every rank's tokens of a head are contiguous."""
        room, chunk, parts = self.buffers[number % len(self.buffers)], self.chunks[number], []
        for source in self.sources:
            batch, _, tokens, dim = source.shape
            shape = torch.Size((batch, chunk.stop - chunk.start, self.transport.world, tokens, dim))
            parts.append(room[: shape.numel()].view(shape))
            room = room[shape.numel() :]
        return parts

    def _name(self, number: int) -> str:
        return f"buffer {number % len(self.buffers)}, {_named(self.chunks[number])}"


class _ScatteredGradients:
    """Sends each rank its part of a chunk's dk and dv, and sums received parts, while the next chunk computes."""

    def __init__(self, job: _Job) -> None:
        self.transport, self.arguments = job.transport, job.arguments
        self.last: Ticket | None = None

    def start(self, parts: Sequence[Tensor], results: Sequence[Tensor], chunk: str) -> None:
        """parts: dk and dv of this rank's queries, [B, heads, all tokens, D or Dv], in the dtype of the sums.
        results: destination of the sums of this rank's tokens, [B, heads, tokens, D or Dv].
        """
        rank, world = self.transport.rank, self.transport.world
        if world == 1:
            for part, result in zip(parts, results):
                result.copy_(part)
            return
        by_rank = [part.unflatten(2, (world, -1)).unbind(2) for part in parts]
        received = [part.new_empty(world, *result.shape) for part, result in zip(parts, results)]
        for destination, part in zip(received, by_rank):
            destination[rank].copy_(part[rank])

        def add_up() -> None:
            for part, result in zip(received, results):
                reduce_in_order(part.unbind(), result)

        ticket = swap(
            self.transport, lambda peer: _pieces(*(part[peer] for part in by_rank)),
            lambda peer: _pieces(*(part[peer] for part in received)),
            f"{_NAME}, gradients of {chunk}", self.arguments, add_up,
        )  # fmt: skip
        self.finish()  # limits memory to the parts of two chunks
        self.last = ticket

    def finish(self) -> None:
        if self.last is not None:
            self.last.wait()
            self.last = None


def _pieces(*parts: Tensor) -> list[Tensor]:
    """The [tokens, D] slices of each [B, heads, tokens, D], which are contiguous even if the whole is not."""
    return [piece for part in parts for sequence in part.unbind() for piece in sequence.unbind()]


def _named(chunk: slice) -> str:
    return f"key heads {chunk.start}:{chunk.stop}"
