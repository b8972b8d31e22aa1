"""Config -> MultimodalModel, with weights of a folder, or random ones that depend on seed and parameter's name alone.

The model is built on the meta device (no memory), `parallelize` gives memory to what this rank holds of it, and
`initialize` fills that. Each module is initialised by its own library's rule (HuggingFace's ``_init_weights``, torch's
``reset_parameters``) under a generator seeded by (seed, module name), whole and then cut: every layout starts from the
same weights, on any device, and no rank ever allocates a layer that it does not run.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interlace.train.architectures import differences, read_json
from interlace.train.checkpoint.identity import canonical_names
from interlace.train.config import ConfigError
from interlace.train.costs import flop_costs
from interlace.train.modules import check_attention_dropout, check_projector, make_encoder, make_language_model
from interlace.train.schema import Config

if TYPE_CHECKING:
    from interlace.layout import Layout
    from interlace.model import MultimodalModel
    from interlace.train.pretrained import Source


def build(config: Config, tokenizer: Any, *, source: str = "config") -> MultimodalModel:
    """The config's model on the meta device, frozen as configured. Raises ConfigError naming the wrong key."""
    _check_library()
    from interlace.data import cache_folder
    from interlace.model import MultimodalModel
    from interlace.model.remembered import keep_in

    keep_in(cache_folder(config.data.cache) / "trials")  # of all ranks of a machine, and of the next run
    spec = config.model
    if spec.path is not None:
        model = _whole(Path(spec.path), tokenizer, source)
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
        except (ValueError, KeyError) as error:  # a name that torch's own tables of modules have taken, too
            raise ConfigError(f"{source}: [model]: {error.args[0]}") from None
    for name, encoder in spec.encoders().items():
        check_projector(model.encoders[name], encoder, f"{source}: [model.{name}] projector")
    freeze(config, model, source)
    check_attention_dropout(model, None, source)
    return model


def _as_stored(name: str, spec: Any, module: Any, source: str) -> None:
    """Give a module that names a folder the ties of the folder's weights. Raises ConfigError for other settings."""
    from interlace.train.pretrained import has_weights, untie_module

    if spec.path is None or spec.architecture is None:
        return
    folder = Path(spec.path)
    try:
        said = differences(folder, spec.architecture, module.config, encoder=name != "language_model")
        if unsaid := [key for key in said if key not in {*spec.config, *spec.unset}]:
            raise ValueError(
                f"{folder} was saved with {unsaid[0]} = {said[unsaid[0]]!r}, which [model.{name}.config] does not say: "
                "leave out config, so that it is read from the folder, or say it"
            )
        if has_weights(folder):
            untie_module(module, folder)
    except ValueError as error:
        raise ConfigError(f"{source}: [model.{name}] path: {error}") from None


def _whole(folder: Path, tokenizer: Any, source: str) -> MultimodalModel:
    """A whole model of HuggingFace, cut into its modules. Raises ConfigError."""
    from interlace.model import MultimodalModel
    from interlace.model.placeholders import token_ids
    from interlace.model.whole import build_whole
    from interlace.train.pretrained import has_weights
    from interlace.train.pretrained_whole import untie_whole

    try:
        with torch.device("meta"):
            whole = build_whole(folder)
        if has_weights(folder):
            untie_whole(whole, folder)
        with torch.device("meta"):
            model = MultimodalModel.of_whole(whole)
    except ValueError as error:
        raise ConfigError(f"{source}: [model] path: {error}") from None
    model.source = folder
    for name, given in model.placeholders.items():
        ours = tokenizer.placeholders.get(name)
        if ours is not None and not set(token_ids(ours)) <= set(token_ids(given)):
            raise ConfigError(
                f"{source}: the data writes {ours} where the model of {folder} wants {given}, its placeholder for "
                f"{name}: use data whose tokenizer is the model's"
            )
    return model


def freeze(config: Config, model: MultimodalModel, source: str) -> None:
    """Freeze of a model what the config says, and put adapters in. Raises ConfigError, also where nothing is left."""
    from interlace.train.frozen import narrow_frozen
    from interlace.train.tuning import tune

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
        raise ConfigError(f"{source}: [model] and [train] freeze everything; leave at least a projector to train")


def build_layout(
    config: Config, model: MultimodalModel, *, source: str = "config", replicas: int | None = None
) -> Layout:
    """Cuts the model into stages and places them. Raises ConfigError for more stages than layers and the like.

    replicas: of every module, in place of the config's: 1 is a replica of the whole model where all dp are equal. Its
        state is not sharded then.
    """
    from interlace.layout import Layout, ParallelSpec

    parallel, recompute = config.parallel, config.train.recompute
    specs, keys = {}, {field.name for field in dataclasses.fields(ParallelSpec)}
    for name in model.modules_order():
        degrees = parallel.module(name).model_dump(include=keys)
        try:
            if replicas:  # whose state has other ranks to be shared with
                degrees |= {"dp": replicas, "shard": "none", "shard_ranks": None}
            else:
                degrees["dp"] = parallel.replicas(name)
            specs[name] = ParallelSpec(**degrees)
        except ValueError as error:
            raise ConfigError(f"{source}: [parallel.{name}]: {error}") from None
    try:
        costs = flop_costs(config, model)  # those of `interlace plan`, hence its cut
        if parallel.placed == "chain" and parallel.replica_ranks is not None:
            dp = specs["language_model"].dp
            return Layout.balanced(model, parallel.replica_ranks, costs=costs, recompute=recompute, dp=dp)
        return Layout.from_specs(
            model, specs, placement=parallel.placed, costs=costs, ranks=parallel.replica_ranks, recompute=recompute
        )
    except ValueError as error:
        raise ConfigError(f"{source}: [parallel]: {error}") from None


@torch.no_grad()
def materialize(model: MultimodalModel, *, seed: int, device: torch.device | str = "cpu") -> MultimodalModel:
    """Gives memory on `device` and random values (see `initialize`) to all of a model on meta; returns it.

    Tied parameters stay tied. Raises ConfigError under transformers 4.
    """
    _check_library()
    from interlace.run.memory import allocate, allocate_buffers
    from interlace.train.weights import random_values

    parameters = [name for name, _ in model.named_parameters()]
    allocate(model, parameters, device)
    allocate_buffers(model, device)
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, values in random_values(model, held, seed):
        (held[name] if name in held else model.get_buffer(name)).copy_(values)
    return model


def stored_weights(config: Config, model: MultimodalModel, *, source: str = "config") -> dict[str, Source]:
    """Where the folders that the config names (``path``) have the weights of `model`, by parameter.

    Raises ConfigError for a folder that lacks one or has it in another shape: every rank reads all folders' headers.
    """
    from interlace.train.pretrained import find
    from interlace.train.pretrained_whole import find_whole

    if config.model.path is not None:
        try:
            return find_whole(model, Path(config.model.path))
        except ValueError as error:
            raise ConfigError(f"{source}: [model] path: {error}") from None
    found: dict[str, Source] = {}
    for name, spec in config.model.modules().items():
        if spec.path is None or spec.architecture is None:
            continue
        place = name if name == "language_model" else f"encoders.{name}.module"
        try:
            module: Any = model.get_submodule(place)
            stored = find(module, Path(spec.path))
        except ValueError as error:
            raise ConfigError(f"{source}: [model.{name}] path: {error}") from None
        found |= {f"{place}.{key}": weight for key, weight in stored.items()}
    return found


@torch.no_grad()
def initialize(parallel: Any, *, seed: int, stored: Mapping[str, Source] | None = None, weights: bool = True) -> None:
    """Gives values to what this process holds of a model: `parallel` is what `parallelize` made of it.

    stored: what `stored_weights` found; of these weights this process reads the parts that it holds. weights: False
    leaves parameters without values (NaN), for a checkpoint to fill, and gives them to buffers alone. Random values
    depend on `seed` and names only: not on the layout, nor on the device. They are drawn on the CPU for a whole layer
    at a time, of which this process keeps what it holds; the next comes when the one before is gone. Raises ConfigError
    under transformers 4, and for a folder that cannot be read any more.
    """
    _check_library()
    from interlace.train.weights import random_values

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
        try:
            parameter.copy_(stored[name].read(region))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    for name, values in random_values(model, drawn, seed, read=held.keys() - drawn):
        if name in held:
            parameter, region = held[name]
            parameter.copy_(values if region is None else region.piece(values))
        for buffer in buffers.get(name, ()):
            if not buffer.is_meta:
                buffer.copy_(values)


def architecture(config: Config) -> dict[str, Any]:
    """The part of a config that decides whether weights fit: classes, settings, projectors, callbacks, adapters.

    Of a whole model, all that its config.json says. Raises ConfigError where that cannot be read any more.
    """
    lora = config.train.lora  # whose scale is seen in no weight
    adapters = {} if lora is None else {"lora": lora.model_dump(include={"rank", "alpha", "use_rslora"})}
    if config.model.path is not None:
        try:
            return {"whole": read_json(Path(config.model.path) / "config.json")} | adapters
        except ValueError as error:
            raise ConfigError(f"[model] path: {error}") from None
    keys = {"architecture", "config", "unset", "projector", "projector_config", "downsample", "tokens"}
    keys |= {"preprocess", "postprocess", "postprocess_projector"}
    table = {name: each.model_dump(include=keys, exclude_none=True) for name, each in config.model.modules().items()}
    return table | adapters


def _check_library() -> None:
    if missing := transformers_missing():
        raise ConfigError(missing)


def transformers_missing() -> str:
    """Why no model can be built from a config with the transformers that is installed; "" if it can.

    transformers 4 fills buffers (rotary frequencies, Whisper's sinusoids) only where a model is not meta.
    """
    version = importlib.metadata.version("transformers")
    if version.split(".")[0] == "5":
        return ""
    return (
        f"building a model from a config (interlace train, plan, generate) needs transformers 5, which can "
        f"initialise a model part by part; this is {version}: pip install 'transformers>=5,<6'. "
        "Attention and interlace.model work with 4.57, too."
    )


def _check_vocabulary(config: Config, vocab_size: int, tokenizer: Any, source: str) -> None:
    if vocab_size >= tokenizer.vocab_size:
        return
    outside = [f"{name} (id {id_})" for name, id_ in tokenizer.placeholders.items() if id_ >= vocab_size]
    lost = f"; the placeholders of {', '.join(outside)} would lie outside" if outside else ""
    folder = config.model.path or config.model.language_model.path  # whose settings are in the config, too
    if folder is None:
        raise ConfigError(
            f"{source}: [model.language_model.config] vocab_size = {vocab_size} is less than the tokenizer's "
            f"{tokenizer.vocab_size}{lost}; leave it out or raise it to {tokenizer.vocab_size}"
        )
    way = "name reserved tokens of it as data.placeholders" if outside else "name its own tokenizer as data.tokenizer"
    raise ConfigError(
        f"{source}: the model of {folder} has embeddings of {vocab_size} tokens, and the tokenizer "
        f"{tokenizer.vocab_size}{lost}; {way}"
    )
