"""Cuts a HuggingFace module into stages by module path; nothing is written per model family.

A stage is the module with only its own parts: a structural clone that shares parameters with the original, in which

- layers outside [start, stop) of the repeated block list hand their input on and hold no parameters;
- what is registered before the list (embeddings, convolutions) is real on the first stage, what comes after it (norms,
  heads) on the last; elsewhere their parameters are on the meta device, where they have shapes but cost nothing.

Every stage runs the module's own forward. The hidden state comes in through a pre-hook on the first present layer and
leaves through a hook on the last one, which ends the forward by an exception, so what follows never runs. A module
that takes ``inputs_embeds`` is given the hidden state there (positions, rotary tables and masks are then computed as
usual); any other runs its beginning on meta tensors and gets the hidden state at the hook.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from interlace.attention.hf import current_plan, use_plan


class _Exit(Exception):
    """Carries the hidden state out of a forward that is not to go on."""

    def __init__(self, hidden: Tensor):
        super().__init__("left a sliced forward")
        self.hidden = hidden


def find_layers(module: nn.Module) -> str:
    """Path of the list of repeated blocks: the ModuleList with most parameters whose members are of one class."""
    candidates = [
        (sum(p.numel() for p in child.parameters()), path)
        for path, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and len(child) > 0 and len({type(layer) for layer in child}) == 1
    ]
    if not candidates:
        raise ValueError(
            f"{type(module).__name__} has no ModuleList of repeated blocks; name the list with layers='path.to.list'"
        )
    return max(candidates)[1]


def split_names(module: nn.Module, path: str) -> tuple[list[str], list[str]]:
    """Submodule and parameter paths registered before and after the layer list, outside the list's own ancestors.

    HuggingFace modules register in the order of execution, which is the rule that this relies on.
    """
    before: list[str] = []
    after: list[str] = []

    def walk(parent: nn.Module, prefix: str, rest: list[str]) -> None:
        passed = False
        # A parent's own parameters (class tokens, position tables) are used before its children.
        before.extend(f"{prefix}{name}" for name in parent._parameters)
        for name, child in parent._modules.items():
            if rest and name == rest[0]:
                passed = True
                if len(rest) > 1 and child is not None:
                    walk(child, f"{prefix}{name}.", rest[1:])
            elif child is not None:
                (after if passed else before).append(f"{prefix}{name}")

    walk(module, "", path.split("."))
    return before, after


def clone(module: nn.Module) -> nn.Module:
    """Structural copy: new module objects (own hooks, own mode), the same parameters and buffers."""
    new = copy.copy(module)
    for table in ("_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks"):
        new.__dict__[table] = copy.copy(module.__dict__[table])
    for table in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        new.__dict__[table] = copy.copy(module.__dict__[table])
    new.__dict__["_modules"] = {
        name: None if child is None else clone(child) for name, child in module._modules.items()
    }
    return new


def _to_meta(module: nn.Module) -> None:
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to("meta")


class SlicedModule:
    """Layers ``[start, stop)`` of ``module``: ``run`` executes its own forward between those.

    ``module`` (the attribute) is the clone; its present parameters are those not on the meta device, under the same
    names as in the original. Raises ValueError for an empty or impossible range.
    """

    def __init__(self, module: nn.Module, path: str, start: int, stop: int, *, checkpointing: bool = False):
        total = len(module.get_submodule(path))  # type: ignore[arg-type]
        if not 0 <= start < stop <= total:
            raise ValueError(f"layers [{start}, {stop}) are not in {type(module).__name__}, which has {total} layers")
        self.is_first, self.is_last = start == 0, stop == total
        self.module = clone(module)
        self._takes_embeddings = "inputs_embeds" in inspect.signature(module.forward).parameters
        layers = self.module.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        for i, layer in enumerate(layers):
            if not start <= i < stop:
                layer.__dict__["_modules"] = {}
                layer.__dict__["_parameters"] = {}
                layer.__dict__["_buffers"] = {}
                layer.forward = _hand_on  # type: ignore[method-assign]
            elif checkpointing:
                layer.forward = _recomputed(layer.forward)  # type: ignore[method-assign]
        before, after = split_names(module, path)
        for absent, names in ((not self.is_first, before), (not self.is_last, after)):
            for name in names if absent else ():
                parent, _, leaf = name.rpartition(".")
                holder = self.module.get_submodule(parent)
                if leaf in holder._parameters:
                    if holder._parameters[leaf] is not None:
                        holder._parameters[leaf] = nn.Parameter(holder._parameters[leaf].detach().to("meta"), False)
                elif any(True for _ in holder.get_submodule(leaf).parameters()):
                    _to_meta(holder.get_submodule(leaf))
        self._enter: Callable[[Tensor], Tensor] | None = None
        self._leave = False
        layers[start].register_forward_pre_hook(self._at_entry, with_kwargs=True)
        layers[stop - 1].register_forward_hook(self._at_exit)

    def _at_entry(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._enter is None:
            return None
        if args:
            return (self._enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._enter(kwargs["hidden_states"])}

    def _at_exit(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._leave:
            raise _Exit(output[0] if isinstance(output, tuple) else output)

    def run(self, inputs: dict[str, Any], enter: Callable[[Tensor], Tensor] | None = None) -> Any:
        """The module's forward on ``inputs``; ``enter`` replaces the hidden state that reaches the first layer.

        Returns the hidden state after the last present layer, or on the last stage the module's own output.
        """
        self._enter, self._leave = enter, not self.is_last
        try:
            return self.module(**inputs)
        except _Exit as exit:
            return exit.hidden
        finally:
            self._enter, self._leave = None, False

    def run_hidden(self, hidden: Tensor, inputs: dict[str, Any], meta_inputs: dict[str, Any]) -> Any:
        """Continue from ``hidden`` of an earlier stage; ``meta_inputs`` feed the absent beginning, if it has to run."""
        if self._takes_embeddings:
            return self.run({**inputs, "inputs_embeds": hidden})
        return self.run({**inputs, **meta_inputs}, lambda _: hidden)

    def capture(self, inputs: dict[str, Any]) -> Tensor:
        """The hidden state that reaches the first layer."""

        def leave(hidden: Tensor) -> Tensor:
            raise _Exit(hidden)

        found = self.run(inputs, leave)
        assert isinstance(found, Tensor)
        return found


def meta_clone(module: nn.Module) -> nn.Module:
    """The module with every parameter and buffer on the meta device: tells shapes without computing."""
    new = clone(module)
    _to_meta(new)
    return new


def _hand_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` that keeps no activations and runs again in backward, under the attention plan of its first run."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        plan = current_plan()

        def run(*args: Any) -> Any:
            with use_plan(plan):
                return forward(*args, **kwargs)

        return recompute(run, *args, use_reentrant=False)

    return wrapped


def present_parameters(module: nn.Module, prefix: str, *, remove_duplicate: bool = True) -> list[tuple[str, Any]]:
    """Named parameters that are not on the meta device."""
    found: Sequence[tuple[str, nn.Parameter]] = list(
        module.named_parameters(prefix=prefix, remove_duplicate=remove_duplicate)
    )
    return [(name, parameter) for name, parameter in found if parameter.device.type != "meta"]
