"""Matrix products of tensor parallelism with overlapped communication (DistTrain section 7, StepCCL).

    gathered, (q, k, v) = all_gather_matmul(x, [wq, wk, wv])      # x: this rank's rows; w: this rank's columns
    y = matmul_reduce_scatter(z, wo)                              # z: all rows; y: this rank's rows of the sum

Each is the backward of the other. The gradient of a gather is a reduce-scatter, chunk by chunk, under the products that
compute it. The last transfer and the remap run under the product of the weight gradient. `tiles` describes the order.

Chunking depends on shapes alone, so all ranks compute the same:

    num_chunks  "auto" takes chunks of at least 1 MiB per pair of ranks (copy engines reach 46 GB/s at 64 KiB and 82 at
                1 MiB) and 1024 rows over all ranks, so that a product of one is no slower per row; at most 8. Below
                2048 rows that is 1: then gather, product and reduce-scatter run one after another.
    layout      "auto" is "direct" from 128 rows of a rank in a chunk on, below that "remap" (see `tiles`). Processor
                time of 4 ranks on a CPU, K = N = 512: "direct" takes 0.74 to 0.91 of "remap" at 512 rows, 0.87 to 1.13
                at 128, and up to 1.8 times as much at 16 rows and 4 leading positions. Not measured on a GPU, where 128
                rows are a tile of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interlace.comm.collectives.one_operation import as_one_operation
from interlace.comm.collectives.reverse_mode import check_reverse_mode
from interlace.comm.overlap.deferred import Deferral, DeferredWeights, deferred_linear
from interlace.comm.overlap.tiles import Chunking, gather_products, scatter_products
from interlace.comm.process.agreement import arguments_of
from interlace.comm.process.groups import Group
from interlace.comm.process.trace import computing
from interlace.comm.transports.base import Transport, swap
from interlace.comm.transports.choose import resolve

Layout = Literal["auto", "direct", "remap"]

CHUNK_BYTES = 1 << 20  # minimum from one rank to another
CHUNK_ROWS = 1024  # minimum over all ranks
MAX_CHUNKS = 8
DIRECT_ROWS = 128  # per rank in a chunk; from here on strided products cost less than a copy


@torch.compiler.disable
def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    *,
    group: Group = None,
    num_chunks: int | Literal["auto"] = "auto",
    layout: Layout = "auto",
    regather: bool = False,
    deferral: Deferral | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The rows of all ranks and their products with this rank's weights: (gathered, [gathered @ w.T for each w]).

    Args:
        x: [..., m, K], of one shape on all ranks; any strides. Its gradient is the sum over ranks.
        weights: [N, K] each, with x's dtype and device; N may differ between weights and ranks. Gradients are local.
        group: a Transport, ProcessGroup, DeviceMesh or None (see `interlace.comm.process.groups`).
        num_chunks: number of pieces into which the m rows are cut; 1 means no overlap.
        layout: of a chunk, "direct" or "remap".
        regather: keep x for the backward pass instead of `gathered`, which is `world` times as large. Backward gathers
            x again under the products of the input gradient.
        deferral: collects the gradients of weights, see `interlace.comm.overlap.deferred`. Backward then has no product
            to hide its last transfer and remap.

    All ranks must agree on whether x requires a gradient, and with `regather` on whether any weight does: backward
    communicates then. Under autocast, x and weights are cast as for torch.matmul. The gradient cannot be differentiated
    again.

    Returns:
        gathered [..., world * m, K], in rank order, and a list of [..., world * m, N]. With one rank gathered is x.

    Raises:
        ValueError: shapes, dtypes or devices do not fit. CommError: a peer is lost, late, or passes another shape.
    """
    if x.dim() < 2:
        raise ValueError(f"all_gather_matmul: x must be [..., m, K], got {list(x.shape)}")
    if isinstance(weights, Tensor):
        raise ValueError("all_gather_matmul: weights must be a list of tensors: pass [weight]")
    for weight in weights:
        _check("all_gather_matmul", x, weight)
    originals, weights = weights, list(weights)
    transport = resolve(group, x.device)
    x, *weights = cast_operands(x, *weights)
    if transport.world == 1:
        return x, [deferred_linear(x, weight, None, deferral) for weight in originals]
    check_reverse_mode("all_gather_matmul", x, *weights)
    leading, (rows, width) = x.shape[:-2], x.shape[-2:]
    x = x.reshape(leading.numel(), rows, width)
    grad_enabled = torch.is_grad_enabled()
    kept_for = (
        "with gradients of weights" if grad_enabled and any(weight.requires_grad for weight in weights) else "alone"
    )
    chunking = chunking_of(
        "all_gather_matmul", x, transport, num_chunks, layout, x.shape, grad_enabled and x.requires_grad,
        x=torch.Size((*leading, rows, width)), regather=kept_for if regather else False,
    )  # fmt: skip
    deferred = DeferredWeights(deferral, originals)
    operands = deferred.operands(weights)
    with transport.used_for(chunking.label):
        gathered, *products = _AllGatherMatmul.apply(
            x, transport, chunking, regather, deferred, deferred.anchor, *operands
        )
    total = transport.world * rows
    return gathered.view(*leading, total, width), [p.view(*leading, total, p.shape[-1]) for p in products]


@torch.compiler.disable
def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    *,
    group: Group = None,
    num_chunks: int | Literal["auto"] = "auto",
    layout: Layout = "auto",
    deferral: Deferral | None = None,
) -> Tensor:
    """This rank's rows of the sum over ranks of x @ weight.T, added in float32 in rank order.

    Args:
        x: [..., world * m, K], the rows for all ranks, in rank order; K may differ between ranks. Any strides.
        weight: [N, K], with x's dtype and device. Both gradients are local.

    Other arguments and errors as for `all_gather_matmul`. All ranks must agree on whether x or weight requires a
    gradient.

    Returns:
        [..., m, N].
    """
    if x.dim() < 2:
        raise ValueError(f"matmul_reduce_scatter: x must be [..., rows, K], got {list(x.shape)}")
    _check("matmul_reduce_scatter", x, weight)
    original = weight
    x, weight = cast_operands(x, weight)
    transport = resolve(group, x.device)
    leading, (total, width), world = x.shape[:-2], x.shape[-2:], transport.world
    if world == 1:
        return deferred_linear(x, original, None, deferral)
    check_reverse_mode("matmul_reduce_scatter", x, weight)
    if total % world:
        raise ValueError(
            f"matmul_reduce_scatter: {total} rows are not divisible by {world} ranks: pad the sequence to a multiple"
        )
    x = x.reshape(leading.numel(), world, total // world, width)
    shape = torch.Size((leading.numel(), total // world, weight.shape[0]))
    result = torch.Size((*leading, *shape[1:]))
    backward = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    chunking = chunking_of("matmul_reduce_scatter", x, transport, num_chunks, layout, shape, backward, result=result)
    deferred = DeferredWeights(deferral, [original])
    (operand,) = deferred.operands([weight])
    with transport.used_for(chunking.label):
        return _MatmulReduceScatter.apply(x, transport, chunking, deferred, deferred.anchor, operand).view(result)


def chunks_for(rows: int, row_bytes: int, batch: int, world: int) -> int:
    """The value of num_chunks="auto": one rule for every operation and device.

    Args:
        rows: of one rank in one of the `batch` leading positions.
        row_bytes: of one row in transit.
    """
    by_bytes = batch * rows * row_bytes // CHUNK_BYTES
    by_rows = world * batch * rows // CHUNK_ROWS
    return max(1, min(MAX_CHUNKS, rows, by_bytes, by_rows))


def chunking_of(
    name: str, like: Tensor, transport: Transport, num_chunks: int | str, layout: str, shape: torch.Size,
    backward: bool, **options: object,
) -> Chunking:  # fmt: skip
    """Chunking of a transfer of `shape` [B, m, columns] from one rank to another. Ranks must agree on `options` too."""
    batch, rows, columns = shape
    if num_chunks == "auto":
        chunks = chunks_for(rows, columns * like.element_size(), batch, transport.world)
    elif isinstance(num_chunks, int) and not isinstance(num_chunks, bool) and num_chunks >= 1:
        chunks = max(1, min(num_chunks, rows))
    else:
        raise ValueError(f'{name}: num_chunks must be "auto" or at least 1, got {num_chunks!r}')
    if layout not in ("auto", "direct", "remap"):
        raise ValueError(f'{name}: layout must be "auto", "direct" or "remap", got {layout!r}')
    direct = rows >= DIRECT_ROWS * chunks if layout == "auto" else layout == "direct"
    chosen_layout = "direct" if direct else "remap"
    return Chunking(
        chunks, direct, name, arguments_of(like.dtype, backward, chunks=chunks, layout=chosen_layout, **options)
    )


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, transport: Transport, chunking: Chunking, regather: bool, deferred: DeferredWeights,
        anchor: Tensor | None, *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """x [B, m, K] -> gathered [B, W, m, K], products [B, W, m, N]. deferred: weights with deferred gradients."""
        x = x.contiguous()

        def compute() -> list[Tensor]:
            result = gather_products(transport, x, [weight.t() for weight in weights], chunking)
            result.wait_rows()
            result.wait()
            return [result.rows, *result.products]

        gathered, *products = as_one_operation(compute, x)
        ctx.transport, ctx.chunking, ctx.regather, ctx.deferred = transport, chunking, regather, deferred
        needed = any(ctx.needs_input_grad[5:])  # of the anchor or a weight
        kept = (x if regather else gathered,) if needed else ()
        ctx.save_for_backward(*weights, *kept)
        ctx.set_materialize_grads(False)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(gathered)
        return gathered, *products

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: Tensor | None, *d_products: Tensor | None) -> tuple[Tensor | None, ...]:
        transport, chunking = ctx.transport, _backward_of(ctx.chunking)
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        saved = ctx.saved_tensors  # read once: under activation checkpointing every access unpacks again
        weights, kept_rows = saved[: len(needs_weights)], saved[len(needs_weights) :]
        grads = [None if grad is None else grad.contiguous() for grad in d_products]
        d_weights: list[Tensor | None] = [None] * len(weights)

        def gathered_rows() -> Tensor:
            return kept_rows[0] if regather is None else regather.wait()

        def weight_gradients() -> None:
            rows = gathered_rows()
            with computing(transport, f"{chunking.label}, weight gradient"):
                for i, grad in enumerate(grads):
                    if needs_weights[i] and grad is not None:
                        d_weights[i] = weight_gradient(grad, rows)

        d_x = None
        with transport.used_for(chunking.label):
            regather = _Regather(transport, kept_rows[0], chunking) if kept_rows and ctx.regather else None
            if needs_x:
                like = next(grad for grad in (d_gathered, *grads) if grad is not None)
                batch, _, rows, _ = like.shape
                width = weights[0].shape[1] if weights else like.shape[3]
                d_x = like.new_empty(batch, rows, width)
                terms = [(grad, weight) for grad, weight in zip(grads, weights) if grad is not None]
                meanwhile = weight_gradients if any(needs_weights) else None
                scatter_products(transport, terms, d_gathered, d_x, chunking, meanwhile)
            elif any(needs_weights):
                weight_gradients()
            for index, (weight, grad) in enumerate(zip(ctx.deferred.weights, grads, strict=True)):
                if weight is not None and grad is not None:
                    ctx.deferred.add(index, partial(weight_gradient, grad, gathered_rows()))
        return d_x, None, None, None, None, None, *d_weights


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        transport: Transport,
        chunking: Chunking,
        deferred: DeferredWeights,
        anchor: Tensor | None,
        weight: Tensor,
    ) -> Tensor:
        """x [B, W, m, K], weight [N, K] -> [B, m, N]. deferred: whether the weight's gradient is deferred."""
        batch, _, rows, _ = x.shape
        x = x.contiguous()

        def compute() -> list[Tensor]:
            y = x.new_empty(batch, rows, weight.shape[0])
            scatter_products(transport, [(x, weight.t())], None, y, chunking)
            return [y]

        (y,) = as_one_operation(compute, x)
        ctx.transport, ctx.chunking, ctx.deferred = transport, chunking, deferred
        ctx.save_for_backward(weight, x if any(ctx.needs_input_grad[4:]) else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        transport, chunking = ctx.transport, _backward_of(ctx.chunking)
        weight, x = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
        matrices = [weight] if needs_x else []
        d_weight = None
        with transport.used_for(chunking.label):
            result = gather_products(transport, d_y.contiguous(), matrices, chunking)
            if needs_weight:
                result.wait_rows()
                # The remap of the last products may still run concurrently.
                with computing(transport, f"{chunking.label}, weight gradient"):
                    d_weight = weight_gradient(result.rows, x)
            elif ctx.deferred.anchor is not None:
                result.wait_rows()
                ctx.deferred.add(0, partial(weight_gradient, result.rows, x))
            result.wait()
        return result.products[0] if needs_x else None, None, None, None, None, d_weight


class _Regather:
    """The gather of x [B, m, K] that runs while the input gradient is computed."""

    def __init__(self, transport: Transport, x: Tensor, chunking: Chunking) -> None:
        self._rows = rows = x.new_empty(x.shape[0], transport.world, *x.shape[1:])
        label = f"{chunking.label}, gather again"
        self._ticket = swap(
            transport, lambda _: x.unbind(), lambda peer: rows[:, peer].unbind(), label, chunking.arguments
        )
        rows[:, transport.rank].copy_(x)

    def wait(self) -> Tensor:
        self._ticket.wait()
        return self._rows


def weight_gradient(grad: Tensor, rows: Tensor) -> Tensor:
    """[N, K] = grad [..., N].T @ rows [..., K], both contiguous."""
    # With `out`, so that an autocast region around backward does not change dtypes.
    result = grad.new_empty(grad.shape[-1], rows.shape[-1])
    return torch.mm(grad.flatten(0, -2).t(), rows.flatten(0, -2), out=result)


def _backward_of(chunking: Chunking) -> Chunking:
    return chunking._replace(label=f"backward of {chunking.label}")


def cast_operands(*tensors: Tensor) -> list[Tensor]:
    """The operands of a matrix product, cast as torch.matmul casts them: to the dtype of an autocast region."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]


def _check(name: str, x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"{name}: a weight must be [N, {x.shape[-1]}] for x {list(x.shape)}, got {list(weight.shape)}")
    if weight.device != x.device:
        raise ValueError(f"{name}: a weight is on {weight.device}, but x is on {x.device}: move one of them")
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"{name}: a weight is {weight.dtype}, but x is {x.dtype}: cast one of them, or use torch.autocast"
        )
