"""Costs of a module's layers, used to divide a model into stages: parameters, and forward FLOPs per token.

FLOPs are the same as for MFU (`flops.py`): all products, those of experts only if a router chooses them, and attention
per visible key. A layer with a window is charged for all keys of its item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from interlace._text import one_line
from interlace.model.counting.fake_run import Forward, Run, blank_inputs, shortest
from interlace.model.language import merge_tokens
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.probe.cache import remembered
from interlace.model.probe.encoder import known
from interlace.model.probe.inconclusive import record_failure
from interlace.model.probe.stand_in import plainly
from interlace.model.sample import Media

if TYPE_CHECKING:
    from interlace.model.multimodal import MultimodalModel

LONGEST = 1024  # maximum tokens of the sample for counting a language model
ALIKE = 0.01  # relative difference up to which products per token count as equal


@dataclass(frozen=True)
class LayerPart:
    """A module that moves with one layer: the layer itself, a module before the first layer, or one after the last.

    forward_flops: per token of the module (multiply-adds count twice).
    trainable: True if any of its parameters is trainable.
    """

    name: str
    kind: str  # "prologue", "layer" or "epilogue"
    parameters: int
    forward_flops: float
    trainable: bool


@dataclass(frozen=True)
class LayerInfo:
    """A layer where a stage can be cut, with all modules that move with it.

    name: of the layer in the whole model.
    parameters, forward_flops, trainable: including the parts. The prologue belongs to the first layer, epilogue and
    projector or head to the last. A stage's numbers are the sums over its layers.
    """

    index: int
    name: str
    parameters: int
    trainable: bool
    forward_flops: float
    parts: tuple[LayerPart, ...]


def describe_layers(mllm: MultimodalModel, name: str, context: float) -> list[LayerInfo]:
    """LayerInfo for each layer of module `name`. context: number of keys per token, for the FLOPs of attention."""
    root, path = mllm.root(name)
    prefix = name if name == LANGUAGE_MODEL else f"encoders.{name}"
    before, after = _outside_layers(root, path)
    counts = counted(mllm, name)
    infos = []
    layers = list(root.get_submodule(path).named_children())
    for i, (key, layer) in enumerate(layers):
        parts = []
        if i == 0:
            parts += [_part(f"{prefix}.{at}", "prologue", part, counts.around[at]) for at, part in before]
        flops = counts.layers[i] + counts.pairs[i] * context
        parts.append(_part(f"{prefix}.{path}.{key}", "layer", layer, flops))
        if i == len(layers) - 1:
            parts += [_part(f"{prefix}.{at}", "epilogue", part, counts.around[at]) for at, part in after]
        infos.append(
            LayerInfo(
                index=i,
                name=f"{prefix}.{path}.{key}",
                parameters=sum(part.parameters for part in parts),
                trainable=any(part.trainable for part in parts),
                forward_flops=sum(part.forward_flops for part in parts),
                parts=tuple(parts),
            )
        )
    return infos


def _outside_layers(
    root: nn.Module, path: str, at: str = ""
) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """Modules with parameters registered before and after the list at `path`, with the same split as in carve.

    at: prefix of their names.
    """
    step, _, rest = path.partition(".")
    own = nn.Module()
    own._parameters = dict(root._parameters)
    before = [(at.rstrip(".") or "own", own)] if any(p is not None for p in own._parameters.values()) else []
    after: list[tuple[str, nn.Module]] = []
    side = before
    for name, child in root.named_children():
        if name == step:
            side = after
        elif next(child.parameters(), None) is not None:
            side.append((f"{at}{name}", child))
    if not rest:
        return before, after
    inner, late = _outside_layers(getattr(root, step), rest, f"{at}{step}.")
    return before + inner, late + after


def _part(name: str, kind: str, module: nn.Module, flops: float) -> LayerPart:
    return LayerPart(
        name=name,
        kind=kind,
        parameters=sum(p.numel() for p in module.parameters()),
        forward_flops=flops,
        trainable=any(p.requires_grad for p in module.parameters()),
    )


# ---------------------------------------------------------------------- FLOPs


class Counted(NamedTuple):
    """FLOPs of a module per token of the module: see `Forward`.

    length: tokens of the sample that was counted.
    why: reason if the values are an estimate; "" if they are counted.
    """

    layers: tuple[float, ...]
    pairs: tuple[float, ...]
    around: dict[str, float]
    length: int
    why: str = ""


def counted(mllm: MultimodalModel, name: str) -> Counted:
    """FLOPs of a forward of module `name`, counted once per structure in a run on fake tensors (`fake_run.py`).

    A module that cannot run this way is estimated from its weights.
    """
    root, _ = mllm.root(name)
    structure = list(root.modules())
    kept = mllm._counted.get(name)
    if kept is None or kept[0] != structure:
        kept = mllm._counted[name] = structure, _remembered(mllm, name)
    counts: Counted = kept[1]
    return counts


def _remembered(mllm: MultimodalModel, name: str) -> Counted:
    def count() -> tuple[Any, ...]:
        try:
            with plainly():
                return tuple(_language(mllm) if name == LANGUAGE_MODEL else _encoder(mllm, name))
        except Exception as error:  # a model may raise anything
            record_failure(error)
            return tuple(_estimated(mllm, name, f"{type(error).__name__}: {one_line(error)}"))

    key = _key(mllm, name)
    module = mllm.language_model if name == LANGUAGE_MODEL else mllm.encoders[name].module
    return Counted(*(count() if key is None else remembered("products", module, key, count)))


def _key(mllm: MultimodalModel, name: str) -> tuple[Any, ...] | None:
    """Inputs of a module's FLOPs besides HuggingFace's module; None if user code is involved."""
    if name == LANGUAGE_MODEL:
        settings = mllm.language_settings
        if settings.preprocess or settings.postprocess or settings.merge is not merge_tokens:
            return None
        return settings.layer_path, mllm.max_length, settings.packing, settings.limit, settings.ends_with_head
    encoder = mllm.encoders[name]
    callbacks = (encoder.preprocess, encoder.postprocess, encoder.postprocess_projector, encoder._collate)
    projector = encoder.projector
    if any(callbacks) or not (projector is None or type(projector).__module__.startswith("interlace.")):
        return None
    own = encoder.packing, encoder.prefix, encoder.downsample, encoder.out_features
    return *known(encoder), *own, repr(encoder.projector_config), repr(projector)


def _language(mllm: MultimodalModel) -> Counted:
    """Count with a long sample: chunked recurrences pad the last chunk, which matters less in longer samples."""
    run, length, most = Run(mllm, LANGUAGE_MODEL), shortest(mllm), min(LONGEST, mllm.max_length or LONGEST)
    around = [dict(parts) for parts in _outside_layers(run.stage.language_model, mllm.language_settings.layer_path)]

    def forward(tokens: int) -> Forward:
        return run.forward(blank_inputs(mllm, {}, 1, tokens, run.mode, tokens), *around)

    count = forward(length)
    while 2 * length <= most:
        longer = forward(2 * length)
        if abs(longer.products - 2 * count.products) <= ALIKE * longer.products:
            break
        count, length = longer, 2 * length
    return _per_token(count, length)


def _encoder(mllm: MultimodalModel, name: str) -> Counted:
    """Count with an item of the encoder's configured size."""
    encoder, run = mllm.encoders[name], Run(mllm, name)
    around = [dict(parts) for parts in _outside_layers(run.stage.encoders[name], f"module.{encoder.layer_path}")]
    item = encoder.default
    media = Media(item.shape, encoder.tokens(*item), torch.zeros(item.shape), about=item.about)
    return _per_token(run.forward(encoder.collate([media]), *around), encoder.nominal_length)


def _per_token(forward: Forward, tokens: int) -> Counted:
    around = {name: flops / tokens for name, flops in forward.around.items()}
    return Counted(tuple(flops / tokens for flops in forward.layers), forward.pairs, around, tokens)


def _estimated(mllm: MultimodalModel, name: str, why: str) -> Counted:
    """Estimate: every matrix multiplies every token once, and attention is as wide as the hidden state."""
    root, path = mllm.root(name)
    before, after = _outside_layers(root, path)
    config: Any = mllm.language_model.config
    width = config.get_text_config().hidden_size if name == LANGUAGE_MODEL else mllm.encoders[name].hidden_size
    layers = [_of_weights(layer) for layer in root.get_submodule(path).children()]
    around = {name: _of_weights(part) for name, part in before + after}
    return Counted(tuple(layers), (4.0 * width,) * len(layers), around, shortest(mllm), why)


def _of_weights(module: nn.Module) -> float:
    inside = (part for part in module.modules() if not isinstance(part, nn.Embedding))
    return sum(2.0 * p.numel() for part in inside for p in part.parameters(recurse=False) if p.dim() > 1)
