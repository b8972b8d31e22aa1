"""bitfield_attention under torch.func: grad, vjp, jacrev, vmap and their compositions. Other transforms raise.

A custom op does not work under these transforms. torch turns it into an autograd function without `setup_context`,
which they reject, and it silently drops tangents of forward mode. So under a transform the op is called from the
autograd functions below, level by level. vmap runs row by row.

Forward mode (jvp, jacfwd, linearize, hessian, dual numbers) and second derivatives raise, as for the fused kernels of
scaled_dot_product_attention. The error names an alternative.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from interlace.attention.plan import AttentionPlan

INSTEAD = (
    "use scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense()[:, None], enable_gqa=True) under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which supports it; in a HuggingFace model, "
    'attn_implementation="eager"'
)


def transforming() -> bool:
    """True if a transform of torch.func or a level of forward mode is active."""
    if torch.compiler.is_compiling():
        return torch._C._are_functorch_transforms_active()
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None:
        return forward_ad._current_level >= 0
    return top.key() != torch._C._functorch.TransformType.Functionalize


# True while the autograd functions below handle tangents.
_tangents_are_seen: ContextVar[bool] = ContextVar("tangents_are_seen", default=False)


def refuse_forward_mode() -> None:
    """Raises RuntimeError if the op itself is called in forward mode, for example by an exported program. The op would
    drop tangents and cannot detect them."""
    if forward_ad._current_level >= 0 and not _tangents_are_seen.get():
        _no_forward_mode()


def _no_forward_mode(ctx: Any = None, *grad_inputs: Any) -> NoReturn:
    raise RuntimeError(
        "bitfield_attention has no forward-mode derivative (jvp, jacfwd, linearize, hessian, dual numbers): use "
        f"reverse mode (grad, vjp, jacrev), or {INSTEAD}"
    )


def _call(operator: Callable[..., Any], *arguments: object) -> Any:
    token = _tangents_are_seen.set(True)
    try:
        return operator(*arguments)
    finally:
        _tangents_are_seen.reset(token)


def no_second_derivative(*_: object) -> NoReturn:
    raise RuntimeError(f"bitfield_attention has no second derivative: {INSTEAD}")


def refuse_batched_gradients(*grads: Tensor | None) -> None:
    """Raises RuntimeError under torch.autograd.grad(is_grads_batched=True), an older batching than torch.func."""
    if any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
        raise RuntimeError(
            "bitfield_attention does not support is_grads_batched=True or jacobian(vectorize=True): use "
            "torch.func.vmap of a call of torch.autograd.grad, torch.func.jacrev, or vectorize=False"
        )


def row_by_row(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """A vmap rule: one call per row of the batch. Plans may be batched too."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        def row(take: Callable[[Tensor, int], Tensor]) -> tuple[Tensor, ...]:
            return function(*_taken(take, args, in_dims))

        rows = [row(lambda x, d: x.select(d, i)) for i in range(info.batch_size)]  # noqa: B023  (called at once)
        if not rows:  # empty batch: a row of zeros that depends on the arguments gives shapes and gradients
            outputs = [one[None][:0] for one in row(lambda x, d: x.sum(d, dtype=x.dtype))]
        else:
            outputs = [torch.stack(one) for one in zip(*rows)]
        return tuple(outputs), (0,) * len(outputs)

    return rule


def _taken(take: Callable[[Tensor, int], Tensor], x: Any, dim: Any) -> Any:
    """`x` with take(tensor, dim) applied to its batched tensors. dim: None, or structured like x (may be a list)."""
    if dim is None:
        return x
    return take(x, dim) if isinstance(dim, int) else [_taken(take, *pair) for pair in zip(x, dim)]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves the inputs (q, k, v, plan, *numbers) and the output (out, lse) of the op for its backward."""
    q, k, v, plan, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, *plan)
    ctx.set_materialize_grads(False)  # avoids allocating zeros for an unused LSE


class _Attention(torch.autograd.Function):
    """apply(q, k, v, plan, *numbers) -> (out, lse); plan and numbers as in the op."""

    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(*args: object) -> tuple[Tensor, Tensor]:
        return _call(torch.ops.interlace.bitfield_attention, *args)  # type: ignore[no-any-return]

    setup_context = staticmethod(setup_context)

    @staticmethod
    @torch.compiler.disable  # runs with the transform, which may be in a frame that torch.compile traces
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
    """apply(dout, dlse, q, k, v, out, lse, plan, *numbers) -> (dq, dk, dv); plan and numbers as in the op."""

    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(*args: object) -> tuple[Tensor, Tensor, Tensor]:
        return _call(torch.ops.interlace.bitfield_attention_backward, *args)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, *grads: object) -> NoReturn:
        no_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return row_by_row(_Gradients.apply)(info, in_dims, *args)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, *numbers: object) -> tuple[Tensor, Tensor]:
    """out and lse while transforming().

    torch cannot trace these autograd functions. The error raised here makes torch.compile run the function that called
    the transform in eager mode, with the same results, unless fullgraph=True asks for an error.
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
