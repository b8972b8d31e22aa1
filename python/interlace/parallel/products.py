"""Products of whole rows with sharded weights; sums over ranks overlap with the products.

    forward                                              backward
    copied_products   x @ w.T of each weight, local      x's gradient summed over ranks, under weight gradients
    sum_of_products   x @ w.T, summed over ranks         gradient of the product, local

For tensor parallelism without sequence parallelism: every rank holds all rows, and sums are all-reduces. Rows are cut
into chunks. While the sum of one chunk is in flight, the products of the next are computed. In the backward pass the
weight gradients hide the last sum. In the forward pass nothing hides it, so C chunks hide 1 - 1/C at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from interlace.comm.collectives.one_operation import as_one_operation
from interlace.comm.collectives.reverse_mode import check_reverse_mode
from interlace.comm.overlap.deferred import Deferral, DeferredWeights, deferred_linear
from interlace.comm.overlap.matmul import cast_operands, chunking_of, weight_gradient
from interlace.comm.overlap.tiles import Chunking, sum_products
from interlace.comm.process.trace import computing
from interlace.comm.transports.base import Transport
from interlace.parallel.mappings import Ranks


@torch.compiler.disable
def copied_products(
    x: Tensor,
    weights: Sequence[Tensor],
    ranks: Ranks,
    num_chunks: int | Literal["auto"] = "auto",
    deferral: Deferral | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """(x, [x @ w.T for each w]). x is equal on all ranks, and its gradient is the sum over ranks.

    x [..., K]; weights [N, K] each, N may differ between weights and ranks; their gradients are local. Under autocast
    all are cast as for torch.matmul, including the returned x. num_chunks, deferral: as for `all_gather_matmul`.

    All ranks must agree on whether x requires a gradient.
    """
    if ranks.world == 1:
        return x, [deferred_linear(x, weight, None, deferral) for weight in weights]
    check_reverse_mode("copied_products", x, *weights)
    originals = weights
    x, *weights = cast_operands(x, *weights)
    transport = ranks.transport(x)
    chunking = _chunking("copied_products", x, x.shape, transport, num_chunks)
    deferred = DeferredWeights(deferral, originals)
    rows, *products = _CopiedProducts.apply(
        x, transport, chunking, deferred, deferred.anchor, *deferred.operands(weights)
    )
    return rows, products


@torch.compiler.disable
def sum_of_products(
    x: Tensor,
    weight: Tensor,
    ranks: Ranks,
    num_chunks: int | Literal["auto"] = "auto",
    deferral: Deferral | None = None,
) -> Tensor:
    """The sum over ranks of x [..., K] @ weight [N, K].T, bitwise identical on every rank: [..., N].

    One autograd function, so that selective activation checkpointing keeps the sum and not also the product. Under
    autocast x and weight are cast as for torch.matmul. num_chunks, deferral: as for `matmul_reduce_scatter`.
    """
    if ranks.world == 1:
        return deferred_linear(x, weight, None, deferral)
    check_reverse_mode("sum_of_products", x, weight)
    original = weight
    x, weight = cast_operands(x, weight)
    transport = ranks.transport(x)
    shape = torch.Size((*x.shape[:-1], len(weight)))
    chunking = _chunking("sum_of_products", x, shape, transport, num_chunks)
    deferred = DeferredWeights(deferral, [original])
    (operand,) = deferred.operands([weight])
    with transport.used_for(chunking.label):
        return _SumOfProducts.apply(  # type: ignore[no-any-return]
            x, operand, transport, chunking, deferred, deferred.anchor
        )


def _chunking(
    name: str, like: Tensor, summed: torch.Size, transport: Transport, num_chunks: int | Literal["auto"]
) -> Chunking:
    """Chunking of a sum over ranks of rows [..., columns], as if each rank sent the others its share of the rows."""
    rows = summed[:-1].numel()
    share = torch.Size((1, rows // transport.world, summed[-1]))
    return chunking_of(name, like, transport, num_chunks, "direct", share, False, summed=summed)


class _CopiedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        transport: Transport,
        chunking: Chunking,
        deferred: DeferredWeights,
        anchor: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        """deferred: the weights whose gradients are deferred."""
        ctx.transport, ctx.chunking, ctx.deferred = transport, chunking, deferred
        ctx.save_for_backward(*weights, *((x,) if any(ctx.needs_input_grad[4:]) else ()))
        ctx.set_materialize_grads(False)
        rows = x.view_as(x)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(rows)
        return rows, *(linear(x, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor | None, *d_products: Tensor | None) -> tuple[Tensor | None, ...]:
        transport, chunking = ctx.transport, ctx.chunking._replace(label=f"backward of {ctx.chunking.label}")
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        saved = ctx.saved_tensors  # read once: under activation checkpointing every access unpacks again
        weights, kept_x = saved[: len(needs_weights)], saved[len(needs_weights) :]
        grads = [None if grad is None else _rows(grad) for grad in d_products]
        d_weights: list[Tensor | None] = [None] * len(weights)

        def weight_gradients() -> None:
            for index, (weight, grad) in enumerate(zip(ctx.deferred.weights, grads, strict=True)):
                if weight is not None and grad is not None:
                    ctx.deferred.add(index, partial(weight_gradient, grad, _rows(kept_x[0])))
            with computing(transport, f"{chunking.label}, weight gradient"):
                for i, grad in enumerate(grads):
                    if needs_weights[i] and grad is not None:
                        d_weights[i] = weight_gradient(grad, _rows(kept_x[0]))

        if not needs_x:
            weight_gradients()
            return None, None, None, None, None, *d_weights
        like = next(grad for grad in (d_rows, *d_products) if grad is not None)
        d_x = like.new_empty(*like.shape[:-1], weights[0].shape[1])
        terms = [(grad, weight) for grad, weight in zip(grads, weights) if grad is not None]
        with transport.used_for(chunking.label):
            sum_products(
                transport, terms, None if d_rows is None else _rows(d_rows), _rows(d_x), chunking, weight_gradients
            )
        return d_x, None, None, None, None, *d_weights


class _SumOfProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        transport: Transport,
        chunking: Chunking,
        deferred: DeferredWeights,
        anchor: Tensor | None,
    ) -> Tensor:
        """deferred: whether the weight's gradient is deferred."""
        needs_x, *of_weight = ctx.needs_input_grad
        ctx.deferred = deferred
        ctx.save_for_backward(x if any(of_weight) else None, weight if needs_x else None)

        def compute() -> list[Tensor]:
            y = x.new_empty(*x.shape[:-1], len(weight))
            sum_products(transport, [(_rows(x), weight.t())], None, _rows(y), chunking)
            return [y]

        return as_one_operation(compute, x)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            d_x = None if weight is None else grad @ weight
            d_weight = None
            if ctx.deferred.anchor is not None:
                ctx.deferred.add(0, partial(weight_gradient, _rows(grad), _rows(x)))
            elif x is not None:
                d_weight = _rows(grad).t() @ _rows(x)
        return d_x, d_weight, None, None, None, None


def _rows(tensor: Tensor) -> Tensor:
    """[..., columns] -> [n, columns], contiguous. A view if the tensor is contiguous already."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()
