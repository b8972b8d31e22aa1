"""bitfield_attention: the op that users call, as a torch.library custom op around the backends.

    bitfield_attention(q, k, v, mask) ── checks shapes, builds the plan if given a mask
      ├─ _Eager, for plain tensors in eager mode
      ├─ _transforms, under torch.func
      └─ interlace::bitfield_attention ── casts under autocast, picks the backend   (torch.compile sees one opaque node)
           └─ backend.forward
      └─ interlace::bitfield_attention_backward                                      (autograd formula, also opaque)
           └─ backend.backward

torch.library takes a few hundred microseconds to flatten and rebuild a plan, more than a small attention takes.
Therefore plain tensors in eager mode use an autograd function that runs the same code. Compilers, tracers, dispatch
modes (fake tensors, flop counters, selective checkpointing), tensor subclasses and autocast use the op.

The schema of a custom op allows only tensors and numbers, so a plan is passed as a list of its tensors. All values that
change from step to step are in those tensors, so new masks cause no recompilation. Gradients flow into q, k and v from
both the output and the LSE. A second derivative raises.
"""

from __future__ import annotations

import importlib
import math
import warnings
from functools import cache
from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from interlace._device import on_gpu
from interlace.attention import _self_check, _transforms, gluon
from interlace.attention.backend import Attention, accumulate_dtype
from interlace.attention.plan import AttentionPlan
from interlace.masks import BitfieldMask

BACKENDS = ("reference", "cpu", "triton", "gluon")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@overload
def bitfield_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BitfieldMask | AttentionPlan,
    *,
    kv_mask: BitfieldMask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool = ...,
    backend: str | None = ...,
) -> Tensor: ...
@overload
def bitfield_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BitfieldMask | AttentionPlan,
    *,
    kv_mask: BitfieldMask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    return_lse: Literal[True],
    deterministic: bool = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
def bitfield_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BitfieldMask | AttentionPlan,
    *,
    kv_mask: BitfieldMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention under a bitfield mask: softmax(scale * q k^T where visible) v, with gradients.

    q: [B, Hq, Tq, D]; k: [B, Hkv, Tk, D]; v: [B, Hkv, Tk, Dv], Dv often D; Hq a multiple of Hkv (head h uses key head
    h // (Hq / Hkv)); one dtype among fp16, bf16, fp32, fp64 and one device (under autocast: cast to autocast's dtype).
    Three kinds of rows are excluded from the computation, whatever their values: padding, queries that see no key, and
    keys that no query sees.
    mask: an AttentionPlan, built once and used in every layer, or a BitfieldMask, for which a plan is built on each
    call. kv_mask: the mask of the keys when they are not the queries' own tokens (with a BitfieldMask only).
    scale: default D ** -0.5. softcap: scores become softcap * tanh(scores / softcap) before masking.
    return_lse: also return the log-sum-exp of each row's scores, natural log, [B, Hq, Tq], fp32 (fp64 for fp64),
    differentiable. A row that sees nothing yields 0, LSE -inf and zero gradients.
    deterministic: False allows a backend to be faster at the cost of bitwise reproducibility. "triton" then adds dq by
    atomics in its dk/dv kernel (16 bits, D <= 128, on Blackwell): 5 matrix products instead of 7. All other results
    stay bitwise reproducible. Under torch.use_deterministic_algorithms(True) all results are.
    backend: "reference" (dense, any device), "cpu", "triton", "gluon" (for Hopper: fp16 and bf16, one head dimension
    up to 128, plans of 128-token blocks); None picks the fastest of these that supports the inputs, by direction.

    Returns out [B, Hq, Tq, Dv] contiguous in q's dtype, or (out, lse). Raises TypeError or ValueError if tensors do not
    fit each other or the mask, or if a named backend cannot run them; the message gives the reason. Only first-order
    reverse-mode derivatives are supported, also under torch.func. Others raise.
    """
    check_shapes(q, k, v)
    if isinstance(mask, BitfieldMask):
        plan = AttentionPlan.build(mask, kv_mask, heads=q.shape[1], kv_heads=k.shape[1])
    elif isinstance(mask, AttentionPlan):
        if kv_mask is not None:
            raise ValueError(
                "got kv_mask and an AttentionPlan, which already contains one: pass kv_mask to AttentionPlan.build"
            )
        plan = mask
    else:
        raise TypeError(f"mask must be a BitfieldMask or an AttentionPlan, got {type(mask).__name__}")
    plan.check(q.shape[0], q.shape[2], k.shape[2], q.device)
    numbers = check_options(q, scale, softcap, deterministic, backend)
    if _is_plain_eager(q, k, v):
        out, lse = _Eager.apply(q, k, v, plan, *numbers)
    elif _transforms.transforming():
        out, lse = _transforms.attend(*cast_for_autocast(q, k, v), plan, *numbers)
    else:
        out, lse = _forward(q, k, v, plan.tensors(), plan.block, plan.sinks, *numbers)
    return (out, lse) if return_lse else out


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor [batch, heads, tokens, head_dim], got {got}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} but q is on {q.device}; move one of them")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k has shape {list(k.shape)} and v {list(v.shape)}; batch, heads and tokens must be equal "
            "(head dimensions may differ)"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q has shape {list(q.shape)} and k {list(k.shape)}; batch and head_dim must be equal")
    if min(q.shape[1], k.shape[1], q.shape[3], v.shape[3]) < 1:
        raise ValueError(
            f"q has {q.shape[1]} heads, k has {k.shape[1]} and head_dim is {q.shape[3]}, that of v {v.shape[3]}; "
            "each must be at least 1"
        )
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")


def check_options(
    q: Tensor, scale: float | None, softcap: float | None, deterministic: bool, backend: str | None
) -> tuple[float, float | None, bool, str]:
    """Check the options of bitfield_attention. Returns them as backends take them ("" = any backend)."""
    if scale is None:
        scale = q.shape[3] ** -0.5
    # Under torch.compile a number that differs between two modules is a symbol. isfinite does not accept symbols.
    checking = not torch.compiler.is_compiling()
    if checking and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite")
    if checking and softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap is {softcap}; it must be positive and finite, or None for none")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool, got {type(deterministic).__name__}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}, or None to choose")
    return float(scale), None if softcap is None else float(softcap), deterministic, backend or ""


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast to autocast's dtype if autocast is active. fp64 is not cast, as in scaled_dot_product_attention."""
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check dtypes. Separate from check_shapes because autocast may still change dtypes before the op runs."""
    if q.dtype not in DTYPES:
        raise TypeError(f"q is {q.dtype}; attention needs a floating dtype (fp16, bf16, fp32 or fp64)")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")


# ---------------------------------------------------------------------- backends


def unsupported(backend: str, q: Tensor, v: Tensor | None = None) -> str | None:
    """Reason why `backend` cannot run tensors like `q` and `v` (default: as wide as q) on this machine; or None."""
    module = _module(backend)
    return module if isinstance(module, str) else module.unsupported(q, q if v is None else v)


def choose_backend(q: Tensor, v: Tensor | None = None, *, forward: bool = True) -> str:
    """Backend that backend=None selects for tensors like `q` and `v` (default: as wide as q) and blocks of 128."""
    return _backend_module("", q, q if v is None else v, 128, forward=forward).__name__.rpartition(".")[2]


def _backend_module(backend: str, q: Tensor, v: Tensor, block: int, *, forward: bool) -> ModuleType:
    kind = (backend, q.device, q.dtype, q.shape[3], v.shape[3], block, forward)
    module = _modules.get(kind)
    if module is None:
        module = _first_supported(backend, q, v, block, forward)
        if on_gpu(q.device):  # cached because the driver's capability query is the slowest part here
            _modules[kind] = module
    return module


_modules: dict[tuple[object, ...], ModuleType] = {}


def _first_supported(backend: str, q: Tensor, v: Tensor, block: int, forward: bool) -> ModuleType:
    if not backend:
        if q.device.type == "cpu":
            backend = "cpu"
        elif (forward or gluon.BACKWARD_IS_CHOSEN) and block == gluon.BLOCK and unsupported("gluon", q, v) is None:
            backend = "gluon"
        elif (reason := unsupported("triton", q, v)) is None:
            backend = "triton"
        else:
            _warn_of_fallback(q.device.type, reason)
            backend = "reference"
    if (reason := unsupported(backend, q, v)) is not None:
        raise ValueError(f'backend "{backend}" cannot run this: {reason}')
    module = _module(backend)
    assert isinstance(module, ModuleType)
    return module


@cache
def _module(backend: str) -> ModuleType | str:
    """Module of a backend, or the reason why it cannot be imported."""
    try:
        return importlib.import_module(f"interlace.attention.{backend}")
    except ImportError as error:
        return f"it cannot be imported ({error})"


@cache
def _warn_of_fallback(device_type: str, reason: str) -> None:
    warnings.warn(
        f"bitfield_attention uses the dense reference backend on {device_type} (T x T memory): triton is not "
        f"available, {reason}",
        stacklevel=2,
    )


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, softcap: float | None, backend: str
) -> tuple[Tensor, Tensor]:
    """out and lse from `backend` ("" = choose one). Runs outside autograd and does not check shapes."""
    check_dtypes(q, k, v)
    job = Attention(q, k, v, plan, scale, softcap)
    run = _self_check.checked(
        _backend_module(backend, q, v, plan.block, forward=True), "forward", job, named=bool(backend)
    )
    out, lse = run.forward(job)
    return out.contiguous(), lse.contiguous()


def run_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    plan: AttentionPlan, scale: float, softcap: float | None, deterministic: bool, backend: str, wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv for the results out and lse of a forward. wide: dk, dv in `accumulate_dtype`, for further sums."""
    if dlse is not None:
        dlse = dlse.masked_fill(lse == -math.inf, 0.0)  # an empty row has no gradient, even if d f(-inf) is infinite
    run = _backend_module(backend, q, v, plan.block, forward=False)
    repeatable = deterministic or torch.are_deterministic_algorithms_enabled()
    direction = "backward" if repeatable or not hasattr(run, "atomic_backward") else "atomic_backward"
    job = Attention(q, k, v, plan, scale, softcap)
    run = _self_check.checked(run, direction, job, named=bool(backend))
    grads = getattr(run, direction)(job, out, lse, dout, dlse, wide)
    dq, dk, dv = (grad.contiguous() for grad in grads)
    return dq, dk, dv


# ---------------------------------------------------------------------- eager mode


def _is_plain_eager(*tensors: Tensor) -> bool:
    """True if torch.library can be skipped: no compiler, mode or transform needs the op as a node."""
    device = tensors[0].device.type
    return (
        device != "meta"
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[no-untyped-call]
        and all(type(x) in _PLAIN and not torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None  # vmap, grad, jvp, ...
        and torch.autograd.forward_ad._current_level < 0
        and not torch.is_autocast_enabled(device)
    )


_PLAIN = (Tensor, torch.nn.Parameter)


class _Eager(torch.autograd.Function):
    """The op and its gradients without torch.library; apply(q, k, v, plan, scale, softcap, deterministic, backend)."""

    @staticmethod
    def forward(ctx, q, k, v, plan, scale, softcap, deterministic, backend):  # type: ignore[no-untyped-def]
        out, lse = run_forward(q, k, v, plan, scale, softcap, backend)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.numbers = plan, (scale, softcap, deterministic, backend)
        ctx.set_materialize_grads(False)  # avoids allocating zeros for an unused LSE
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[no-untyped-def]
        if dout is None and dlse is None:
            return (None,) * 8
        _transforms.refuse_batched_gradients(dout, dlse)
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout.contiguous()
        special = not _is_plain_eager(q, k, v, *(grad for grad in (dout, dlse) if grad is not None))
        transforming = _transforms.transforming()
        if not (transforming or special or torch.is_grad_enabled()):
            grads = run_backward(dout, dlse, q, k, v, out, lse, ctx.plan, *ctx.numbers)
        else:  # with create_graph: the op raises for a second derivative
            gradients = _transforms.gradients if transforming else _backward
            plan = (ctx.plan.tensors(), ctx.plan.block, ctx.plan.sinks)
            grads = gradients(dout, dlse, q, k, v, out, lse, *plan, *ctx.numbers)
        return (*grads, *(None,) * 5)


# ---------------------------------------------------------------------- the custom ops


@torch.library.custom_op("interlace::bitfield_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor],
    block: int,
    sinks: int,
    scale: float,
    softcap: float | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    _transforms.refuse_forward_mode()
    return run_forward(q, k, v, AttentionPlan.from_tensors(plan, block, sinks), scale, softcap, backend)


@_forward.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    _transforms.refuse_forward_mode()
    check_dtypes(q, k, v)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))


@torch.library.custom_op("interlace::bitfield_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: list[Tensor],
    block: int,
    sinks: int,
    scale: float,
    softcap: float | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    _transforms.refuse_forward_mode()
    whole = AttentionPlan.from_tensors(plan, block, sinks)
    return run_backward(dout, dlse, q, k, v, out, lse, whole, scale, softcap, deterministic, backend)


@_backward.register_fake
def _backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _gradients(ctx, dout, dlse):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, *plan = ctx.saved_tensors
    nothing = ([None] * len(plan), *(None for _ in ctx.numbers))
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    _transforms.refuse_batched_gradients(dout, dlse)
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    return (*_backward(dout, dlse, q, k, v, out, lse, plan, *ctx.numbers), *nothing)


_forward.register_autograd(_gradients, setup_context=_transforms.setup_context)
_backward.register_autograd(_transforms.no_second_derivative)
_forward.register_vmap(_transforms.row_by_row(_forward))
_backward.register_vmap(_transforms.row_by_row(_backward))


def _register_autocast(key: str) -> None:
    """Cast when the op runs under autocast. `register_autocast` would fix one dtype at registration, but users choose
    fp16 or bf16 by the autocast context."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        q, k, v = cast_for_autocast(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            return _forward(q, k, v, *rest)  # type: ignore[no-any-return]

    _LIBRARY.impl("bitfield_attention", kernel, key)  # type: ignore[no-untyped-call]


_LIBRARY = torch.library.Library("interlace", "FRAGMENT")  # type: ignore[no-untyped-call]
for _key in ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1"):
    _register_autocast(_key)
