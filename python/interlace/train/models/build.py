"""Builds a MultimodalModel from a config, with pretrained weights or random ones that depend on seed and name only.

The model is built on the meta device (no memory). `parallelize` allocates the share of this rank, and `initialize`
fills it. Each module is initialised by its own library's rule (HuggingFace's ``_init_weights``, torch's
``reset_parameters``) under a generator seeded by (seed, module name). It is initialised whole and then cut, so every
layout starts from the same weights, on any device. No rank ever allocates a layer that it does not run.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from interlace.train.checkpoint.identity import canonical_names
from interlace.train.config.load import ConfigError, blaming
from interlace.train.config.sections import Config
from interlace.train.models.architectures import differences, read_json
from interlace.train.models.costs import flop_costs
from interlace.train.models.modules import check_attention_dropout, check_projector, make_encoder, make_language_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from interlace.data import Tokenizer
    from interlace.layout import Layout
    from interlace.model import MultimodalModel
    from interlace.run import ParallelModel
    from interlace.train.config.model import Module
    from interlace.train.data.texts import Vocabulary
    from interlace.train.models.pretrained import Source


def build(config: Config, tokenizer: Tokenizer | Vocabulary, *, source: str = "config") -> MultimodalModel:
    """The config's model on the meta device, frozen as configured. Raises ConfigError with the wrong key."""
    _check_library()
    from interlace.data import cache_folder
    from interlace.model import MultimodalModel
    from interlace.model.probe.cache import use_cache_folder

    use_cache_folder(cache_folder(config.data.cache) / "trials")  # shared by all ranks of a machine and by later runs
    spec = config.model
    if spec.path is not None:
        model = _whole_model(Path(spec.path), tokenizer, source)
        _check_vocabulary(config, model.vocab_size, tokenizer, source)
        freeze(config, model, source)
        check_attention_dropout(model, spec.path, source)
        return model
    with torch.device("meta"):
        language_model = make_language_model(spec.language_model, tokenizer.vocab_size, source)
        _check_vocabulary(config, language_model.config.vocab_size, tokenizer, source)
        encoders = {name: make_encoder(name, encoder, source) for name, encoder in spec.encoders().items()}
    _as_stored("language_model", spec.language_model, language_model, source)
    for name, encoder in spec.encoders().items():
        _as_stored(name, encoder, encoders[name].module, source)
    with torch.device("meta"):
        try:
            model = MultimodalModel(
                encoders=encoders,
                language_model=language_model,
                placeholders={name: tokenizer.placeholders[name] for name in encoders},
            )
        except (ValueError, KeyError) as error:  # a name that torch's own tables of modules already use
            raise ConfigError(f"{source}: [model]: {error.args[0]}") from None
    for name, encoder in spec.encoders().items():
        check_projector(model.encoders[name], encoder, f"{source}: [model.{name}] projector")
    freeze(config, model, source)
    check_attention_dropout(model, None, source)
    return model


def _as_stored(name: str, spec: Module, module: PreTrainedModel, source: str) -> None:
    """Ties the weights of a module as its folder does. Raises ConfigError for settings that differ from the
    folder's."""
    from interlace.train.models.pretrained import has_weights, untie_module

    if spec.path is None or spec.architecture is None:
        return
    folder = Path(spec.path)
    with blaming(f"{source}: [model.{name}] path"):
        changes = differences(folder, spec.architecture, module.config, encoder=name != "language_model")
        if unset := [key for key in changes if key not in {*spec.config, *spec.unset}]:
            raise ValueError(
                f"{folder} was saved with {unset[0]} = {changes[unset[0]]!r}, but [model.{name}.config] does not set "
                "it: omit config to read it from the folder, or set this key"
            )
        if has_weights(folder):
            untie_module(module, folder)


def _whole_model(folder: Path, tokenizer: Tokenizer | Vocabulary, source: str) -> MultimodalModel:
    """A whole model of HuggingFace, cut into its modules. Raises ConfigError."""
    from interlace.model import MultimodalModel
    from interlace.model.inputs.placeholders import token_ids
    from interlace.model.whole.model import build_whole
    from interlace.train.models.pretrained import has_weights
    from interlace.train.models.pretrained_whole import untie_whole

    with blaming(f"{source}: [model] path"):
        with torch.device("meta"):
            whole = build_whole(folder)
        if has_weights(folder):
            untie_whole(whole, folder)
        with torch.device("meta"):
            model = MultimodalModel.of_whole(whole)
    model.source = folder
    for name, given in model.placeholders.items():
        ours = tokenizer.placeholders.get(name)
        if ours is not None and not set(token_ids(ours)) <= set(token_ids(given)):
            raise ConfigError(
                f"{source}: the data writes {ours} as placeholder for {name}, but the model of {folder} needs {given}: "
                "use the model's tokenizer for the data"
            )
    return model


def freeze(config: Config, model: MultimodalModel, source: str) -> None:
    """Freezes the parts named in the config, and adds adapters. Raises ConfigError, also if nothing is left to
    train."""
    from interlace.train.models.frozen import narrow_frozen
    from interlace.train.models.tuning import tune

    spec = config.model
    for name, encoder in spec.encoders().items():
        if encoder.freeze:
            model.freeze(name)
        if encoder.freeze_projector:
            model.freeze(f"{name}.projector")
    if spec.language_model.freeze:
        model.freeze("language_model")
    tune(config, model, source=source)
    if config.train.frozen_dtype == "bf16":
        narrow_frozen(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{source}: [model] and [train] freeze all parameters; train at least a projector")


def build_layout(
    config: Config, model: MultimodalModel, *, source: str = "config", replicas: int | None = None
) -> Layout:
    """Cuts the model into stages and places them. Raises ConfigError, for example for more stages than layers.

    replicas: of every module, in place of the config's: 1 is a replica of the whole model if all dp are equal. Its
        state is not sharded then.
    """
    from interlace.layout import Layout, ParallelSpec

    parallel, recompute = config.parallel, config.train.recompute
    specs, keys = {}, {field.name for field in dataclasses.fields(ParallelSpec)}
    for name in model.modules_order():
        degrees = parallel.module(name).model_dump(include=keys) | {"dp": replicas or parallel.replicas(name)}
        if replicas:  # no other ranks to shard its state over
            degrees |= {"shard": "none", "shard_ranks": None}
        with blaming(f"{source}: [parallel.{name}]"):
            specs[name] = ParallelSpec(**degrees)
    with blaming(f"{source}: [parallel]"):
        costs = flop_costs(config, model)  # the same as in `interlace plan`, so the cut is the same
        if parallel.placed == "chain" and parallel.replica_ranks is not None:
            dp = specs["language_model"].dp
            return Layout.balanced(model, parallel.replica_ranks, costs=costs, recompute=recompute, dp=dp)
        return Layout.from_specs(
            model, specs, placement=parallel.placed, costs=costs, ranks=parallel.replica_ranks, recompute=recompute
        )


@torch.no_grad()
def materialize(model: MultimodalModel, *, seed: int, device: torch.device | str = "cpu") -> MultimodalModel:
    """Allocates a meta model on `device` and fills it with random values (see `initialize`); returns it.

    Tied parameters stay tied. Raises ConfigError under transformers 4.
    """
    _check_library()
    from interlace.run.execute.memory import allocate, allocate_buffers
    from interlace.train.models.random_weights import random_values

    parameters = [name for name, _ in model.named_parameters()]
    allocate(model, parameters, device)
    allocate_buffers(model, device)
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, values in random_values(model, held, seed):
        (held[name] if name in held else model.get_buffer(name)).copy_(values)
    return model


def stored_weights(config: Config, model: MultimodalModel, *, source: str = "config") -> dict[str, Source]:
    """Parameter -> location of its weights in the folders of the config (``path``).

    Raises ConfigError for a folder in which a weight is missing or has another shape: every rank reads all folders'
    headers.
    """
    from interlace.train.models.pretrained import find
    from interlace.train.models.pretrained_whole import find_whole

    if config.model.path is not None:
        with blaming(f"{source}: [model] path"):
            return find_whole(model, Path(config.model.path))
    sources: dict[str, Source] = {}
    for name, spec in config.model.modules().items():
        if spec.path is None or spec.architecture is None:
            continue
        place = name if name == "language_model" else f"encoders.{name}.module"
        with blaming(f"{source}: [model.{name}] path"):
            stored = find(model.get_submodule(place), Path(spec.path))
        sources |= {f"{place}.{key}": weight for key, weight in stored.items()}
    return sources


@torch.no_grad()
def initialize(
    parallel: ParallelModel, *, seed: int, stored: Mapping[str, Source] | None = None, weights: bool = True
) -> None:
    """Initialises the share of a model that this process holds: `parallel` is the result of `parallelize`.

    stored: the result of `stored_weights`; this process reads only its own parts of these weights.
    weights: False leaves parameters without values (NaN), for a checkpoint to fill, and initialises only buffers.

    Random values depend on `seed` and names only, not on the layout or the device. They are drawn on the CPU for a
    whole layer at a time, and this process keeps its own part. Each layer is freed before the next is drawn. Raises
    ConfigError under transformers 4, and for a folder that can no longer be read.
    """
    _check_library()
    from interlace.train.models.random_weights import random_values

    model, regions, first = parallel.mllm, parallel.regions(), canonical_names(parallel.mllm)
    held = {first[name]: (parameter, regions.get(name)) for name, parameter in parallel.named_parameters()}
    buffers: dict[str, list[Tensor]] = {}
    for part in (model, *(stage for stages in parallel.stages.values() for stage in stages.values())):
        for name, buffer in part.named_buffers():
            buffers.setdefault(name, []).append(buffer)
    stored = stored or {}
    drawn = held.keys() - stored.keys() if weights else set()
    for name in held.keys() & stored.keys():
        parameter, region = held[name]
        with blaming():
            parameter.copy_(stored[name].read(region))
    for name, values in random_values(model, drawn, seed, read=held.keys() - drawn):
        if name in held:
            parameter, region = held[name]
            parameter.copy_(values if region is None else region.piece(values))
        for buffer in buffers.get(name, ()):
            if not buffer.is_meta:
                buffer.copy_(values)


def architecture(config: Config) -> Mapping[str, object]:
    """The part of a config that determines if weights fit: classes, settings, projectors, callbacks, adapters.

    For a whole model, all of its config.json. Raises ConfigError if that can no longer be read.
    """
    lora = config.train.lora  # its scale is not visible in any weight
    adapters = {} if lora is None else {"lora": lora.model_dump(include={"rank", "alpha", "use_rslora"})}
    if config.model.path is not None:
        with blaming("[model] path"):
            return {"whole": read_json(Path(config.model.path) / "config.json")} | adapters
    keys = {"architecture", "config", "unset", "projector", "projector_config", "downsample", "tokens"}
    keys |= {"preprocess", "postprocess", "postprocess_projector"}
    table = {name: each.model_dump(include=keys, exclude_none=True) for name, each in config.model.modules().items()}
    return table | adapters


def _check_library() -> None:
    if missing := transformers_missing():
        raise ConfigError(missing)


def transformers_missing() -> str:
    """Reason that the installed transformers cannot build models from a config; "" if it can.

    transformers 4 fills buffers (rotary frequencies, Whisper's sinusoids) only if a model is not on meta.
    """
    version = importlib.metadata.version("transformers")
    if version.split(".")[0] == "5":
        return ""
    return (
        f"building a model from a config (interlace train, plan, generate) needs transformers 5, but "
        f"{version} is installed: pip install 'transformers>=5,<6'. "
        "Attention and interlace.model work with 4.57, too."
    )


def _check_vocabulary(config: Config, vocab_size: int, tokenizer: Tokenizer | Vocabulary, source: str) -> None:
    if vocab_size >= tokenizer.vocab_size:
        return
    outside = [f"{name} (id {id_})" for name, id_ in tokenizer.placeholders.items() if id_ >= vocab_size]
    consequence = f"; the placeholders of {', '.join(outside)} would be out of range" if outside else ""
    folder = config.model.path or config.model.language_model.path  # its settings are in the config, too
    if folder is None:
        raise ConfigError(
            f"{source}: [model.language_model.config] vocab_size = {vocab_size} is less than the tokenizer's "
            f"{tokenizer.vocab_size}{consequence}; omit it or raise it to {tokenizer.vocab_size}"
        )
    way = "set data.placeholders to its reserved tokens" if outside else "set data.tokenizer to its own tokenizer"
    raise ConfigError(
        f"{source}: the model of {folder} has embeddings of {vocab_size} tokens, but the tokenizer has "
        f"{tokenizer.vocab_size}{consequence}; {way}"
    )
