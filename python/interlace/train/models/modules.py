"""Builds a module of the model from its table in the config: a transformers class, checked by key, on the meta device.

The library checks types and little else, so a wrong number would be found in the first step, or never. For random
weights, values are therefore checked here by the names of their keys. Keys of a folder of trained weights are not
checked.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace._hints import nearest
from interlace.attention.hf.dropout import dropout_key, dropout_rate, path_of
from interlace.model.inputs.callbacks import misfit
from interlace.model.projector import ItemProjector
from interlace.model.whole.model import whole_class
from interlace.train.config.base import MOST
from interlace.train.config.load import ConfigError, blaming, imported
from interlace.train.config.model import PROJECTORS, Encoder, LanguageModel, Module
from interlace.train.models.architectures import RESERVED, SETTINGS, config_keys, model_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from interlace.model import ModalityModule, MultimodalModel

MOST_LAYERS = 10_000
SIZES = ("size", "dim", "heads", "layers", "channels", "bins", "positions", "embeddings", "d_model", "experts")
"""Name endings of keys that count something and must be positive."""
MAY_BE_0 = {"chunk_size_feed_forward", "max_window_layers", "num_kv_shared_layers"}


def make_language_model(spec: LanguageModel, vocab_size: int, source: str) -> PreTrainedModel:
    """The language model of a config. Raises ConfigError with the wrong key."""
    defaults: dict[str, int | None] = {}
    if "vocab_size" not in spec.config:  # token ids of the class's defaults would be wrong ids in this vocabulary
        defaults = {"vocab_size": vocab_size, "pad_token_id": None}
    return _build("language_model", spec, source, encoder=False, **defaults)


def make_encoder(name: str, spec: Encoder, source: str) -> ModalityModule:
    """The ModalityModule of an encoder in a config. Raises ConfigError with the wrong key."""
    from interlace.model import ModalityModule

    where = f"{source}: [model.{name}]"
    settings: dict[str, Any] = {"projector_config": spec.projector_config, "downsample": spec.downsample}
    for key in ("preprocess", "postprocess", "postprocess_projector", "tokens"):
        if (path := getattr(spec, key)) is not None:
            settings[key] = imported(path, f"{where} {key}")
            if why := misfit(key, settings[key]):
                raise ConfigError(f"{where} {key} = {path!r} {why}")
    projector = spec.projector
    if projector not in PROJECTORS:
        projector = imported(projector, f"{where} projector")
        if not (isinstance(projector, type) and issubclass(projector, nn.Module)):
            raise ConfigError(f"{where} projector = {spec.projector!r} is not a subclass of torch.nn.Module")
    module = _build(name, spec, source, encoder=True)
    with blaming(where):
        return ModalityModule(module, projector=projector, **settings)


def check_attention_dropout(model: MultimodalModel, folder: str | None, source: str) -> None:
    """Raises ConfigError, with the key, if attention weights would be dropped in training.

    folder: of a whole model, whose config.json has the key.
    """
    for name in model.modules_order():
        module = model.encoders[name].module if name in model.encoders else model.language_model
        for part in module.modules():
            if part.training and (rate := dropout_rate(part)):
                config = module.config if folder is None else whole_class(Path(folder))[1]
                key = path_of(config, part.config) + dropout_key(part, rate)
                where = (
                    f"[model.{name}.config] {key}" if folder is None else f"[model] path: {key} of {folder}/config.json"
                )
                raise ConfigError(f"{source}: {where} must be 0, not {rate:g}: bitfield attention has no dropout")


# ---------------------------------------------------------------------- what a config imports


def check_projector(encoder: ModalityModule, spec: Encoder, where: str) -> None:
    """Raises ConfigError for a user projector that cannot be trained, or cannot be initialised."""
    projector, where = encoder.projector, f"{where} = {spec.projector!r}"
    if spec.projector in PROJECTORS or projector is None:
        return
    from transformers import PreTrainedModel

    library = [name for name, part in projector.named_modules() if isinstance(part, PreTrainedModel)]
    for name, part in projector.named_modules():
        if any(name == each or name.startswith(f"{each}.") for each in library):
            continue
        loose = [key for key, value in vars(part).items() if isinstance(value, Tensor)]
        own = [key for table in (part._parameters, part._buffers) for key, value in table.items() if value is not None]
        if loose:
            raise ConfigError(f"{where} has the plain tensor {loose[0]!r}: use register_buffer({loose[0]!r}, ...)")
        if own and not callable(getattr(part, "reset_parameters", None)):
            raise ConfigError(
                f"{where}: {name or type(part).__name__} has {own[0]!r} but no reset_parameters() that initialises it: "
                "models are built without memory, so values set in __init__ are lost"
            )
    if isinstance(projector, ItemProjector):
        return
    like = next(encoder.module.parameters())
    features = torch.empty(6, encoder.feature_size * spec.downsample, device="meta", dtype=like.dtype)
    try:
        projected = projector(features)
    except Exception as error:  # user code may raise anything
        if "meta" in str(error):  # the code reads values, which do not exist yet
            return
        text = " ".join(str(error).split())
        raise ConfigError(f"{where} does not take features {list(features.shape)}: {text}") from None
    wanted = [6, encoder.out_features]
    if not isinstance(projected, Tensor) or list(projected.shape) != wanted:
        got = list(projected.shape) if isinstance(projected, Tensor) else type(projected).__name__
        raise ConfigError(f"{where} makes {got} of features {list(features.shape)}, expected {wanted}")


# ---------------------------------------------------------------------- the library's class


def _on_meta(module: PreTrainedModel) -> PreTrainedModel:
    """`module` with all its parameters on meta: some are always made on the CPU (wav2vec 2.0)."""
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                part._parameters[key] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return module


def _build(name: str, spec: Module, source: str, *, encoder: bool, **defaults: int | None) -> PreTrainedModel:
    """The library's module for a table in the config, without weights."""
    from huggingface_hub.errors import StrictDataclassError

    where = f"{source}: [model.{name}.config]"
    with blaming(f"{source}: [model.{name}] architecture"):
        model = model_class(spec.architecture or "", encoder=encoder)
    config_class, keys = model.config_class, _checked(spec, model, where)
    ours = {key: value for key, value in defaults.items() if key in config_keys(config_class)}
    try:
        made = config_class(
            **{**SETTINGS.get(config_class.__name__, {}), **ours, **keys}, attn_implementation="interlace"
        )
        _check_sizes(made, where)
        # Pooling over all tokens would hold weights that no token reaches.
        pooling = "add_pooling_layer" in inspect.signature(model.__init__).parameters
        return _on_meta(model(made, add_pooling_layer=False) if pooling else model(made))
    except ConfigError:
        raise
    except Exception as error:  # the library's own checks, and errors inside it from values that pass them
        text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        if not isinstance(error, (StrictDataclassError, ValueError)):
            text = f"transformers cannot build a model from {', '.join(sorted(spec.config)) or 'its defaults'}: {text}"
        raise ConfigError(f"{where} {model.__name__}: {text}") from None


def _checked(spec: Module, model: type[PreTrainedModel], where: str) -> dict[str, Any]:
    """Keys of a config table, including None values. Raises ConfigError for keys that the class does not have."""
    fields = config_keys(model.config_class)
    defaults = {field.name: field.default for field in dataclasses.fields(model.config_class)}
    for key in spec.config:
        if key not in fields or key in RESERVED:
            hint = "it is set by the trainer" if key in RESERVED else nearest(key, fields - RESERVED)
            raise ConfigError(f"{where} has no key {key!r} for {model.__name__}; {hint}")
        given, default = spec.config[key], defaults.get(key)
        problem = _problem_of(key, given) if spec.path is None else ""
        if key in ("image_size", "patch_size") and isinstance(default, int) and isinstance(given, list):
            problem = f"must be one number, the side of a square, not {given!r}"
        if problem:
            raise ConfigError(f"{where} {key} {problem}")
    keys: dict[str, Any] = copy.deepcopy(spec.config)
    for path in spec.unset:
        *around, last = path.split(".")
        table = keys
        for key in around:
            table = table.setdefault(key, {})
        if not isinstance(table, dict) or (not around and last not in fields) or last in table:
            raise ConfigError(
                f"{where.removesuffix('.config]')}] unset: {path!r} is not a key that can be None; "
                f"{nearest(last, fields)}"
            )
        table[last] = None
    return keys


def _problem_of(key: str, value: object) -> str:
    """Problem with the value of a HuggingFace key, judged by the key's name; "" if there is none."""
    if isinstance(value, dict):
        return next((f"{name} {why}" for name, each in value.items() if (why := _problem_of(key, each))), "")
    if isinstance(value, (list, tuple)):
        return next((why for each in value if (why := _problem_of(key, each))), "")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    if not math.isfinite(value):
        return f"must be a finite number, not {value!r}"
    if key == "rope_parameters" or key.endswith("eps"):
        return "" if value > 0 else f"must be more than 0, not {value!r}"
    if "drop" in key or key.endswith("_prob"):
        return "" if 0 <= value <= 1 else f"must be between 0 and 1, not {value!r}"
    if isinstance(value, float):
        return "" if 0 <= value <= MOST else f"must be between 0 and {MOST:,}, not {value!r}"
    if key == "num_channels" and value != 3:
        return f"must be 3 (images are read as RGB), not {value!r}"
    least = 1 if key.endswith(SIZES) and key not in MAY_BE_0 else 0 if key.endswith("_token_id") else -MOST
    most = MOST_LAYERS if key.endswith("layers") else MOST
    return "" if least <= value <= most else f"must be between {least:,} and {most:,}, not {value!r}"


def _check_sizes(config: PretrainedConfig, where: str) -> None:
    """Raises ConfigError for sizes that do not fit each other, which the library would find only in the first step."""
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(image, int) and isinstance(patch, int) and image < patch:
        raise ConfigError(
            f"{where} image_size = {image} is less than patch_size = {patch}: an image must have at least one patch"
        )
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(width, int) or not heads:
        return
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % key_heads:
        raise ConfigError(
            f"{where} num_attention_heads = {heads} is not a multiple of num_key_value_heads = {key_heads}"
        )
    head = getattr(config, "head_dim", None) or width // heads
    if getattr(config, "rope_parameters", None) is not None and head % 2:  # the library accepts odd sizes such as 3
        raise ConfigError(f"{where} head_dim = {head} is odd, which RoPE does not support: make it even")
