"""Gradients of weights that a backward puts off: BACKWARD_INPUT makes all others, BACKWARD_WEIGHT these.

    deferral = Deferral()
    y = deferred_linear(x, weight, bias, deferral)       # or all_gather_matmul(x, weights, deferral=deferral) ...
    with deferral.begin() as gradients:
        y.backward(dy)                                   # x.grad and bias.grad, no weight.grad
    gradients.compute()                                  # weight.grad

The gradient of a product's weight needs the product's input and the gradient of its output, nothing else of the graph.
So these two are kept, the graph is freed by the first half, and under activation checkpointing a layer is recomputed
once, where halves of a graph recompute it for each half and parameter. The halves are those of Zero Bubble (arXiv
2401.10241, section 2). Products, and the order of sums, are autograd's own: the bits are the same.
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

from interlace.comm.reverse_mode import check_reverse_mode


class DeferredGradients:
    """Gradients of weights that one backward has put off."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[nn.Parameter, list[Callable[[], Tensor]]]] = {}  # in the order of the backward

    def add(self, weight: nn.Parameter, product: Callable[[], Tensor]) -> None:
        """`product()`, in any dtype, is to be added to the gradient of `weight`."""
        self._of.setdefault(id(weight), (weight, []))[1].append(product)

    def __len__(self) -> int:
        """How many weights have a gradient here."""
        return len(self._of)

    @property
    def nbytes(self) -> int:
        """What is kept for them, each storage counted once."""
        storages = [operand.untyped_storage() for _, operand in self.operands()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def operands(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each weight with each tensor that is kept for it."""
        for weight, products in self._of.values():
            for product in products:
                of_product: Any = product
                yield from ((weight, given) for given in of_product.args if isinstance(given, Tensor))

    @torch.no_grad()
    def compute(self, weights: Collection[nn.Parameter] | None = None) -> None:
        """Add the gradients of `weights` (None: of all that are here) to their `.grad`, and forget what they needed."""
        for key in list(self._of) if weights is None else [id(weight) for weight in weights]:
            if key in self._of:
                weight, products = self._of.pop(key)
                _add(weight, _sum(products, weight.dtype))


def _sum(products: list[Callable[[], Tensor]], dtype: torch.dtype) -> Tensor:
    """As autograd sums what it finds for one weight in one backward. Each product is freed when it is in the sum."""
    products.reverse()
    total = products.pop()().to(dtype)
    while products:
        total = total + products.pop()().to(dtype)
    return total


def _add(weight: nn.Parameter, gradient: Tensor) -> None:
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        torch.autograd.backward([weight], [gradient])  # runs them
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


class Deferral:
    """Takes what products of a stage put off, for the backward that is under way."""

    def __init__(self, weights: Collection[int] | None = None) -> None:
        """weights: ids of those whose gradients it takes; None: of any."""
        self._weights = weights
        self._now: DeferredGradients | None = None

    @contextmanager
    def begin(self) -> Iterator[DeferredGradients]:
        """Inside, a backward runs; what it puts off is in the result."""
        self._now = found = DeferredGradients()
        try:
            yield found
        finally:
            self._now = None

    def takes(self, weight: Tensor) -> bool:
        """Whether the gradient of `weight` can be put off: it has one, and is what an optimizer trains."""
        if self._weights is not None and id(weight) not in self._weights:
            return False
        return isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()

    def put_off(self, weight: nn.Parameter, product: Callable[[], Tensor]) -> None:
        """See `DeferredGradients.add`."""
        if self._now is None:
            raise RuntimeError(
                "the forward put the gradients of its weights off, so its backward must run inside Deferral.begin()"
            )
        self._now.add(weight, product)


class PutOff:
    """Which of the weights of a product wait for their gradients, for the autograd function that makes the product.

    weights: these, None in the places of others. anchor: to be an argument of the function, whose result then has a
    backward in any case; None if there are none. The weights themselves must not be arguments: their hooks would be
    called in the first half, with nothing.
    """

    def __init__(self, deferral: Deferral | None, weights: Sequence[Tensor]) -> None:
        self.weights = [w if deferral is not None and deferral.takes(w) else None for w in weights]
        self._deferral = deferral
        self.anchor = torch.empty(0, requires_grad=True) if any(w is not None for w in self.weights) else None

    def operands(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """What the function is given for the weights, made of them as they are multiplied (`cast_operands`)."""
        return [made if w is None else made.detach() for made, w in zip(weights, self.weights, strict=True)]

    def add(self, place: int, product: Callable[[], Tensor]) -> None:
        """`product()`, in any dtype, is the gradient of the weight at `place`."""
        weight = self.weights[place]
        assert isinstance(weight, nn.Parameter) and self._deferral is not None
        self._deferral.put_off(weight, product)


def deferred_linear(x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral, *, by: str = "out") -> Tensor:
    """x [..., K] @ weight.T + bias: [..., N], the gradient of whose weight is put off if it can be.

    weight: [N, K], or with by="in" [K, N] (transformers' Conv1D). bias: [N] or None; its gradient is not put off.
    """
    if not deferral.takes(weight) or weight.dim() != 2 or x.dim() < 2:
        return _product(x, weight, bias, by)
    check_reverse_mode("deferred_linear", x, weight)
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    put_off = PutOff(deferral, [weight])
    operand = weight.detach()
    saved = _Saved.apply(put_off.anchor, [x.detach(), operand if x.requires_grad else None])
    y: Tensor = _DeferredLinear.apply(x, operand, bias, put_off, saved, by)
    return y


class DeferredForward:
    """Stands for the forward of a linear layer while gradients of weights are put off. by: see `deferred_linear`."""

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
    # Of rows that do not lie side by side `linear` makes one product if the weight is trained, and otherwise several.
    y = torch.mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y.add_(bias.to(y.dtype))


class _Saved(torch.autograd.Function):
    """Saves tensors for the function that is given its result.

    A function saves when its forward is over. Activation checkpointing ends a recomputation with the last tensor that
    is saved, so what a layer computes last would be computed again for nothing: no small part, of a gated MLP's three
    products one. Torch's own operations save first, and so does this.
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
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff, saved: Tensor, by: str
    ) -> Tensor:
        ctx.saved, ctx.put_off, ctx.by = saved.grad_fn, put_off, by
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _product(x, weight, bias, by)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved.saved_tensors  # once: under activation checkpointing every access unpacks anew
        with torch.autocast(gradient.device.type, enabled=False):
            grad, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
            d_x = d_bias = None
            if weight is not None:
                factor = weight.to(grad.dtype)
                d_x = _like(rows, grad, factor if ctx.by == "out" else factor.t()).reshape(x.shape)
            if ctx.needs_input_grad[2]:
                d_bias = grad.sum(0).to(ctx.bias_dtype)
            ctx.put_off.add(0, partial(_weight_gradient, grad, rows, ctx.by))
        return d_x, None, d_bias, None, None, None


def _like(rows: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """left @ right, made as autograd makes the gradient of `rows`: transposed where these are, for the same bits."""
    if rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]:
        return right.t().mm(left.t()).t()
    return left.mm(right)


def _weight_gradient(grad: Tensor, rows: Tensor, by: str) -> Tensor:
    """Of a weight [N, K], or [K, N] by "in", from grad [n, N] and rows [n, K]."""
    with torch.autocast(grad.device.type, enabled=False):
        return grad.t().mm(rows) if by == "out" else rows.t().mm(grad)
