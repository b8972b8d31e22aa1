"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen linear layers, created by peft before a model is cut.

A layer ``q_proj`` becomes peft's LoRA layer, which contains ``q_proj.base_layer``, ``q_proj.lora_A.default`` and
``q_proj.lora_B.default``. It is an ordinary part of its block and moves with the block. Trained adapters are written to
a folder that peft loads (`adapter_files`), or added to the weights (`merge_adapters`). After a merge, the model has its
original layers and names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from interlace.model.checkpoints.module_folder import PROJECTOR, projector_weights
from interlace.model.multimodal import MultimodalModel
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.patterns import Names, base_name, is_adapter
from interlace.model.whole.model import new_folder

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

ALL_LINEAR = "all-linear"
MERGE = "merge instead (merge_adapters, or interlace export without --adapter)"
_ADAPTER = "default"  # peft's name for the only adapter


def add_lora(
    model: MultimodalModel,
    *,
    targets: Sequence[str] = (ALL_LINEAR,),
    rank: int = 16,
    alpha: int = 32,
    dropout: float = 0.0,
    use_rslora: bool = False,
    modules_to_save: Sequence[str] = (),
) -> list[str]:
    """Add trainable adapters to `model`, in place; returns the paths of the layers that have one.

    All weights of encoders and of the language model become frozen, except `modules_to_save`. Projectors stay as they
    are, trained or frozen. An adapter adds scale * B(A(dropout(x))), A [rank, in] and B [out, rank], to the output of
    its layer. The scale is alpha / rank, or alpha / sqrt(rank) with use_rslora (arXiv 2312.03732). While the model is
    on meta, the values of A and B are undefined, like the model's own values.

    targets, modules_to_save: patterns (see `interlace.model.patterns`). A name such as ``q_proj`` means the layers of
    the language model whose names end with it. "all-linear" means all linear layers of the language model except its
    head. It does not include experts that a layer stores in one parameter [experts, out, in]; these stay frozen.
    Patterns with wildcards skip trained projectors, because an adapter would freeze them.

    Raises ValueError for patterns that match no linear layer, for tied weights, for a trained projector, and if peft is
    missing.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError("LoRA needs peft, which is not installed: pip install peft") from None
    layers = _targets(model, targets)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = Names(model)
    fully_trained = trained & names.projectors()
    for pattern in modules_to_save:
        fully_trained |= _saved(names, pattern, layers)
    device = next(iter(layers.values())).weight.device
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        use_rslora=use_rslora,
        target_modules=[*layers],
        bias="none",
    )
    with torch.device(device):
        inject_adapter_in_model(config, model)
    adapters = {name for name, _ in model.named_parameters() if is_adapter(name)}
    if len(adapters) != 2 * len(layers):
        raise ValueError(f"peft made adapters of {len(adapters) // 2} layers, expected {len(layers)}")
    model.train_only(adapters | fully_trained)
    return [*layers]


def _targets(model: MultimodalModel, targets: Sequence[str]) -> dict[str, Any]:
    """Path -> linear layer, for all layers that the patterns match."""
    names = Names(model)
    linear = {path: layer for path, layer in model.named_modules() if type(layer) is nn.Linear}
    head: Any = model.language_model.get_output_embeddings()  # type: ignore[operator]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    projectors = {name.rpartition(".")[0] for name in trained & names.projectors()}
    matches: dict[str, Any] = {}
    for pattern in targets:
        if pattern == ALL_LINEAR:
            of_language_model = {path: layer for path, layer in linear.items() if path.startswith(f"{LANGUAGE_MODEL}.")}
            layers = {path: layer for path, layer in of_language_model.items() if layer is not head}
        else:
            layers = {path: layer for path, layer in linear.items() if _names_module(names, pattern, path)}
        if conflicts := sorted(layers.keys() & projectors):
            if not any(sign in pattern for sign in "*?[") or len(conflicts) == len(layers):
                raise ValueError(
                    f"{pattern!r} matches {conflicts[0]} of a fully trained projector, which an adapter would freeze: "
                    "exclude it, or freeze the projector (freeze_projector)"
                )
            layers = {path: layer for path, layer in layers.items() if path not in projectors}
        if not layers:
            if not any(_names_module(names, pattern, path) for path, _ in model.named_modules()):
                names.matching(pattern)  # raises with the nearest name
            raise ValueError(f"{pattern!r} matches no linear layer (torch.nn.Linear): LoRA supports only these")
        matches |= layers
    tied = {name for group in model.tied_parameters() for name in group}
    if conflicts := [path for path in matches if f"{path}.weight" in tied]:
        raise ValueError(
            f"{conflicts[0]} shares its weight with another layer, which an adapter would not change: exclude it"
        )
    return {path: linear[path] for path in linear if path in matches}


def _names_module(names: Names, pattern: str, path: str) -> bool:
    """True if `pattern` names the module at `path`. For the language model, the end of the name is enough."""
    if path.startswith(f"{LANGUAGE_MODEL}.") and path.endswith(f".{pattern}"):
        return True
    return names.names(pattern, path)


def _saved(names: Names, pattern: str, layers: Collection[str]) -> set[str]:
    """Parameters that a pattern of modules_to_save matches. Raises ValueError for a parameter that has an adapter."""
    modules = {name.rpartition(".")[0] for name in names.first}
    named = {path for path in modules if _names_module(names, pattern, path)}
    matches = {first for name, first in names.first.items() if name.rpartition(".")[0] in named}
    if not matches:
        names.matching(pattern)
    if conflicts := [path for path in layers if f"{path}.weight" in matches]:
        raise ValueError(
            f"{pattern!r} in modules_to_save matches {conflicts[0]}, which has an adapter: choose one of the two"
        )
    return matches


# ---------------------------------------------------------------------- export


def adapter_files(
    model: MultimodalModel, folder: Path, *, parts: Collection[str] = (LANGUAGE_MODEL,), base: str = ""
) -> list[str]:
    """Write the trained weights into `folder`, as adapter_config.json and adapter_model.safetensors that peft loads.

    parts: modules of the model that together form the adapter's HuggingFace base model: the language model alone, or
    all modules of a whole checkpoint. The names follow "language_model." or "encoders.<name>.module.".
    base: location of that base model, for the reader of the folder.
    Fully trained modules become peft's modules_to_save. Projectors of encoders outside `parts` are written to
    projector.safetensors (`interlace.model.checkpoints.module_folder.load_projectors` reads it). Returns the names of
    these encoders.

    Raises ValueError for a model without adapters in these parts, for other trained weights outside these parts, for an
    existing folder that is not empty, and for weights that peft's format cannot express: trained weights that are tied,
    or that are around or under an adapter.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    prefixes = [f"{part}." if part == LANGUAGE_MODEL else f"encoders.{part}.module." for part in parts]

    def inside(name: str) -> str | None:
        return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)

    targets = [name for path, _ in lora_layers(model) if (name := inside(path)) is not None]
    if not targets:
        raise ValueError(f"no layer of {', '.join(parts)} has an adapter: export the whole model")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    fully_trained = [name for name in trained if not is_adapter(name)]
    beside = {name: model.encoders[name] for name in model.encoders if name not in parts}
    kept = tuple(f"encoders.{name}.projector." for name in beside)
    if lost := [name for name in trained if inside(name) is None and not name.startswith(kept)]:
        raise ValueError(
            f"{base_name(lost[0])} was trained but is outside {', '.join(parts)}, the base of this adapter: {MERGE}"
        )
    tied = {name for group in model.tied_parameters() for name in group}
    if conflicts := [name for name in fully_trained if name in tied]:
        raise ValueError(
            f"{conflicts[0]} was trained and is tied to another weight, which peft does not support: {MERGE}"
        )
    owners = sorted({own.rpartition(".")[0] for name in fully_trained if (own := inside(name)) is not None})
    saved = [path for path in owners if not any(path.startswith(f"{other}.") for other in owners)]
    if around := [path for path in saved if not path or any(target.startswith(f"{path}.") for target in targets)]:
        raise ValueError(f"{around[0]} was fully trained and contains adapters, which peft does not support: {MERGE}")
    if inner := [path for path in saved if any(path.startswith(f"{target}.") for target in targets)]:
        raise ValueError(f"{base_name(inner[0])} was trained besides its adapter, which peft does not support: {MERGE}")
    tensors = {
        f"base_model.model.{own.replace(f'.{_ADAPTER}.', '.')}": parameter.detach()
        for name, parameter in model.named_parameters()
        if is_adapter(name) and (own := inside(name)) is not None
    }
    for path, module in model.named_modules():
        if (own := inside(path)) in saved:
            tensors |= {f"base_model.model.{own}.{key}": value for key, value in module.state_dict().items()}
    made: LoraConfig = model.peft_config[_ADAPTER]  # type: ignore[index, assignment]
    config = LoraConfig(
        r=made.r,
        lora_alpha=made.lora_alpha,
        lora_dropout=made.lora_dropout,
        use_rslora=made.use_rslora,
        target_modules=targets,
        modules_to_save=saved or None,
        bias="none",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    with new_folder(folder) as new:
        config.save_pretrained(str(new))
        held = {key: tensor.to("cpu").contiguous() for key, tensor in tensors.items()}
        save_file(held, new / "adapter_model.safetensors", metadata={"format": "pt"})
        if projectors := projector_weights(beside):
            save_file(projectors, new / PROJECTOR)
    return sorted({key.partition(".")[0] for key in projectors})


@torch.no_grad()
def merge_adapters(model: MultimodalModel) -> int:
    """Add the adapters to the weights of their layers and remove them, in place; returns the number of adapters.

    The model then has the same layers and names as before `add_lora`. Not for a parallelized model.
    """
    layers = lora_layers(model)
    for path, layer in layers:
        layer.merge(safe_merge=True)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.get_base_layer())
    if layers:
        del model.peft_config
    return len(layers)


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """(path, peft's layer) of every layer with an adapter."""
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "reset_lora_parameters")]


def reset_adapter(layer: LoraLayer) -> None:
    """Initialise an adapter by peft's rule: A at random, B zero, so that it has no effect yet."""
    layer.reset_lora_parameters(_ADAPTER, True)
