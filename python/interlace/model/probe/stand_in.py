"""Stand-in of a model for probes: the model's own code on weights that take almost no memory.

`stand_in` copies the structure of a model (configs, modules, hooks; no weights, so the model may be on the meta device)
and gives it random weights. Large weights are views of a short random vector (entry i, j is vector[i + 3 j]). Inside
`cheaply`, a product with a large weight sums over few of its input channels only, chosen once per shape. Of many
identical layers only the first computes; the others pass the hidden state on. Mixing between tokens does not depend on
widths, depths or values. So a probe of an 8B model takes a fraction of a second and some megabytes.

Random weights reveal more than real ones: a gate that starts at zero would hide effects that appear after training.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from interlace.model.stages.slice import Absent, captures

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SMALL = 1 << 18  # weights up to this number of elements are real, and products with them exact
CHANNELS = 32  # input channels that a product with a larger weight sums over
INDEX = re.compile(r"(layer|block)?_?(idx|index|id|number|i)")
KEPT = 8  # layers; see stand_in
CHUNK = 16  # tokens


class Unanswerable(Exception):
    """Raised if no stand-in of a model can be made; the message has the reason."""


def stand_in(module: nn.Module, *paths: str, keep: int = KEPT) -> nn.Module:
    """A copy of `module` as described above, in evaluation mode on the CPU; `paths` lead to its lists of layers.

    keep: maximum number of layers that all compute. Longer lists compute one layer of each kind.
    Must be called inside `cheaply`. Raises Unanswerable for weights that are not floating-point (quantised ones).
    """
    generator = torch.Generator().manual_seed(0)
    repeated: dict[str, dict[int, int]] = {}
    memo: dict[int, Any] = {}
    for path in paths:
        layers = module.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        repeated[path] = _repeated(module, layers) if len(layers) > keep else {}
        memo |= {id(layers[i]): _Again(layers[i]) for i in repeated[path]}
    repeats = tuple(f"{path}.{i}." for path, indices in repeated.items() for i in indices)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.is_floating_point():
            raise Unanswerable(f"{name} is {parameter.dtype}")
        if not name.startswith(repeats) and id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(_random(name, parameter.shape, generator), requires_grad=False)
    for buffer in module.buffers():
        if buffer.is_meta:
            memo[id(buffer)] = _plausible(buffer, generator)
        elif buffer.is_floating_point():
            memo[id(buffer)] = buffer.detach().to("cpu", torch.float32, copy=True)
    for part in module.modules():  # recurrent states from the model's last run, with their graph
        memo.update({id(x): x.detach() for x in vars(part).values() if isinstance(x, Tensor) and not x.is_leaf})
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        # Chunked recurrences pad the last chunk, which costs chunk_size squared.
        size: Any = vars(part).get("chunk_size")
        if isinstance(size, int) and size > CHUNK:
            vars(part)["chunk_size"] = CHUNK
    for path, indices in repeated.items():
        kept = copied.get_submodule(path)
        assert isinstance(kept, nn.ModuleList)
        for i, like in indices.items():
            follower = kept[i]
            assert isinstance(follower, _Again)
            kept[like].register_forward_hook(follower.learn)
    _fill_buffers(module, copied)
    _large.get().update(p.untyped_storage().data_ptr() for p in copied.parameters() if p.numel() > SMALL)
    set_experts = getattr(copied, "set_experts_implementation", None)
    if set_experts is not None:
        set_experts("eager")  # expert by expert: a fused product would gather all experts' weights
    return copied.eval()


def _repeated(module: nn.Module, layers: nn.ModuleList) -> dict[int, int]:
    """Index of each layer that is identical to an earlier one -> index of the first of its kind."""
    first: dict[Any, int] = {}
    representatives = {i: first.setdefault(kind_of(module, layer, i, len(layers)), i) for i, layer in enumerate(layers)}
    return {i: like for i, like in representatives.items() if i != like}


def kind_of(model: nn.Module, layer: nn.Module, index: int, count: int) -> tuple[Any, ...]:
    """Key of a layer's kind, equal for identical layers: classes, code, sizes, settings, hooks; without the index."""
    settings = [
        value[index]
        for config in _configs(getattr(model, "config", None))
        for value in vars(config).values()
        if isinstance(value, (list, tuple)) and len(value) == count
    ]
    return (repr(settings), *signature(layer))


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Same as `kind_of`, for any module with all its parts. Holds the functions, so that their ids are not reused."""
    parts: list[Any] = []
    for name, part in module.named_modules():
        plain = tuple(
            (key, repr(value))
            for key, value in sorted(vars(part).items())
            if isinstance(value, (bool, int, float, str, tuple)) and key[0] != "_" and key != "training"
            and not INDEX.fullmatch(key)
        )  # fmt: skip
        shapes = tuple((key, tuple(p.shape)) for key, p in part._parameters.items() if p is not None)
        forward = type(part).forward
        own = tuple(vars(part).get(key) for key in ("forward", "_old_forward") if key in vars(part))
        hooks = [getattr(hook, "__code__", hook) if captures(hook) else hook for hook in part._forward_hooks.values()]
        hooks += part._forward_pre_hooks.values()
        parts.append((name, type(part), getattr(forward, "__code__", forward), plain, shapes, own, tuple(hooks)))
    return tuple(parts)


def _configs(config: PretrainedConfig | None) -> Iterator[PretrainedConfig]:
    """A config and those inside it."""
    if config is None:
        return
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type"):
            yield from _configs(value)


class _Again(Absent):
    """A layer identical to an earlier one: passes the hidden state on."""

    def learn(self, layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """From now on, return the same type as the original layer: a tensor, or a tuple with it."""
        self._returned = len(output) if isinstance(output, tuple) else None


# ---------------------------------------------------------------------- weights


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Random weights that keep activations near 1. If `shape` is large, a view of few numbers."""
    fan_in = max(shape[1:], default=1)
    if shape.numel() <= SMALL:
        scale = fan_in**-0.5 if len(shape) > 1 else 0.1 if name.endswith("bias") else 0.7
        return torch.randn(shape, generator=generator, device="cpu") * scale
    steps = [3**i for i in reversed(range(len(shape)))]
    room = 1 + sum(step * (size - 1) for step, size in zip(steps, shape))
    numbers = torch.randn(room, generator=generator, device="cpu") * min(fan_in, CHANNELS) ** -0.5
    return numbers.as_strided(tuple(shape), steps)


def _plausible(buffer: Tensor, generator: torch.Generator) -> Tensor:
    """Values for a buffer with known shape only: positions, a causal mask, or numbers between 0.1 and 1."""
    if buffer.dtype == torch.bool:
        return torch.ones(buffer.shape, dtype=torch.bool, device="cpu").tril()
    if not buffer.is_floating_point():
        return torch.arange(buffer.shape[-1] if buffer.dim() else 1, device="cpu").expand(buffer.shape).clone()
    return torch.rand(buffer.shape, generator=generator, device="cpu") * 0.9 + 0.1


def _fill_buffers(module: nn.Module, made: nn.Module) -> None:
    """Let the library initialise modules that have meta buffers and no weights (rotary frequencies)."""
    if not isinstance(made, PreTrainedModel):
        return
    owners = {name: part for name, part in made.named_modules() if isinstance(part, PreTrainedModel)}
    was_meta = {name for name, buffer in module.named_buffers() if buffer.is_meta}
    for name, part in made.named_modules():
        mine = {f"{name}.{key}" if name else key for key in part._buffers}
        if mine & was_meta and not any(True for _ in part.parameters()):
            owner = max((o for o in owners if o == "" or name == o or name.startswith(f"{o}.")), key=len)
            try:
                owners[owner]._init_weights(part)
            except (RuntimeError, AttributeError, TypeError):
                continue  # keeps the values of _plausible: transformers 4 cannot initialise it


# ---------------------------------------------------------------------- products


_large: ContextVar[set[int]] = ContextVar("interlace_large")  # storage addresses of stand-ins' large weights


def _is_large(value: object) -> bool:
    """True for a large weight or a part of one."""
    return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in _large.get()


class _Sampled(TorchFunctionMode):
    """Products with large weights sum over a few input channels; dropout is off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.linear:
            x, weight, *bias = _named(args, kwargs, ("input", "weight", "bias"))
            if _is_large(weight):
                few = _few(weight.shape[-1])
                return func(x[..., few], weight[..., few], *bias)
        elif func in _PRODUCTS and any(map(_is_large, args)) and args[1].dim() > 1:
            a, b = args
            few = _few(b.shape[-2])
            return func(a[..., few], b[..., few, :])
        elif func in _CONVOLUTIONS and _groups(args, kwargs) == 1:
            x, weight, *rest = args if len(args) > 1 else (args[0], kwargs.pop("weight"))
            if _is_large(weight):
                few = _few(weight.shape[1])
                return func(
                    x.movedim(1 - weight.dim(), 0)[few].movedim(0, 1 - weight.dim()), weight[:, few], *rest, **kwargs
                )
        return func(*args, **kwargs)


_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}
_PRODUCTS = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm}
_CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    return [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]


def _groups(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int(kwargs["groups"] if "groups" in kwargs else args[6] if len(args) > 6 else 1)


def _few(channels: int) -> slice:
    """The input channels that are summed: equal in every call, with different offsets in different heads."""
    return slice(None, None, (channels // CHANNELS) | 1)


@contextmanager
def cheaply() -> Iterator[None]:
    """Context for running stand-ins. It does not affect the caller's random generators, devices, dtypes or graphs.

    It uses one thread: the operations are small, and threads would wait for each other on a busy machine.
    """
    threads, large = torch.get_num_threads(), _large.set(set())
    try:
        torch.set_num_threads(1)
        with plainly(), torch.random.fork_rng(devices=[]), torch.no_grad(), _Sampled():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)
        _large.reset(large)


@contextmanager
def plainly() -> Iterator[None]:
    """Inside, new tensors are float32 on the CPU, regardless of the caller's defaults, and autocast is off."""
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)
