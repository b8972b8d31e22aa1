"""Carrier: a tensor that carries a plan through a model in place of the attention mask.

It has the shape of a mask, [B, 1, Q, K], and no values. Reading its shape, moving it and selecting queries and keys
work. Any computation with it raises an error that names the model. Such models make another mask from theirs (Doge),
select keys with it (HY-V4), or count tokens with it (the auxiliary loss of a mixture of experts). Used as numbers, it
would act as a mask that hides nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from interlace.attention.hf.active import TRACED, Backend
from interlace.attention.hf.plans import changed
from interlace.attention.plan import AttentionPlan, whole_graph

# A dtype without arithmetic in torch. It also makes operations fail where __torch_function__ is not called (C++, a copy
# that lost its class).
DTYPE = torch.bits8

Selection = slice | Tensor
"""Some queries or keys of a mask."""
_ITSELF = ("detach", "contiguous", "clone", "requires_grad_", "__deepcopy__")
_VIEWS = ("T", "H", "mT", "mH", "real", "imag", "data")  # properties that return other tensors


class Carrier(Tensor):
    """See the module docstring. interlace_plan: the plan, the backend to use it with, and whether layers narrow it by
    their own window, which the plan does not include."""

    interlace_plan: tuple[AttentionPlan, Backend, bool]

    @staticmethod
    def of(plan: AttentionPlan, backend: Backend, narrow: bool) -> Carrier:
        """A carrier of `plan`, on its device."""
        if torch.jit.is_tracing():  # type: ignore[no-untyped-call]
            raise ValueError(TRACED)
        if torch.compiler.is_dynamo_compiling() and not whole_graph():
            return _outside_graphs(plan, backend, narrow)
        shape = (plan.batch, 1, plan.q_len, plan.k_len)
        if isinstance(plan.q_bits, FakeTensor):
            carrier: Carrier = Tensor._make_wrapper_subclass(_OfFakes, shape, dtype=DTYPE, device=plan.device)
        else:
            carrier = (
                torch.zeros((), dtype=torch.uint8, device=plan.device).view(DTYPE).expand(shape).as_subclass(Carrier)
            )
        carrier.interlace_plan = (plan, backend, narrow)
        return carrier

    def with_plan(self, plan: AttentionPlan) -> Carrier:
        """A carrier of another plan, with the same further values."""
        return self if plan is self.interlace_plan[0] else Carrier.of(plan, *self.interlace_plan[1:])

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Carrier], tuple[object, ...]]:
        return Carrier.of, self.interlace_plan

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        return f"Carrier({list(self.shape)}, device={str(self.device)!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name == "__get__" and not torch.compiler.is_compiling():
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "shape":
                _check_implementation()
            elif name in _VIEWS:
                raise refusal(name)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        itself = args[0] if args else None
        if isinstance(itself, Carrier):
            if name in _ITSELF:
                return itself
            if name in ("to", "cpu", "cuda") and (device := _destination(name, args[1:], kwargs)) is not None:
                return itself.with_plan(itself.interlace_plan[0].to(device))
            if name == "__getitem__" and (sides := _sides(args[1])) is not None:
                return itself.with_plan(_selected(itself.interlace_plan[0], *sides))
        failure = None
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except (RuntimeError, TypeError) as error:
                failure, result = error, None
        if failure is not None:
            raise refusal(name) from failure
        results = result if isinstance(result, (tuple, list)) else (result,)
        if name != "__get__" and any(isinstance(each, Tensor) for each in results):
            raise refusal(name)
        return result


class _OfFakes(Carrier):
    """A carrier for fake tensors, which torch cannot subclass: it has no storage at all."""

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> NoReturn:
        raise refusal(str(func))


@torch.compiler.disable
def _outside_graphs(plan: AttentionPlan, backend: Backend, narrow: bool) -> Carrier:
    return Carrier.of(plan, backend, narrow)


def refusal(operation: str) -> ValueError:
    """Error for computations with a carrier. Names the model that made the call."""
    inner, outer = _callers()
    caller = inner if inner == outer else f"{inner} (in {outer})"
    return ValueError(
        f"{caller} computes with its attention mask ({operation}), but under interlace the mask is a plan without "
        "values. If you passed the mask, pass none and run the model inside interlace.attention.hf.use_plan(plan) "
        "(routers with output_router_logits=True then count every token). If the model makes the mask itself, plans do "
        f'not support it: use attn_implementation="sdpa" or "eager" for {outer}'
    )


def _check_implementation() -> None:
    """Raise ValueError if the model that reads a carrier's shape uses another attention, without support for plans."""
    # Only HuggingFace models: other modules may have a config, too.
    models = (x for x in _modules_on_stack() if hasattr(getattr(x, "config", None), "_attn_implementation"))
    model = next(models, None)
    if model is not None and not _is_switched(model.config):
        name, implementation = type(model).__name__, getattr(model.config, "_attn_implementation", None)
        raise ValueError(
            f"{name} got a plan as its mask, but its attn_implementation is {implementation!r}: call "
            'model.set_attn_implementation("interlace"). If that has no effect, the attention of this model cannot be '
            "replaced (for example with position biases such as ALiBi): pass a dense mask"
        )


def _is_switched(config: object) -> bool:
    """True if a HuggingFace config, or one of its sub-configs, selects this attention."""
    if str(getattr(config, "_attn_implementation", "")).startswith("interlace"):
        return True
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    return any(_is_switched(part) for part in parts if part is not None)


def _modules_on_stack() -> Iterator[nn.Module]:
    """Modules whose methods are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        frame = frame.f_back


def _callers() -> tuple[str, str]:
    """Classes of the innermost module on the stack, and of the outermost HuggingFace model."""
    modules = list(_modules_on_stack())
    if not modules:
        return "the code", "the model"
    models = [module for module in modules if hasattr(module, "base_model_prefix")]
    return type(modules[0]).__name__, type((models or modules)[-1]).__name__


def _destination(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Target device of a carrier's move. None if the call also changes the type, or takes another tensor's."""
    if name == "cpu":
        return torch.device("cpu")
    target = kwargs.get("device", args[0] if args else "cuda" if name == "cuda" else None)
    if name == "cuda" and not isinstance(target, torch.device):
        target = f"cuda:{target}" if isinstance(target, int) else "cuda"
    changed = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
    return torch.device(target) if isinstance(target, (str, int, torch.device)) and not changed else None


def _sides(index: object) -> tuple[Selection, Selection] | None:
    """Queries and keys selected by an index of the form mask[:, :, queries, keys]; None for other indices."""
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (5 - len(items))
    items += [slice(None)] * (4 - len(items))
    all_heads = all(isinstance(item, slice) and item == slice(None) for item in items[:2])
    sides = items[2:]
    if len(items) != 4 or not all_heads or not all(_is_selection(item) for item in sides):
        return None
    return sides[0], sides[1]


def _is_selection(item: object) -> bool:
    return isinstance(item, slice) or (isinstance(item, Tensor) and item.dim() == 1)


def _selected(plan: AttentionPlan, queries: Selection, keys: Selection) -> AttentionPlan:
    """The plan for some queries and keys, which keep their positions."""
    if all(isinstance(s, slice) and s.indices(n) == (0, n, 1) for s, n in ((queries, plan.q_len), (keys, plan.k_len))):
        return plan
    return changed(plan, lambda q, k: (q(lambda field: field[:, queries]), k(lambda field: field[:, keys])))
