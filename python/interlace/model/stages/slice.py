"""Cuts a module at its list of repeated layers and runs its own forward between two cuts.

This code does not depend on model families. `carve` copies the structure of a module (not its weights) from the root
down to the list of layers. The copy contains only what one stage needs. Keys stay, so parameters keep their names in
the full model:

    before the list (embeddings, convolutions)      first stage only, elsewhere hollow: meta tensors of the same shapes
    layers [start, stop)                            kept; earlier ones pass on, the next one ends the forward
    after the list (norms, heads)                   last stage only, elsewhere hollow
    parameter-free modules (rotary embeddings)      everywhere

`run` then calls the module's own forward. The hidden state enters through a forward pre-hook on the first layer kept.
It replaces the output of the prologue, which is computed on meta tensors at no cost. It leaves at the first layer after
the cut, which raises a private exception that `run` catches. So the epilogue runs on the last stage only.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from interlace.model.checkpointing import Checkpointing, check_entry, set_checkpointing
from interlace.parallel.tensor import replaced

M = TypeVar("M", bound=nn.Module)

_hidden: ContextVar[Tensor | None] = ContextVar("interlace_hidden", default=None)


class _Leave(Exception):
    """Carries the hidden state out of a module's forward."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


class Absent(nn.Module):
    """Placeholder for a layer of another stage. Keeps the layer's plain attributes: some models' loops read them.

    returned: the length of the tuple that the layer returned; None if it returned the hidden state itself.
    """

    def __init__(self, layer: nn.Module, returned: int | None = None):
        super().__init__()
        plain = {k: v for k, v in layer.__dict__.items() if not k.startswith("_") and k not in ("training", "forward")}
        self.__dict__.update(plain)
        self._returned = returned
        for hook in filter(captures, layer._forward_hooks.values()):
            self.register_forward_hook(hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Not the argument: if layers return tuples, the caller has already unpacked it.
        entering = _hidden.get()
        hidden = hidden_argument(args, kwargs) if entering is None else entering
        return hidden if self._returned is None else (hidden, *[None] * (self._returned - 1))


def captures(hook: Callable[..., Any]) -> bool:
    """True for the library's own hook, which counts layers to capture the features of a middle layer."""
    return getattr(hook, "__name__", "") == "output_capturing_hook"


class _Exit(Absent):
    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Leave(hidden_argument(args, kwargs))


def hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden state among the arguments of a layer. Raises TypeError if it cannot be found."""
    given = args[0] if args else next((kwargs[k] for k in ("hidden_states", "hidden_state", "x") if k in kwargs), None)
    if not isinstance(given, Tensor):
        raise TypeError(
            "cannot find the hidden state in a layer's arguments: it must come first, or be named hidden_states"
        )
    return given


def takes(module: nn.Module, argument: str) -> bool:
    """True if a module's forward uses an argument of this name.

    It may be its own, or one of the **kwargs that HuggingFace's models pass to inner models.
    """
    forward: Callable[..., Any] = module.forward
    parameters = inspect.signature(forward).parameters
    if argument in parameters:
        return True
    hands_on = isinstance(module, PreTrainedModel) and any(
        each.kind is each.VAR_KEYWORD for each in parameters.values()
    )
    return hands_on and any(isinstance(part, PreTrainedModel) and takes(part, argument) for part in module.children())


def find_layers(module: nn.Module, path: str | None = None) -> str:
    """Path of the list of repeated layers inside `module`: `path` if given, otherwise the list with most parameters.

    Raises ValueError if there is no list or no clear choice; the message explains how to name it.
    """
    name = type(module).__name__
    lists = {
        key: child
        for key, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and not isinstance(child, ParametrizationList) and len(child) and key != ""
    }
    if path is not None:
        if path not in lists:
            raise ValueError(f"{name} has no ModuleList {path!r}; pass layers= one of: {', '.join(lists) or 'none'}")
        return path
    outer = {key: child for key, child in lists.items() if not any(key.startswith(f"{other}.") for other in lists)}
    sizes = {key: sum(p.numel() for p in child.parameters()) for key, child in outer.items()}
    if not sizes:
        raise ValueError(
            f"{name} has no nn.ModuleList of layers, so it cannot be cut into stages: pass layers='path.to.the.list' "
            "(a ModuleList of repeated blocks that the forward goes through in order)"
        )
    best = max(sizes, key=lambda key: sizes[key])
    if 2 * sizes[best] < sum(sizes.values()) or list(sizes.values()).count(sizes[best]) > 1:
        raise ValueError(
            f"{name} has several lists of layers ({', '.join(sizes)}): choose the one to cut into "
            "stages with layers='...'"
        )
    return best


def first_layer(module: nn.Module, path: str) -> nn.Module:
    """The first layer in the list at `path` that belongs to this stage."""
    return next(layer for layer in module.get_submodule(path).children() if not isinstance(layer, Absent))


def carve(
    module: nn.Module,
    path: str,
    start: int,
    stop: int,
    *,
    share: bool = True,
    checkpointing: Checkpointing = "none",
    returned: Sequence[int | None] = (),
    zeros: bool = False,
    memo: dict[int, Any] | None = None,
) -> nn.Module:
    """Part of `module` for the stage of layers [start, stop) of the ModuleList at `path`; see the module docstring.

    share: True = parameters are `module`'s own. False = independent copies (ties inside the stage are kept).
    checkpointing: activation checkpointing of the stage's layers; `module`'s own layers stay unchanged.
    returned: return kind of each layer, as in Absent; default: all return their hidden state.
    zeros: hollow modules before the list return zeros on their inputs' device, for code that computes positions from
    shapes and devices.
    memo: memo of `copy.deepcopy` for the copies.
    """
    memo = {} if memo is None else memo

    def take(value: Any) -> Any:
        return value if share else copy.deepcopy(value, memo)

    def take_layer(layer: nn.Module) -> nn.Module:
        # Even a shared layer is a separate object, so that hooks and checkpointing here do not affect `module`.
        layer = clone(layer) if share else copy.deepcopy(layer, memo)
        set_checkpointing([layer], checkpointing)
        return layer

    def visit(node: nn.Module, rest: list[str]) -> nn.Module:
        shell = clone(node)
        if not rest:
            for i, (key, layer) in enumerate(node._modules.items()):
                assert layer is not None
                gone = Absent(layer, returned[i] if returned else None)
                shell._modules[key] = take_layer(layer) if start <= i < stop else _Exit(layer) if i == stop else gone
            return shell
        if start == 0:
            shell._parameters = {key: take(value) for key, value in node._parameters.items()}
        else:
            _hollow_tensors(shell)
        shell._buffers = {key: take(value) for key, value in shell._buffers.items()}
        first = True
        for key, child in node._modules.items():
            if key == rest[0]:
                assert child is not None
                shell._modules[key] = visit(child, rest[1:])
                first = False
            elif child is None or next(child.parameters(), None) is None or (start == 0 if first else stop == total):
                shell._modules[key] = take(child)
            else:
                shell._modules[key] = hollow = _hollow(child)
                if zeros and first:
                    hollow.__dict__["forward"] = MethodType(_meta_forward, hollow)
        return shell

    layers = module.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    total = len(layers)
    if not 0 <= start < stop <= total:
        raise ValueError(
            f"layers {start} to {stop} are not a valid range of the {total} layers at {path!r}: "
            f"need 0 <= start < stop <= {total}"
        )
    return visit(module, path.split("."))


def prologue(module: nn.Module, path: str) -> nn.Module:
    """A hollow copy of `module` that stops at its first layer: computes the shape of the layers' input."""
    return _hollow_around(module, path, lambda i, layer: _Exit(layer))


def epilogue(module: nn.Module, path: str, returned: Sequence[int | None]) -> nn.Module:
    """A hollow copy of `module` whose layers pass on the input of `run`: computes the shape of the module's output.

    returned: as for `carve`.
    """
    return _hollow_around(module, path, lambda i, layer: Absent(layer, returned[i] if returned else None))


def _hollow_around(module: nn.Module, path: str, instead: Callable[[int, nn.Module], nn.Module]) -> nn.Module:
    """A hollow copy of `module` with other layers, `instead(index, layer)`.

    The first one gets a parameter, since hollow parts have none: models look up their own dtype.
    """
    shell = _hollow(module)
    layers = shell.get_submodule(path)
    for i, (key, layer) in enumerate(layers._modules.items()):
        assert layer is not None
        layers._modules[key] = instead(i, layer)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    first = next(layers.children())
    first.register_parameter("dtype_of_the_model", nn.Parameter(torch.empty((), dtype=dtype, device="meta")))
    return shell


def run(
    module: nn.Module,
    first_layer: nn.Module,
    kwargs: dict[str, Any],
    *,
    hidden: Tensor | None = None,
    enter: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Any, bool]:
    """Call `module(**kwargs)`; returns (its output, False), or (hidden state, True) if a cut ends it.

    hidden: replaces the input of `first_layer`.
    enter: (given) -> replacement of the input of `first_layer`; may call `leave`.
    Raises RuntimeError if the forward never reached `first_layer` (layer drop).
    """
    if takes(module, "use_cache"):  # a recomputed layer would find its own keys in the cache
        kwargs = {**kwargs, "use_cache": False}
    entered = hidden is None and enter is None

    def replace(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal entered
        entered = True
        given = hidden_argument(args, kwargs)
        return replaced(args, kwargs, given, enter(given) if enter is not None else hidden)

    if not entered:
        check_entry(first_layer)
    leave_as_it_was = None if entered else _before(first_layer, replace)
    token = _hidden.set(hidden)
    try:
        output, left_early = module(**kwargs), False
    except _Leave as leave:
        output, left_early = leave.hidden, True
    except (RuntimeError, StopIteration) as error:  # StopIteration: a model reads the dtype of a part without weights
        if not _is_cut(module) or ("meta" not in str(error) and isinstance(error, RuntimeError)):
            raise
        name = type(module).__name__
        if hidden is None:
            raise ValueError(
                f"{name} cannot be cut: before its layers it uses weights that are registered after them and belong to "
                "its last stage. Keep this module on one stage"
            ) from error
        raise ValueError(
            f"{name} cannot start after its first layers: between its embeddings and its layers it uses weights that "
            "only its first stage has (learned positions added to inputs_embeds). Keep this module on one stage"
        ) from error
    finally:
        _hidden.reset(token)
        if leave_as_it_was is not None:
            leave_as_it_was()
    if not entered:
        raise RuntimeError(
            f"{type(module).__name__} skipped its layer {type(first_layer).__name__}, where the hidden state enters: "
            "set layer drop (layerdrop, encoder_layerdrop) to 0"
        )
    return output, left_early


def _before(layer: nn.Module, change: Callable[..., tuple[Any, Any]]) -> Callable[[], None]:
    """Let change(layer, args, kwargs) replace the arguments of `layer`; returns a function that undoes this.

    This is a hook, unless layer.compile() was called: compiled code contains the hooks, and they must not raise there.
    """
    compiled = getattr(layer, "_compiled_call_impl", None)
    if compiled is None:
        # First, as in compiled code: other hooks must see the replaced arguments.
        return layer.register_forward_pre_hook(change, with_kwargs=True, prepend=True).remove

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(layer, args, kwargs)
        return compiled(*args, **kwargs)

    layer.__dict__["_compiled_call_impl"] = call
    return partial(layer.__dict__.__setitem__, "_compiled_call_impl", compiled)


def _is_cut(module: nn.Module) -> bool:
    """True if a part of the module is hollow."""
    return any(
        isinstance(value, Tensor) and value.is_meta for part in module.modules() for value in vars(part).values()
    )


def leave(hidden: Tensor) -> NoReturn:
    """Called inside `enter`: end the forward here, with this hidden state."""
    raise _Leave(hidden)


def ending_at(layer: nn.Module) -> RemovableHandle:
    """Inside, `run` ends at the call of `layer` and returns its input."""

    def end(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        leave(args[0] if args else next(iter(kwargs.values())))

    return layer.register_forward_pre_hook(end, with_kwargs=True)


def changing_output(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Inside, change(hidden state) replaces the hidden state that `layer` returns, alone or first in a tuple."""

    def replace(_: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return layer.register_forward_hook(replace)


def clone(module: M) -> M:
    """Copy of a module as a new object: parameters, buffers and children are shared, their tables are not.

    Compiled code belongs to the old object; the new one has none.
    """
    new = type(module).__new__(type(module))
    new.__dict__.update(module.__dict__)
    new.__dict__.pop("_compiled_call_impl", None)
    for key, value in module.__dict__.items():
        if isinstance(value, dict) and (key in ("_parameters", "_buffers", "_modules") or key.endswith("_hooks")):
            new.__dict__[key] = value.copy()
    return new


def _hollow(module: nn.Module) -> nn.Module:
    """The structure of `module` with meta tensors for parameters and buffers, none of them registered."""
    shell = clone(module)
    _hollow_tensors(shell)
    for key, buffer in list(shell._buffers.items()):
        if buffer is not None:
            del shell._buffers[key]
            shell.__dict__[key] = torch.empty_like(buffer, device="meta")
    for key, child in shell._modules.items():
        shell._modules[key] = None if child is None else _hollow(child)
    return shell


def _meta_forward(shell: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a hollow module. It moves input tensors to meta and returns zeros of the right shape."""
    device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), torch.device("meta"))

    def place(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    made = type(shell).forward(shell, *map(place, args), **{key: place(value) for key, value in kwargs.items()})
    return torch.zeros((), dtype=made.dtype, device=device).expand(made.shape)


def _hollow_tensors(shell: nn.Module) -> None:
    for key, parameter in list(shell._parameters.items()):
        if parameter is not None:
            del shell._parameters[key]
            shell.__dict__[key] = torch.empty_like(parameter, device="meta", requires_grad=False)
