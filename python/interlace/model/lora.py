"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen linear layers, made by peft before a model is cut.

A layer ``q_proj`` becomes peft's LoRA layer with ``q_proj.base_layer``, ``q_proj.lora_A.default`` and
``q_proj.lora_B.default`` inside, which is then a part of its block as any other: it goes where the block goes. What was
trained leaves as a folder that peft loads (`adapter_files`), or is added to the weights (`merge_adapters`), after which
the model has the layers and names that it had before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interlace.model.module_folder import PROJECTOR, projector_weights
from interlace.model.multimodal import MultimodalModel
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.patterns import Names, base_name, is_adapter
from interlace.model.whole import new_folder

ALL_LINEAR = "all-linear"
MERGE = "merge instead (merge_adapters, or interlace export without --adapter)"
_ADAPTER = "default"  # peft's name for the only one


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
    """Put adapters into `model`, in place, and train them; returns the paths of the layers that have one.

    Weights of encoders and of the language model are frozen from now on, but for `modules_to_save`; projectors stay
    as they are, trained or frozen. An adapter adds scale * B(A(dropout(x))), A [rank, in] and B [out, rank], to what
    its layer gives, with scale = alpha / rank, or alpha / sqrt(rank) with use_rslora (arXiv 2312.03732). The values of
    A and B are as undefined as those of the model while it is on meta.

    targets, modules_to_save: patterns (see `interlace.model.patterns`); a name such as ``q_proj`` means the layers of
    the language model that end with it, "all-linear" all linear layers of the language model but its head: of a model
    that keeps the experts of a layer in one parameter [experts, out, in], not these, which stay frozen. An adapter
    would freeze a projector that is trained, so patterns with wildcards leave that out.

    Raises ValueError for patterns that match no linear layer, for tied weights, for a trained projector, and without
    peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError("LoRA layers are peft's, which is not installed: pip install peft") from None
    layers = _targets(model, targets)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = Names(model)
    kept = trained & names.projectors()
    for pattern in modules_to_save:
        kept |= _saved(names, pattern, layers)
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
    made = {name for name, _ in model.named_parameters() if is_adapter(name)}
    if len(made) != 2 * len(layers):
        raise ValueError(f"peft made adapters of {len(made) // 2} layers where {len(layers)} were meant")
    model.train_only(made | kept)
    return [*layers]


def _targets(model: MultimodalModel, targets: Sequence[str]) -> dict[str, Any]:
    """Path -> linear layer of all that the patterns name."""
    names = Names(model)
    linear = {path: layer for path, layer in model.named_modules() if type(layer) is nn.Linear}
    head: Any = model.language_model.get_output_embeddings()  # type: ignore[operator]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    projectors = {name.rpartition(".")[0] for name in trained & names.projectors()}
    found: dict[str, Any] = {}
    for pattern in targets:
        if pattern == ALL_LINEAR:
            own = {path: layer for path, layer in linear.items() if path.startswith(f"{LANGUAGE_MODEL}.")}
            chosen = {path: layer for path, layer in own.items() if layer is not head}
        else:
            chosen = {path: layer for path, layer in linear.items() if _names_module(names, pattern, path)}
        if both := sorted(chosen.keys() & projectors):
            if not any(sign in pattern for sign in "*?[") or len(both) == len(chosen):
                raise ValueError(
                    f"{pattern!r} names {both[0]} of a projector that is trained whole, which an adapter would freeze: "
                    "leave it out, or freeze the projector (freeze_projector)"
                )
            chosen = {path: layer for path, layer in chosen.items() if path not in projectors}
        if not chosen:
            if not any(_names_module(names, pattern, path) for path, _ in model.named_modules()):
                names.matching(pattern)  # says what is near
            raise ValueError(f"{pattern!r} names no linear layer (torch.nn.Linear), which is what LoRA takes")
        found |= chosen
    tied = {name for group in model.tied_parameters() for name in group}
    if both := [path for path in found if f"{path}.weight" in tied]:
        raise ValueError(f"{both[0]} shares its weight with another layer, which an adapter would not change: leave it")
    return {path: linear[path] for path in linear if path in found}


def _names_module(names: Names, pattern: str, path: str) -> bool:
    """Whether `pattern` names the module at `path`: of those of the language model the end of the name is enough."""
    if path.startswith(f"{LANGUAGE_MODEL}.") and path.endswith(f".{pattern}"):
        return True
    return names.names_module(pattern, path)


def _saved(names: Names, pattern: str, layers: Collection[str]) -> set[str]:
    """The parameters of what a pattern of modules_to_save names. Raises ValueError for one that has an adapter."""
    modules = {name.rpartition(".")[0] for name in names.first}
    named = {path for path in modules if _names_module(names, pattern, path)}
    found = {first for name, first in names.first.items() if name.rpartition(".")[0] in named}
    if not found:
        names.matching(pattern)
    if both := [path for path in layers if f"{path}.weight" in found]:
        raise ValueError(f"{pattern!r} is to be trained whole and {both[0]} is to have an adapter: say one of the two")
    return found


# ---------------------------------------------------------------------- what leaves


def adapter_files(
    model: MultimodalModel, folder: Path, *, parts: Collection[str] = (LANGUAGE_MODEL,), base: str = ""
) -> list[str]:
    """Write what was trained into `folder`, as adapter_config.json and adapter_model.safetensors that peft loads.

    parts: the modules of the model that together are the HuggingFace model which the adapter is for: the language
    model alone, or all of them of a whole checkpoint, whose names follow "language_model." or
    "encoders.<name>.module.". base: where that model lies, for the reader of the folder. What was trained whole is
    among peft's modules_to_save. Projectors of encoders that are none of these parts lie beside, in
    projector.safetensors (`interlace.model.module_folder.load_projectors` reads it). Returns their encoders' names.

    Raises ValueError for a model without adapters in these parts, for what else was trained in other parts, for a
    folder that is there and not empty, and for what a folder of peft cannot say: trained weights that are tied, or
    that lie around or under an adapter.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    prefixes = [f"{part}." if part == LANGUAGE_MODEL else f"encoders.{part}.module." for part in parts]

    def inside(name: str) -> str | None:
        return next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)

    targets = [name for path, _ in lora_layers(model) if (name := inside(path)) is not None]
    if not targets:
        raise ValueError(f"no layer of {', '.join(parts)} has an adapter: write the whole model")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    whole = [name for name in trained if not is_adapter(name)]
    beside = {name: model.encoders[name] for name in model.encoders if name not in parts}
    kept = tuple(f"encoders.{name}.projector." for name in beside)
    if lost := [name for name in trained if inside(name) is None and not name.startswith(kept)]:
        raise ValueError(
            f"{base_name(lost[0])} was trained and is no part of {', '.join(parts)}, which this adapter is for: {MERGE}"
        )
    tied = {name for group in model.tied_parameters() for name in group}
    if both := [name for name in whole if name in tied]:
        raise ValueError(f"{both[0]} was trained and is tied to another weight, which peft would not tie: {MERGE}")
    owners = sorted({own.rpartition(".")[0] for name in whole if (own := inside(name)) is not None})
    saved = [path for path in owners if not any(path.startswith(f"{other}.") for other in owners)]
    if around := [path for path in saved if not path or any(target.startswith(f"{path}.") for target in targets)]:
        raise ValueError(f"{around[0]} was trained whole around layers with adapters, which peft cannot say: {MERGE}")
    if inner := [path for path in saved if any(path.startswith(f"{target}.") for target in targets)]:
        raise ValueError(f"{base_name(inner[0])} was trained beside its own adapter, which peft cannot say: {MERGE}")
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
    """Add the adapters to the weights of their layers and take them out, in place; returns how many there were.

    Layers and names are then those of the model before `add_lora`. Not for a model that was parallelized.
    """
    found = lora_layers(model)
    for path, layer in found:
        layer.merge(safe_merge=True)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.get_base_layer())
    if found:
        del model.peft_config
    return len(found)


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """(path, peft's layer) of all that have an adapter."""
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "reset_lora_parameters")]


def reset_adapter(layer: Any) -> None:
    """Give an adapter its first values by peft's rule: A at random, B zero, so that it changes nothing yet."""
    layer.reset_lora_parameters(_ADAPTER, True)
