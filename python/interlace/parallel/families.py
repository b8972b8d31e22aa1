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
BACK_FROM_ATTENTION = ("o_proj", "out_proj", "projection_layer", "dense", "proj")
MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("weights_in",), "weights_out"),
    (("fc1",), "fc2"),
    (("linear_fc1",), "linear_fc2"),
    (("c_fc",), "c_proj"),
)
_PARTS = {"column": 1, "column_halves": 2, "column_thirds": 3}


class Unknown(Exception):
    """No plan can be derived for a part. The message is the reason."""


def plan_for(module: nn.Module) -> dict[str, str]:
    """The plan of `tensor_parallel` for a HuggingFace model, a block of one, or the models inside `module`.

    Other modules (a projector) are left out, for the caller to add. Embeddings and head can be made "vocabulary"
    (`interlace.parallel.vocabulary.vocabulary_plan`). Raises ValueError if there is no block, or if a block has an
    unknown part (named in the message).
    """
    try:
        return derived_plan(module)
    except Unknown as error:
        raise ValueError(
            f"no plan is known for {type(module).__name__}: {error}. Write one, module path -> style (see "
            "interlace.parallel.tensor)"
        ) from None


def derived_plan(module: nn.Module) -> dict[str, str]:
    """As `plan_for`, but raises Unknown if no plan can be derived."""
    parts = dict(module.named_modules())
    lists = {path: part for path, part in parts.items() if isinstance(part, nn.ModuleList)}
    blocks = {path: part for path, part in lists.items() if any(map(_has_attention, part))}
    # A list of heads or experts inside a block belongs to that block.
    blocks = {path: part for path, part in blocks.items() if not any(_inside(path, outer) for outer in blocks)}
    plan: dict[str, str] = {}
    if not blocks:
        if not _has_attention(module):
            raise Unknown(_unknown_attention(module))
        plan = _block(module, "")
    for path, there in blocks.items():
        for index, block in enumerate(there):
            if next(block.parameters(), None) is not None:  # otherwise a placeholder for a block of another stage
                plan |= _block(block, f"{path}.{index}")
        plan[path] = "layers"
        _agree(parts, path, plan)
    for path in blocks:
        model = min((outer for outer in (path, *around(path)) if _is_model(parts[outer])), key=len, default=None)
        if model is not None:
            plan |= dict.fromkeys(_apart(parts[model], model, set(blocks)), "replicate")
    return plan


def _inside(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}.")


def around(path: str) -> Iterator[str]:
    """The paths of the modules around a module, innermost first; "" is the root."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_model(module: nn.Module) -> bool:
    """True if the module is a HuggingFace model, or a part of one that could be."""
    return hasattr(module, "base_model_prefix")


def _apart(module: nn.Module, path: str, blocks: set[str]) -> Iterator[str]:
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
        yield from _apart(child, _joined(path, name), blocks)


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
            return f"{path} ({type(part).__name__}) has {', '.join(layers)}, where q_proj, k_proj and v_proj are known"
    return "it has no attention"


def _layers_of_attention(module: nn.Module) -> tuple[str, ...]:
    for names in ATTENTIONS:
        if all(_is_linear(module, name) for name in names):
            return names
    return ()


def _block(block: nn.Module, path: str) -> dict[str, str]:
    """The plan of one block. Raises Unknown."""
    attentions = [name for name, part in block.named_modules() if _layers_of_attention(part)]
    if len(attentions) != 1:
        what = f"has {len(attentions)} attentions that are known" if attentions else "has no attention that is known"
        raise Unknown(f"{path or type(block).__name__} ({type(block).__name__}) {what}")
    here = attentions[0]
    if not here:  # the module itself is an attention
        return _attention(block, path)[0]
    plan, hidden = _attention(block.get_submodule(here), _joined(path, here))
    if direct := [name for name, parameter in block._parameters.items() if parameter is not None]:
        _check_each_token(block, path, hidden, direct)
        plan[path] = "sequence"
    names = {name: child for name, child in block.named_children() if name != here.partition(".")[0]}
    if here.count("."):
        raise Unknown(f"{_joined(path, here)} lies deeper inside its block than is known")
    for into, back in MLPS:  # blocks that hold the MLP layers directly (Whisper)
        if back in names and all(linear_of(names.get(name)) is not None for name in (*into, back)):
            plan |= _mlp(block, path, into, back, hidden)
            names = {name: child for name, child in names.items() if name not in (*into, back)}
    for name, child in names.items():
        where = _joined(path, name)
        if next(child.parameters(), None) is None:
            continue
        if "experts" in dict(child.named_children()):
            plan[where] = _experts(child, where)
        elif found := _known_mlp(child, where, hidden):
            plan |= {where: "gather", **found}
        else:
            _check_each_token(child, where, hidden, [key for key, _ in child.named_parameters()])
            plan[where] = "sequence"
    return plan


def _attention(module: nn.Module, path: str) -> tuple[dict[str, str], int]:
    """The plan of an attention, and the size of the hidden state. Raises Unknown."""
    into = _layers_of_attention(module)
    back = [name for name in BACK_FROM_ATTENTION if _is_linear(module, name)]
    where = f"{path or 'it'} ({type(module).__name__})"
    if len(back) != 1:
        raise Unknown(f"{where} has no layer back that is known")
    layers = {name: getattr(module, name) for name in (*into, back[0])}
    size = getattr(module, "head_dim", None)
    first, last = layers[into[0]], layers[back[0]]
    queries = first.out_features // _PARTS[COLUMNS[into[0]]]
    if not isinstance(size, int) or queries % size or last.in_features != queries:
        raise Unknown(f"the heads of {where} cannot be told (head_dim, and the sizes of its layers)")
    plan = {_joined(path, name): COLUMNS[name] for name in into} | {_joined(path, back[0]): "row"}
    for name, child in module.named_children():
        parameters = list(child.parameters())
        if name in layers or not parameters:
            continue
        if list(child.children()) or any(tuple(parameter.shape) != (size,) for parameter in parameters):
            raise Unknown(f"{_joined(path, name)} ({type(child).__name__}) is not applied to each head alone")
        plan[_joined(path, name)] = "heads"
    if any(parameter is not None for parameter in module._parameters.values()):
        raise Unknown(f"{where} has parameters of its own ({', '.join(module._parameters)})")
    plan[path] = "gather_narrow" if _takes_width_of_input(type(module).forward) else "gather"
    return plan, last.out_features


def _known_mlp(module: nn.Module, path: str, hidden: int) -> dict[str, str]:
    """The plan of the layers of a gated or plain MLP; empty for any other module."""
    parts = dict(module.named_modules())
    held = [name for name, part in parts.items() if next(part.parameters(recurse=False), None) is not None]
    layers = {next((outer for outer in around(name) if is_adapted(parts[outer])), name) for name in held}
    for into, back in MLPS:
        if layers == {*into, back} and all(_is_linear(module, name) for name in layers):
            return _mlp(module, path, into, back, hidden)
    return {}


def _mlp(module: nn.Module, path: str, into: tuple[str, ...], back: str, hidden: int) -> dict[str, str]:
    features = getattr(module, back).in_features
    for name in into:
        layer = getattr(module, name)
        if layer.in_features != hidden or layer.out_features != features * _PARTS[COLUMNS[name]]:
            raise Unknown(f"{_joined(path, name)} has {layer.out_features} outputs, and {back} {features} inputs")
    return {_joined(path, name): COLUMNS[name] for name in into} | {_joined(path, back): "row"}


def _experts(module: nn.Module, path: str) -> str:
    experts = module.get_submodule("experts")
    if isinstance(experts, nn.ModuleList) or not list(experts.parameters(recurse=False)):
        raise Unknown(
            f"{path} ({type(module).__name__}) keeps its experts as modules, of which each rank would train others: "
            "their gradients could not be summed"
        )
    return "sequence"


def _check_each_token(module: nn.Module, path: str, hidden: int, names: list[str]) -> None:
    """Raise Unknown unless the parameters only scale or shift the features of each token."""
    if any(tuple(module.get_parameter(name).shape) != (hidden,) for name in names):
        raise Unknown(f"{path} ({type(module).__name__}) is no attention, MLP or norm that is known")


@cache  # reading the source takes as long as the rest of a plan
def _takes_width_of_input(forward: Callable[..., Any]) -> bool:
    """True if the code joins heads to the width of its input (SigLIP in transformers 4), not to that of the heads."""
    try:
        code = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    width = re.search(r"\w+, \w+, (\w+) = hidden_states\.(?:shape|size\(\))", code)
    return width is not None and bool(re.search(rf"\.reshape\([^()]*\b{width[1]}\)", code))


# ---------------------------------------------------------------------- transformers' own plans


def _agree(parts: dict[str, Any], path: str, plan: dict[str, str]) -> None:
    """Raise Unknown if transformers' own plan keeps a layer whole that `plan` cuts."""
    owner = next((parts[outer] for outer in around(path) if getattr(parts[outer], "config", None) is not None), None)
    theirs: dict[str, str] = getattr(getattr(owner, "config", None), "base_model_tp_plan", None) or {}
    for inside, style in plan.items():
        if style not in ("column", "row") or not _inside(inside, path):
            continue
        for pattern, meaning in theirs.items():
            if fnmatch.fnmatchcase(f".{inside}", f"*.{pattern}") and meaning in _NOT_CUT.get(style, ()):
                if not _follows_fused(inside, plan):
                    raise Unknown(f"{inside} is left whole by transformers' own plan ({meaning!r})")


_NOT_CUT = {
    "column": ("colwise_gather_output", "colwise_rep", "replicated"),
    "row": ("rowwise_split_input", "rowwise_rep", "replicated"),
}


def _follows_fused(path: str, plan: dict[str, str]) -> bool:
    """True if a row layer follows fused halves or thirds. These are cut so that nothing has to be joined."""
    around = path.rpartition(".")[0]
    return any(_inside(other, around) and style in ("column_halves", "column_thirds") for other, style in plan.items())
