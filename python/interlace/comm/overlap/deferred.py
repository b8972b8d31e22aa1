"""Deferred weight gradients: BACKWARD_INPUT computes all other gradients, BACKWARD_WEIGHT these.

    deferral = Deferral()
    y = deferred_linear(x, weight, bias, deferral)       # or all_gather_matmul(x, weights, deferral=deferral) ...
    with deferral.begin() as gradients:
        y.backward(dy)                                   # x.grad and bias.grad, no weight.grad
    gradients.compute()                                  # weight.grad

The gradient of a product's weight needs only the product's input and the gradient of its output. These two are kept,
and the first half frees the graph. Under activation checkpointing a layer is then recomputed once. Halves of a graph
would recompute it for each half and parameter. The halves are those of Zero Bubble (arXiv 2401.10241, section 2).
Products and the order of sums are autograd's own, so the bits are identical.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from interlace.comm.collectives.reverse_mode import check_reverse_mode


class DeferredGradients:
    """Weight gradients deferred by one backward."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[nn.Parameter, list[Callable[[], Tensor]]]] = {}  # in backward order

    def add(self, weight: nn.Parameter, product: Callable[[], Tensor]) -> None:
        """Adds `product()`, in any dtype, to the gradient of `weight` later."""
        self._of.setdefault(id(weight), (weight, []))[1].append(product)

    def __len__(self) -> int:
        """Number of weights with a deferred gradient."""
        return len(self._of)

    def operands(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each weight with each tensor kept for it."""
        for weight, products in self._of.values():
            for product in products:
                of_product: Any = product
                yield from ((weight, operand) for operand in of_product.args if isinstance(operand, Tensor))

    @torch.no_grad()
    def compute(self, weights: Collection[nn.Parameter] | None = None) -> None:
        """Add the gradients of `weights` (None: of all weights here) to their `.grad`, and free the kept tensors."""
        for key in list(self._of) if weights is None else [id(weight) for weight in weights]:
            if key in self._of:
                weight, products = self._of.pop(key)
                _add(weight, _sum(products, weight.dtype))


def _sum(products: list[Callable[[], Tensor]], dtype: torch.dtype) -> Tensor:
    """Sums as autograd does for one weight in one backward. Each product is freed once it is added."""
    products.reverse()
    total = products.pop()().to(dtype)
    while products:
        total = total + products.pop()().to(dtype)
    return total


def _add(weight: nn.Parameter, gradient: Tensor) -> None:
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        torch.autograd.backward([weight], [gradient])  # runs the hooks
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


class Deferral:
    """Collects deferred weight gradients of a stage's products during the current backward."""

    def __init__(self, weights: Collection[int] | None = None) -> None:
        """weights: ids of the weights whose gradients are deferred; None: any."""
        self._weights = weights
        self._active: DeferredGradients | None = None

    @contextmanager
    def begin(self) -> Iterator[DeferredGradients]:
        """Block in which a backward runs. Yields the gradients that it defers."""
        self._active = gradients = DeferredGradients()
        try:
            yield gradients
        finally:
            self._active = None

    def takes(self, weight: Tensor) -> bool:
        """True if the gradient of `weight` can be deferred: it requires one, and is a trained leaf parameter."""
        if self._weights is not None and id(weight) not in self._weights:
            return False
        return isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()

    def defer(self, weight: nn.Parameter, product: Callable[[], Tensor]) -> None:
        """See `DeferredGradients.add`."""
        if self._active is None:
            raise RuntimeError("the forward deferred its weight gradients: run its backward inside Deferral.begin()")
        self._active.add(weight, product)


class DeferredWeights:
    """Weights of a product whose gradients are deferred, for the autograd function of that product.

    weights: the deferred weights, None in place of others.
    anchor: an extra argument that ensures a backward of the function's result; None if no weight is deferred.

    The weights themselves must not be arguments: their hooks would be called in the first half, without a gradient.
    """

    def __init__(self, deferral: Deferral | None, weights: Sequence[Tensor]) -> None:
        self.weights = [w if deferral is not None and deferral.takes(w) else None for w in weights]
        self._deferral = deferral
        self.anchor = torch.empty(0, requires_grad=True) if any(w is not None for w in self.weights) else None

    def operands(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Arguments of the function for the weights, derived from the multiplied operands (`cast_operands`)."""
        return [operand if w is None else operand.detach() for operand, w in zip(weights, self.weights, strict=True)]

    def add(self, index: int, product: Callable[[], Tensor]) -> None:
        """`product()`, in any dtype, is the gradient of weight number `index`."""
        weight = self.weights[index]
        assert isinstance(weight, nn.Parameter) and self._deferral is not None
        self._deferral.defer(weight, product)


def deferred_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral | None, *, by: str = "out"
) -> Tensor:
    """x [..., K] @ weight.T + bias: [..., N]. The weight gradient is deferred if possible.

    weight: [N, K], or with by="in" [K, N] (transformers' Conv1D). bias: [N] or None; its gradient is not deferred.
    deferral: None for a plain product.
    """
    if deferral is None and by == "out":
        return linear(x, weight, bias)
    if deferral is None or not deferral.takes(weight) or weight.dim() != 2 or x.dim() < 2:
        return _product(x, weight, bias, by)
    check_reverse_mode("deferred_linear", x, weight)
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    deferred = DeferredWeights(deferral, [weight])
    operand = weight.detach()
    saved = _Saved.apply(deferred.anchor, [x.detach(), operand if x.requires_grad else None])
    y: Tensor = _DeferredLinear.apply(x, operand, bias, deferred, saved, by)
    return y


class DeferredForward:
    """Replaces the forward of a linear layer while weight gradients are deferred. by: see `deferred_linear`."""

    def __init__(self, layer: nn.Module, deferral: Deferral, by: str) -> None:
        self._layer, self._deferral, self._by = layer, deferral, by

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        assert isinstance(weight, Tensor) and not isinstance(bias, nn.Module)
        return deferred_linear(input, weight, bias, self._deferral, by=self._by)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, by: str) -> Tensor:
    if by == "in":
        rows = x.reshape(-1, x.shape[-1])
        y = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
        return y.view(*x.shape[:-1], weight.shape[1])
    if torch.is_grad_enabled() or x.dim() == 2 or x.is_contiguous():
        return linear(x, weight, bias)
    # For non-contiguous rows `linear` makes one product if the weight is trained, and several otherwise.
    y = torch.mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y.add_(bias.to(y.dtype))


class _Saved(torch.autograd.Function):
    """Saves tensors for the function that gets its result as an argument.

    An autograd function saves at the end of its forward. Activation checkpointing stops a recomputation at the last
    saved tensor, so a layer's last product would be recomputed unnecessarily: one of the three products of a gated MLP.
    Torch's own operations save first, and so does this function.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor | None]) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        return None, None


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredWeights, saved: Tensor, by: str
    ) -> Tensor:
        ctx.saved, ctx.deferred, ctx.by = saved.grad_fn, deferred, by
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _product(x, weight, bias, by)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved.saved_tensors  # read once: under activation checkpointing every access unpacks again
        with torch.autocast(gradient.device.type, enabled=False):
            grad, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
            d_x = d_bias = None
            if weight is not None:
                factor = weight.to(grad.dtype)
                d_x = _like(rows, grad, factor if ctx.by == "out" else factor.t()).reshape(x.shape)
            if ctx.needs_input_grad[2]:
                d_bias = grad.sum(0).to(ctx.bias_dtype)
            ctx.deferred.add(0, partial(_weight_gradient, grad, rows, ctx.by))
        return d_x, None, d_bias, None, None, None


def _like(rows: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """left @ right, computed as autograd computes the gradient of `rows`: same transposition, for identical bits."""
    if rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]:
        return right.t().mm(left.t()).t()
    return left.mm(right)


def _weight_gradient(grad: Tensor, rows: Tensor, by: str) -> Tensor:
    """Gradient of a weight [N, K], or [K, N] for by="in", from grad [n, N] and rows [n, K]."""
    with torch.autocast(grad.device.type, enabled=False):
        return grad.t().mm(rows) if by == "out" else rows.t().mm(grad)
