"""bitfield_attention under torch.func (grad, vjp, jacrev, vmap and their compositions), and the refusal of the rest.

A custom op does not go through these transforms: torch makes of it an autograd function without `setup_context`, which
they refuse, and drops tangents of forward mode without a word. So under a transform the op is called from the autograd
functions below, level by level. vmap goes row by row.

Forward mode (jvp, jacfwd, linearize, hessian, dual numbers) and second derivatives raise, as they do for
scaled_dot_product_attention's fused kernels, and say what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from interlace.attention.plan import AttentionPlan

INSTEAD = (
    "use scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense()[:, None], enable_gqa=True) under "
    'torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which has it; in a HuggingFace model, attn_implementation="eager"'
)


def transforming() -> bool:
    """Whether a transform of torch.func or a level of forward mode is active."""
    if torch.compiler.is_compiling():
        return torch._C._are_functorch_transforms_active()
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None:
        return forward_ad._current_level >= 0
    return top.key() != torch._C._functorch.TransformType.Functionalize


# Whether tangents are looked after, by the autograd functions below.
_tangents_are_seen: ContextVar[bool] = ContextVar("tangents_are_seen", default=False)


def refuse_forward_mode() -> None:
    """Raises RuntimeError where the op itself is called in forward mode, as by an exported program: it would
    drop tangents, and cannot tell whether there are any."""
    if forward_ad._current_level >= 0 and not _tangents_are_seen.get():
        _no_forward_mode()


def _no_forward_mode(ctx: Any = None, *grad_inputs: Any) -> NoReturn:
    raise RuntimeError(
        "bitfield_attention has no forward-mode derivative (jvp, jacfwd, linearize, hessian, dual numbers): use "
        f"reverse mode (grad, vjp, jacrev), or {INSTEAD}"
    )


def _call(operator: Callable[..., Any], *arguments: Any) -> Any:
    token = _tangents_are_seen.set(True)
    try:
        return operator(*arguments)
    finally:
        _tangents_are_seen.reset(token)


def no_second_derivative(*_: Any) -> NoReturn:
    raise RuntimeError(f"bitfield_attention has no second derivative: {INSTEAD}")


def refuse_batched_gradients(*grads: Tensor | None) -> None:
    """Raises RuntimeError for the batching of torch.autograd.grad(is_grads_batched=True), older than torch.func."""
    if any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
        raise RuntimeError(
            "bitfield_attention does not run under is_grads_batched=True nor jacobian(vectorize=True): use "
            "torch.func.vmap of a call of torch.autograd.grad, torch.func.jacrev, or vectorize=False"
        )


def row_by_row(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """A vmap rule: one call per row of the batch. Plans may be batched too."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        def row(take: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, ...]:
            return function(*_taken(take, args, in_dims))

        rows = [row(lambda x, d: x.select(d, i)) for i in range(info.batch_size)]  # noqa: B023  (called at once)
        if not rows:  # a row of zeros, which depends on the arguments, says what shapes and gradients none would have
            outputs = [one[None][:0] for one in row(lambda x, d: x.sum(d, dtype=x.dtype))]
        else:
            outputs = [torch.stack(one) for one in zip(*rows)]
        return tuple(outputs), (0,) * len(outputs)

    return rule


def _taken(take: Callable[[Tensor, int], Tensor], x: Any, dim: Any) -> Any:
    """`x` with take(tensor, dim) for its batched tensors; `dim`: None, or as x, which may be a list."""
    if dim is None:
        return x
    return take(x, dim) if isinstance(dim, int) else [_taken(take, *pair) for pair in zip(x, dim)]


class _Attention(torch.autograd.Function):
    """apply(q, k, v, plan, *numbers) -> (out, lse); plan and numbers as the op takes them."""

    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(*args: Any) -> Any:
        return _call(torch.ops.interlace.bitfield_attention, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, plan, *ctx.numbers = inputs
        ctx.save_for_backward(q, k, v, *output, *plan)
        ctx.set_materialize_grads(False)

    @staticmethod
    @torch.compiler.disable  # it runs when the transform does, which may be in a frame that torch.compile looks at
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *plan = ctx.saved_tensors
        grads: tuple[Any, ...] = (None, None, None)
        if dout is not None or dlse is not None:
            dout = torch.zeros_like(out) if dout is None else dout
            grads = gradients(dout, dlse, q, k, v, out, lse, plan, *ctx.numbers)
        return *grads, None, *(None for _ in ctx.numbers)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return row_by_row(_Attention.apply)(info, in_dims, *args)


class _Gradients(torch.autograd.Function):
    """apply(dout, dlse, q, k, v, out, lse, plan, *numbers) -> (dq, dk, dv); plan and numbers as the op takes them."""

    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(*args: Any) -> Any:
        return _call(torch.ops.interlace.bitfield_attention_backward, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        no_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return row_by_row(_Gradients.apply)(info, in_dims, *args)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, *numbers: Any) -> tuple[Tensor, Tensor]:
    """out and lse while transforming().

    torch cannot trace these autograd functions. Unless fullgraph=True asks for an error, what is raised here makes
    torch.compile run the function that called the transform in eager mode, with the same results.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "bitfield_attention cannot be compiled inside a transform of torch.func (grad, vmap, ...): leave the "
            "function that calls the transform uncompiled (torch.compiler.disable)"
        )
    return _eager_attend(q, k, v, plan.tensors(), plan.block, plan.sinks, *numbers)


_eager_attend = torch.compiler.disable(_Attention.apply)
gradients = torch.compiler.disable(_Gradients.apply)
"""(dq, dk, dv) of a backward while transforming()."""
