"""Ready plans for HuggingFace models, derived from the structure of their blocks.

A block is cut only if all its parts are recognized. Otherwise `plan_for` raises an error that names the unknown part:

    attention   q_proj, k_proj, v_proj, or qkv in thirds, then one output projection; norms within heads
    MLP         gate_proj and up_proj, fc1, or gate_up_proj in halves, then one output projection
    experts     whole on every rank, each rank routes its own rows
    adapters    of the layers above (LoRA), which are cut with their layers
    the rest    norms and scales that work on each token alone; no other parameters

If transformers has its own plan for a model (`base_model_tp_plan`), layers that it does not cut are not cut here.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import nn

from interlace.parallel.adapters import is_adapted, linear_of

COLUMNS = {  # layers cut by outputs -> style
    "q_proj": "column",
    "k_proj": "column",
    "v_proj": "column",
    "gate_proj": "column",
    "up_proj": "column",
    "fc1": "column",
    "linear_fc1": "column",
    "c_fc": "column",
    "gate_up_proj": "column_halves",
    "weights_in": "column_halves",
    "qkv": "column_thirds",
}
ATTENTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv",))
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "projection_layer", "dense", "proj")
MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("weights_in",), "weights_out"),
    (("fc1",), "fc2"),
    (("linear_fc1",), "linear_fc2"),
    (("c_fc",), "c_proj"),
)
PARTS = {"column": 1, "column_halves": 2, "column_thirds": 3}


class Unknown(Exception):
    """No plan can be derived for a part. The message is the reason."""


def plan_for(module: nn.Module) -> dict[str, str]:
    """The plan of `tensor_parallel` for a HuggingFace model, a block of one, or the models inside `module`.

    Other modules (a projector) are left out, for the caller to add. Embeddings and head can be made "vocabulary"
    (`interlace.parallel.vocabulary.vocabulary_plan`). Raises ValueError if there is no block, or if a block has an
    unknown part (named in the message).
    """
    try:
        return derived_styles(module)
    except Unknown as error:
        raise ValueError(
            f"no tensor-parallel plan for {type(module).__name__}: {error}. Write a plan, module path -> style (see "
            "interlace.parallel.tensor)"
        ) from None


def derived_styles(module: nn.Module) -> dict[str, str]:
    """As `plan_for`, but raises Unknown if no style can be derived."""
    parts = dict(module.named_modules())
    lists = {path: part for path, part in parts.items() if isinstance(part, nn.ModuleList)}
    blocks = {path: part for path, part in lists.items() if any(map(_has_attention, part))}
    # A list of heads or experts inside a block belongs to that block.
    blocks = {path: part for path, part in blocks.items() if not any(_inside(path, outer) for outer in blocks)}
    styles: dict[str, str] = {}
    if not blocks:
        if not _has_attention(module):
            raise Unknown(_unknown_attention(module))
        styles = _block(module, "")
    for path, block_list in blocks.items():
        for index, block in enumerate(block_list):
            if next(block.parameters(), None) is not None:  # otherwise a placeholder for a block of another stage
                styles |= _block(block, f"{path}.{index}")
        styles[path] = "layers"
        _check_own_styles(parts, path, styles)
    for path in blocks:
        models = (outer for outer in (path, *ancestors(path)) if hasattr(parts[outer], "base_model_prefix"))
        model = min(models, key=len, default=None)
        if model is not None:
            styles |= dict.fromkeys(_outside_blocks(parts[model], model, set(blocks)), "replicate")
    return styles


def _inside(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}.")


def ancestors(path: str) -> Iterator[str]:
    """The paths of the modules around a module, innermost first; "" is the root."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _outside_blocks(module: nn.Module, path: str, blocks: set[str]) -> Iterator[str]:
    """Paths of modules with parameters in `module` outside its blocks."""
    if path in blocks:
        return
    if not any(_inside(block, path) or not path for block in blocks):
        if next(module.parameters(), None) is not None:
            yield path
        return
    if any(parameter is not None for parameter in module._parameters.values()):
        yield path
    for name, child in module.named_children():
        yield from _outside_blocks(child, _joined(path, name), blocks)


# ---------------------------------------------------------------------- a block


def _is_linear(module: nn.Module, name: str) -> bool:
    """True if the module has a linear layer of that name, with or without an adapter."""
    return linear_of(getattr(module, name, None)) is not None


def _has_attention(module: nn.Module) -> bool:
    return any(_layers_of_attention(part) for part in module.modules())


def _unknown_attention(module: nn.Module) -> str:
    """Error text for a module without a known attention."""
    for path, part in module.named_modules():
        layers = [name for name, child in part.named_children() if hasattr(child, "weight")]
        if path and "attention" in type(part).__name__.lower() and layers:
            names = ", ".join(layers)
            return f"{path} ({type(part).__name__}) has the layers {names}; supported are q_proj, k_proj and v_proj"
    return "it has no attention"


def _layers_of_attention(module: nn.Module) -> tuple[str, ...]:
    for names in ATTENTIONS:
        if all(_is_linear(module, name) for name in names):
            return names
    return ()


def _block(block: nn.Module, path: str) -> dict[str, str]:
    """The styles of the modules of one block. Raises Unknown."""
    attentions = [name for name, part in block.named_modules() if _layers_of_attention(part)]
    if len(attentions) != 1:
        reason = f"has {len(attentions)} supported attentions, not one" if attentions else "has no supported attention"
        raise Unknown(f"{path or type(block).__name__} ({type(block).__name__}) {reason}")
    attention = attentions[0]
    if not attention:  # the module itself is an attention
        return _attention(block, path)[0]
    styles, hidden = _attention(block.get_submodule(attention), _joined(path, attention))
    if direct := [name for name, parameter in block._parameters.items() if parameter is not None]:
        _check_each_token(block, path, hidden, direct)
        styles[path] = "sequence"
    names = {name: child for name, child in block.named_children() if name != attention.partition(".")[0]}
    if attention.count("."):
        raise Unknown(f"{_joined(path, attention)} is nested too deep in its block")
    for in_layers, out_layer in MLPS:  # blocks that hold the MLP layers directly (Whisper)
        if out_layer in names and all(linear_of(names.get(name)) is not None for name in (*in_layers, out_layer)):
            styles |= _mlp(block, path, in_layers, out_layer, hidden)
            names = {name: child for name, child in names.items() if name not in (*in_layers, out_layer)}
    for name, child in names.items():
        child_path = _joined(path, name)
        if next(child.parameters(), None) is None:
            continue
        if "experts" in dict(child.named_children()):
            _check_experts(child, child_path)
            styles[child_path] = "sequence"
        elif of_mlp := _known_mlp(child, child_path, hidden):
            styles |= {child_path: "gather", **of_mlp}
        else:
            _check_each_token(child, child_path, hidden, [key for key, _ in child.named_parameters()])
            styles[child_path] = "sequence"
    return styles


def _attention(module: nn.Module, path: str) -> tuple[dict[str, str], int]:
    """The styles of the layers of an attention, and the size of the hidden state. Raises Unknown."""
    in_layers = _layers_of_attention(module)
    out_layers = [name for name in OUTPUT_PROJECTIONS if _is_linear(module, name)]
    label = f"{path or 'it'} ({type(module).__name__})"
    if len(out_layers) != 1:
        raise Unknown(f"{label} does not have exactly one supported output projection")
    layers = {name: getattr(module, name) for name in (*in_layers, out_layers[0])}
    size = getattr(module, "head_dim", None)
    in_layer, out_layer = layers[in_layers[0]], layers[out_layers[0]]
    queries = in_layer.out_features // PARTS[COLUMNS[in_layers[0]]]
    if not isinstance(size, int) or queries % size or out_layer.in_features != queries:
        raise Unknown(f"the head size of {label} is unknown: head_dim is missing or does not match its layers")
    styles = {_joined(path, name): COLUMNS[name] for name in in_layers} | {_joined(path, out_layers[0]): "row"}
    for name, child in module.named_children():
        parameters = list(child.parameters())
        if name in layers or not parameters:
            continue
        if list(child.children()) or any(tuple(parameter.shape) != (size,) for parameter in parameters):
            raise Unknown(f"{_joined(path, name)} ({type(child).__name__}) is not applied per head")
        styles[_joined(path, name)] = "heads"
    if any(parameter is not None for parameter in module._parameters.values()):
        raise Unknown(f"{label} has parameters of its own ({', '.join(module._parameters)})")
    styles[path] = "gather_narrow" if _takes_width_of_input(type(module).forward) else "gather"
    return styles, out_layer.out_features


def _known_mlp(module: nn.Module, path: str, hidden: int) -> dict[str, str]:
    """The styles of the layers of a gated or plain MLP; empty for any other module."""
    parts = dict(module.named_modules())
    owners = [name for name, part in parts.items() if next(part.parameters(recurse=False), None) is not None]
    layers = {next((outer for outer in ancestors(name) if is_adapted(parts[outer])), name) for name in owners}
    for in_layers, out_layer in MLPS:
        if layers == {*in_layers, out_layer} and all(_is_linear(module, name) for name in layers):
            return _mlp(module, path, in_layers, out_layer, hidden)
    return {}


def _mlp(module: nn.Module, path: str, in_layers: tuple[str, ...], out_layer: str, hidden: int) -> dict[str, str]:
    features = getattr(module, out_layer).in_features
    for name in in_layers:
        layer = getattr(module, name)
        if layer.in_features != hidden or layer.out_features != features * PARTS[COLUMNS[name]]:
            raise Unknown(f"{_joined(path, name)} has {layer.out_features} outputs, and {out_layer} {features} inputs")
    return {_joined(path, name): COLUMNS[name] for name in in_layers} | {_joined(path, out_layer): "row"}


def _check_experts(module: nn.Module, path: str) -> None:
    """Raise Unknown for experts that are separate modules."""
    experts = module.get_submodule("experts")
    if isinstance(experts, nn.ModuleList) or not list(experts.parameters(recurse=False)):
        raise Unknown(
            f"{path} ({type(module).__name__}) has its experts as separate modules: each rank would train others, so "
            "gradients could not be summed"
        )


def _check_each_token(module: nn.Module, path: str, hidden: int, names: list[str]) -> None:
    """Raise Unknown unless the parameters only scale or shift the features of each token."""
    if any(tuple(module.get_parameter(name).shape) != (hidden,) for name in names):
        raise Unknown(f"{path} ({type(module).__name__}) is not a supported attention, MLP or norm")


@cache  # reading the source takes as long as all the rest
def _takes_width_of_input(forward: Callable[..., Any]) -> bool:
    """True if the code joins heads to the width of its input (SigLIP in transformers 4), not to that of the heads."""
    try:
        code = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    width = re.search(r"\w+, \w+, (\w+) = hidden_states\.(?:shape|size\(\))", code)
    return width is not None and bool(re.search(rf"\.reshape\([^()]*\b{width[1]}\)", code))


# ---------------------------------------------------------------------- transformers' own plans


def _check_own_styles(parts: dict[str, Any], path: str, styles: dict[str, str]) -> None:
    """Raise Unknown if transformers' own plan keeps a layer whole that `styles` cuts."""
    owner = next((parts[outer] for outer in ancestors(path) if getattr(parts[outer], "config", None) is not None), None)
    own_plan: dict[str, str] = getattr(getattr(owner, "config", None), "base_model_tp_plan", None) or {}
    for layer, style in styles.items():
        if style not in ("column", "row") or not _inside(layer, path):
            continue
        for pattern, own_style in own_plan.items():
            if fnmatch.fnmatchcase(f".{layer}", f"*.{pattern}") and own_style in _NOT_CUT.get(style, ()):
                if not _follows_fused(layer, styles):
                    raise Unknown(f"{layer} is not sharded by transformers' own plan ({own_style!r})")


_NOT_CUT = {
    "column": ("colwise_gather_output", "colwise_rep", "replicated"),
    "row": ("rowwise_split_input", "rowwise_rep", "replicated"),
}


def _follows_fused(path: str, styles: dict[str, str]) -> bool:
    """True if a row layer follows fused halves or thirds. These are cut so that nothing has to be joined."""
    parent = path.rpartition(".")[0]
    return any(
        _inside(other, parent) and style in ("column_halves", "column_thirds") for other, style in styles.items()
    )
