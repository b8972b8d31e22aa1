"""The plan of attention layers whose model passes them no mask: set by `use_plan`, one per thread.

Code that torch.compile traces can neither read a context variable nor guard on it. It reads `_shared` instead: a copy,
valid if only one thread is inside use_plan. torch.compile guards on it like on any global. When the compiled code runs,
the value read is compared with the thread's own plan, since another thread may have entered in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from interlace.attention.plan import AttentionPlan

Backend = str | Callable[..., Tensor] | None
"""The name of an attention backend, None for the fastest. Or a function that replaces `bitfield_attention`, called as
attend(q, k, v, plan, scale=, softcap=) with the same arguments, that returns out alone."""
Active = tuple[AttentionPlan | None, Backend]
NOTHING: Active = (None, None)  # compared by identity: no use_plan is active, not even with None

EXPORTED = (
    "torch.export would make the plan a constant of the program: export the model without a plan, so that the program "
    "makes its masks from its inputs, or export your own module that takes an AttentionPlan as an input"
)
TRACED = "torch.jit.trace would make the plan a constant of the program: use torch.export"

_active: ContextVar[Active] = ContextVar("interlace_plan", default=NOTHING)


@contextmanager
def use_plan(plan: AttentionPlan | None, *, backend: Backend = None) -> Iterator[None]:
    """Attention layers called inside use `plan` wherever their model passes them no mask.

    `backend` names the attention backend for these calls (None = the fastest), or is a function that computes attention
    (see Backend). An example is attention of part of a sequence whose keys are on other ranks. None as plan switches
    back to the model's own masks. Can be nested; each thread has its own.
    """
    entered: Active = (plan, backend)
    token = _active.set(entered)
    thread = threading.get_ident()
    _shared.enter(thread, entered)
    try:
        yield
    finally:
        _shared.leave(thread, entered)
        _active.reset(token)


def current_plan() -> Active:
    """The plan and backend set by `use_plan` in this context."""
    if torch.compiler.is_exporting() and (_shared.plan is not None or _shared.several):
        raise ValueError(EXPORTED)
    if not torch.compiler.is_compiling() or _shared.several:  # with several threads, reading _active breaks the graph
        active = _active.get()
        if active[0] is not None and torch.jit.is_tracing():  # type: ignore[no-untyped-call]
            raise ValueError(TRACED)
        return active
    plan = _shared.plan
    if plan is None:
        return None, _shared.backend
    return replace(plan, q_bits=_own(plan.q_bits)), _shared.backend


def current_plan_is_unset() -> bool:
    """True if no use_plan is active here, not even with None. Not for use in compiled code."""
    return _active.get() is NOTHING


def another_thread_has_a_plan() -> bool:
    """True if other threads have a plan and this thread is outside use_plan."""
    return current_plan_is_unset() and (_shared.plan is not None or _shared.several)


def under_current_plan(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be run later under the plan that is active now (in a backward pass that recomputes it)."""
    if torch.compiler.is_compiling():
        return function  # the plan is an input of the compiled code, and stays so
    plan, backend = _active.get()  # also without a plan: the backward pass may run inside use_plan

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with use_plan(plan, backend=backend):
            return function(*args, **kwargs)

    return run


class _Shared:
    """plan, backend: those of the only thread inside use_plan, else None. several: more than one thread is inside."""

    def __init__(self) -> None:
        self.plan: AttentionPlan | None = None
        self.backend: Backend = None
        self.several = False
        self._entered: dict[int, list[Active]] = {}
        self._lock = threading.Lock()

    def enter(self, thread: int, entered: Active) -> None:
        with self._lock:
            self._entered.setdefault(thread, []).append(entered)
            self._update()

    def leave(self, thread: int, entered: Active) -> None:
        with self._lock:
            mine = self._entered[thread]
            del mine[max(i for i, other in enumerate(mine) if other is entered)]
            if not mine:
                del self._entered[thread]
            self._update()

    def _update(self) -> None:
        self.several = len(self._entered) > 1
        tops = [entered[-1] for entered in self._entered.values()]
        self.plan, self.backend = tops[0] if len(tops) == 1 else NOTHING


_shared = _Shared()


# A CUDA graph (mode="reduce-overhead") would copy q_bits elsewhere, and replay without the comparison.
@torch.library.custom_op("interlace::own_plan", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _own(q_bits: Tensor) -> Tensor:
    """A copy of a plan's q_bits. Raises RuntimeError if that plan is not the running thread's own."""
    plan, _ = _active.get()
    recomputing = torch._C._current_graph_task_id() != -1  # in a backward pass: already compared in the forward
    if not recomputing and (plan is None or plan.q_bits.data_ptr() != q_bits.data_ptr()):
        raise RuntimeError(
            "compiled code needs the plan that another thread set with use_plan: call it inside use_plan in each "
            "thread, or pass attention_mask=interlace.attention.hf.carrier(plan)"
        )
    return q_bits.clone()


@_own.register_fake
def _own_fake(q_bits: Tensor) -> Tensor:
    return torch.empty_like(q_bits)
