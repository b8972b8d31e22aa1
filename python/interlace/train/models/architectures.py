"""Architectures: transformers classes for a config, and the models in a HuggingFace folder.

A name is a class ("Dinov2Model", "WhisperEncoder") or the model_type of its config ("siglip_vision_model"). For a
folder, config.json determines the class. In a model of several parts (SigLIP, CLIP, a vision-language model) an encoder
is the one part that takes images or sound. In an encoder-decoder (Whisper) it is the encoder. The language model is the
part that generates text. No code here is specific to a model family; the tables add facts that the library lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from interlace._hints import nearest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    ModelClass: TypeAlias = type[PreTrainedModel]
    ConfigClass: TypeAlias = type[PretrainedConfig]
    AnyConfig: TypeAlias = PretrainedConfig | ConfigClass

CONFIG = "config.json"
RESERVED = {"attn_implementation", "dtype", "torch_dtype", "architectures", "return_dict", "output_hidden_states"}
"""Keys that the trainer sets."""
BESIDE = RESERVED | {"output_attentions", "id2label", "label2id", "problem_type", "use_cache", "is_encoder_decoder"}
BESIDE |= {"model_type", "transformers_version", "name_or_path", "chunk_size_feed_forward", "tokenizer_class"}
"""Keys without influence on the computation of a model, as far as a config may set them."""

# Config class -> keys that differ from the library's defaults, regardless of the folder.
SETTINGS: dict[str, dict[str, Any]] = {
    # SigLIP's attention pooling head would only hold weights that no token ever reaches.
    "SiglipVisionConfig": {"vision_use_head": False},
    "Siglip2VisionConfig": {"vision_use_head": False},
}
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Model type -> mean and standard deviation of the pixels in its training.
PIXELS = {
    "siglip_vision_model": HALF,
    "siglip2_vision_model": HALF,
    "idefics3_vision": HALF,
    "smolvlm_vision": HALF,
    "vit": HALF,
    "clip_vision_model": CLIP,
    "pixtral": CLIP,
    "dinov2": IMAGENET,
    "dinov2_with_registers": IMAGENET,
    "dinov3_vit": IMAGENET,
    "internvl_vision": IMAGENET,
}


class Part(NamedTuple):
    """A model in a folder: its class and config."""

    model: ModelClass
    config: PretrainedConfig


# ---------------------------------------------------------------------- names


def model_class(name: str, *, encoder: bool) -> ModelClass:
    """The transformers class for `name`, as an encoder or as the language model.

    Raises ValueError for a name unknown to transformers, and for a class that is neither.
    """
    candidate = _class_named(name)
    if candidate is None:
        config = _config_class(name)
        if config is None:
            from transformers import __version__

            raise ValueError(f"transformers {__version__} has no model {name!r}; {_closest_name(name, encoder)}")
        candidate = _of_type(config, encoder)
    _check_role(candidate, encoder)
    return candidate


def _class_named(name: str) -> ModelClass | None:
    """The model class with that name, or None."""
    import transformers

    if not re.fullmatch(r"[A-Z][A-Za-z0-9_]*", name):
        return None
    class_ = getattr(transformers, name, None)
    if class_ is None:  # not all classes are exported, for example WhisperEncoder
        class_ = next((vars(module)[name] for module in _modules_of(name) if name in vars(module)), None)
    return class_


def _modules_of(name: str) -> Iterator[ModuleType]:
    """Modules of transformers that may define the class `name`, the longest common prefix first."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    prefix_length = {
        model_type_to_module_name(kind): len(config.removesuffix("Config"))
        for kind, config in CONFIG_MAPPING_NAMES.items()
        if name.startswith(config.removesuffix("Config")) or _class_of_type(kind, encoder=True) == name
    }
    for folder in sorted(prefix_length, key=lambda each: -prefix_length[each]):
        with_models = f"transformers.models.{folder}.modeling_{folder.rpartition('.')[2]}"
        if importlib.util.find_spec(with_models) is not None:
            yield importlib.import_module(with_models)
    # Some prefixes differ from those of the configs (Qwen2VisionTransformer..., of Qwen2VLConfig), so the files are
    # read.
    models = Path(importlib.import_module("transformers").models.__path__[0])
    for file in sorted(models.glob(f"{name[:4].lower()}*/modeling_*.py")):
        if file.parent.name not in prefix_length and f"\nclass {name}(" in file.read_text(encoding="utf-8"):
            yield importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")


def _config_class(kind: str) -> ConfigClass | None:
    """The config class of a model_type, or None."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None


def _class_of_type(kind: str, *, encoder: bool) -> str | None:
    """Name of the transformers class for a model_type: of features for an encoder, else of text."""
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_MAPPING_NAMES if encoder else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    class_: Any = names.get(kind)
    return class_[0] if isinstance(class_, (tuple, list)) else class_


def _of_type(config: ConfigClass, encoder: bool) -> ModelClass:
    """The class for a config class. Raises ValueError if there is none or more than one."""
    parts = _parts_of_class(config)
    if encoder and parts:
        candidates = [part for part in map(_feature_class, parts) if part is not None and not _reads_text(part)]
        if len(candidates) != 1:
            raise ValueError(
                f"{config.model_type!r} is a model of several parts; give the class of one part"
                + (f": {', '.join(part.__name__ for part in candidates)}" if candidates else "")
            )
        return candidates[0]
    if (class_ := _class_for(config, encoder)) is None:
        raise ValueError(f"transformers has no class for {config.model_type!r} that can be {_role(encoder)}")
    return class_


def _class_for(config: AnyConfig, encoder: bool) -> ModelClass | None:
    """The class for a config (or its class), as an encoder or as the language model, or None."""
    return _feature_class(config) if encoder else _class_named(_class_of_type(config.model_type, encoder=False) or "")


def _feature_class(config: AnyConfig) -> ModelClass | None:
    """The feature class for a config (or its class); for an encoder-decoder its encoder."""
    name = _class_of_type(config.model_type, encoder=True)
    class_ = _beside(config if isinstance(config, type) else type(config)) if name is None else _class_named(name)
    if class_ is not None and config.model_type in _encoder_decoders():
        return getattr(inspect.getmodule(class_), class_.__name__.removesuffix("Model") + "Encoder", class_)
    return class_


def _beside(config: ConfigClass) -> ModelClass | None:
    """The only feature class for a config class in the modeling file beside it; None if there is not exactly one.

    Some parts are in no table of the library (the encoders of Qwen2-VL and Qwen2.5-Omni).
    """
    place = config.__module__.replace(".configuration_", ".modeling_")
    if place == config.__module__ or importlib.util.find_spec(place) is None:
        return None
    candidates = []
    for model in vars(importlib.import_module(place)).values():
        own = isinstance(model, type) and model.__module__ == place and getattr(model, "config_class", None) is config
        if own and "forward" in vars(model) and not _reads_text(model) and not re.search(r"For[A-Z]", model.__name__):
            candidates.append(model)
    return candidates[0] if len(candidates) == 1 else None


def _encoder_decoders() -> frozenset[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as SPEECH

    return frozenset(kind for kind in SPEECH if (config := _config_class(kind)) and not config.sub_configs)


def _parts_of_class(config: ConfigClass) -> list[ConfigClass]:
    """Config classes of the parts that a config class always has."""
    from transformers import AutoConfig

    return [part for part in config.sub_configs.values() if part is not AutoConfig]


def _reads_text(model: ModelClass) -> bool:
    """True if token ids are the first input of a model class."""
    return next(iter(list(inspect.signature(model.forward).parameters)[1:]), "") == "input_ids"


def _role(encoder: bool) -> str:
    return "an encoder" if encoder else "the language model"


def _check_role(model: ModelClass, encoder: bool) -> None:
    """Raises ValueError for a class that cannot fill its role."""
    from transformers import PreTrainedModel

    name = getattr(model, "__name__", str(model))
    if not (isinstance(model, type) and issubclass(model, PreTrainedModel)):
        raise ValueError(f"{name} of transformers is not a model class")
    config: Any = getattr(model, "config_class", None)
    if config is None:
        raise ValueError(f"{name} is a base class of transformers, not a model")
    parts = any(key.endswith("text_config") for key in config.sub_configs)
    if not encoder:
        better = _class_of_type(config.model_type, encoder=False)
        if name != better:
            raise ValueError(
                f"{name} is not a causal language model" + (f"; use {better}" if better and not parts else "")
            )
        if parts:
            raise ValueError(
                f"{name} is a model of several parts; give the class of its language model, such as LlamaForCausalLM"
            )
        return
    if _reads_text(model) or parts:
        inside = [part for part in map(_feature_class, _parts_of_class(config)) if part and not _reads_text(part)]
        hint = f"; of its parts {', '.join(part.__name__ for part in inside)} can" if inside else ""
        what = "is a model of several parts" if parts else "reads token ids"
        raise ValueError(f"{name} {what}, so it cannot be an encoder of images or sound{hint}")
    if re.search(r"For[A-Z]", name):
        base = _feature_class(config)
        hint = f"; use {base.__name__}" if base is not None and base is not model else ""
        raise ValueError(f"{name} has a task head: its outputs are not features per token{hint}")


def _closest_name(name: str, encoder: bool) -> str:
    """The closest name in transformers."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    names = modeling_auto.MODEL_MAPPING_NAMES if encoder else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    classes = {class_ for kind in names if (class_ := _class_of_type(kind, encoder=encoder)) is not None}
    hint = nearest(name, classes | set(CONFIG_MAPPING_NAMES))
    if not hint.startswith("valid"):
        return hint
    example = "SiglipVisionModel or WhisperEncoder" if encoder else "Qwen3ForCausalLM"
    return f"give the name of a class, such as {example}"


# ---------------------------------------------------------------------- folders


class Described(NamedTuple):
    """Description of a model in a folder of `save_pretrained`.

    Its class, the keys of its HuggingFace config that differ from the defaults, the keys among them that are None, and
    the mean and std of its pixels if known.
    """

    architecture: str
    config: dict[str, Any]
    unset: list[str]
    pixels: tuple[list[float], list[float]] | None


def describe(folder: Path, name: str | None, *, encoder: bool) -> Described:
    """Describes a folder's encoder, or its language model.

    name: its class; by default the only fitting one. Raises ValueError for a folder without such a model.
    """
    part = _read_part(folder, name, encoder)
    theirs, default = _plain(part.config), _defaults(type(part.config))
    keys = _known(type(part.config))
    settings = {key: theirs[key] for key in sorted(keys & theirs.keys()) if theirs[key] != default.get(key, ...)}
    pixels = pixel_statistics(part.config.model_type, folder) if encoder else None
    return Described(part.model.__name__, _without_none(settings), list(_unset(settings)), pixels)


def differences(folder: Path, name: str, config: PretrainedConfig, *, encoder: bool) -> dict[str, Any]:
    """Key -> the folder's value, for keys whose values in this HuggingFace `config` would give a different model.

    Ignores token ids, which have no influence on the computation. Raises ValueError as `describe` does.
    """
    part = _read_part(folder, name, encoder)
    theirs, ours = _plain(part.config), _plain(config)
    keys = sorted(key for key in _known(type(part.config)) if not key.endswith("_token_id"))
    return {key: theirs[key] for key in keys if key in theirs and theirs[key] != ours.get(key)}


def pixel_statistics(kind: str, folder: Path | None = None) -> tuple[list[float], list[float]] | None:
    """(mean, std) of the training pixels in 0 to 1: from the folder's image processor, else from the table above.

    None if neither has them. Raises ValueError for a processor with a different pixel scaling.
    """
    table = _processor(folder) if folder is not None else {}
    if "image_mean" not in table and "do_normalize" not in table:
        known = PIXELS.get(kind)
        return None if known is None else (list(known[0]), list(known[1]))
    if table.get("do_normalize") is False:
        return [0.0] * 3, [1.0] * 3
    factor = table.get("rescale_factor")
    if table.get("do_rescale") is False or (factor is not None and abs(255 * float(factor) - 1) > 1e-6):
        raise ValueError(f"the image processor of {folder} does not scale pixels to 0..1: set mean and std")
    statistics = [table.get(key) for key in ("image_mean", "image_std")]
    for key, values in zip(("image_mean", "image_std"), statistics, strict=True):
        if not isinstance(values, list) or len(values) != 3 or not all(isinstance(v, (int, float)) for v in values):
            raise ValueError(f"the image processor of {folder} has {key} = {values!r}, not three numbers")
    return [float(v) for v in statistics[0] or ()], [float(v) for v in statistics[1] or ()]


def _processor(folder: Path) -> dict[str, Any]:
    """Image processor settings of a folder; empty if it has none."""
    own, common = folder / "preprocessor_config.json", folder / "processor_config.json"
    if own.exists():
        return read_json(own)
    inner = read_json(common).get("image_processor") if common.exists() else None
    return inner if isinstance(inner, dict) else {}


def _read_part(folder: Path, name: str | None, encoder: bool) -> Part:
    """The part of a folder with the class `name`, or the only fitting part. Raises ValueError."""
    from interlace.model.checkpoints.folder_kinds import refuse_other_kinds

    refuse_other_kinds(folder)
    path = folder / CONFIG
    table = read_json(path)
    kind = table.get("model_type")
    config_class = _config_class(str(kind))
    if config_class is None:
        from transformers import __version__

        raise ValueError(f"{path} has model_type = {kind!r}, which transformers {__version__} does not know")
    try:
        whole = config_class.from_dict(dict(table))
    except Exception as error:  # the library's own checks, for values that may be anything
        raise ValueError(f"{path}: {' '.join(str(error.__cause__ or error).split())}") from None
    configs = list(_tree(whole))
    if not encoder and hasattr(whole, "tie_word_embeddings"):  # a whole model's own setting applies, not its part's
        for part in configs:
            part.tie_word_embeddings = whole.tie_word_embeddings
    if name is not None:
        model = model_class(name, encoder=encoder)
        if same := [each for each in configs if type(each) is model.config_class]:
            return Part(model, same[0])
        kinds = ", ".join(each.model_type for each in configs)
        raise ValueError(f"{path} is not a config of {model.__name__}: its model_type is {kinds}")
    parts = []
    for each in configs:
        with contextlib.suppress(ValueError):  # it cannot be that
            if (candidate := _class_for(each, encoder)) is not None:
                _check_role(candidate, encoder)
                parts.append(Part(candidate, each))
    if len(parts) == 1:
        return parts[0]
    if parts:
        names = ", ".join(part.model.__name__ for part in parts)
        raise ValueError(f"{path} holds several that can be {_role(encoder)}; give architecture: {names}")
    what = "takes images or sound" if encoder else "is a causal language model"
    raise ValueError(f"{path} has model_type = {kind!r}, of which no class {what}")


def _tree(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A config and the configs of its parts, recursively."""
    yield config
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None and not isinstance(part, dict):
            yield from _tree(part)


def config_keys(config: ConfigClass) -> set[str]:
    """Keys that a config class accepts."""
    return _fields(config) | set(config.attribute_map)


def _fields(config: ConfigClass) -> set[str]:
    return {field.name for field in dataclasses.fields(config) if not field.name.startswith("_")}


def _known(config: ConfigClass) -> set[str]:
    """Keys of a config class that determine the computation of a model, each under one name."""
    fields = _fields(config)
    twice = {alias for alias, name in config.attribute_map.items() if name in fields}
    return fields - twice - BESIDE - set(SETTINGS.get(config.__name__, ()))


def _plain(config: PretrainedConfig) -> dict[str, Any]:
    """Values of a config, as TOML could hold them. Not from to_dict, which keeps some keys under another name."""
    table = {key: getattr(config, key, None) for key in _fields(type(config))}
    inner = {key: value.to_dict() for key, value in table.items() if value is not None and hasattr(value, "to_dict")}
    plain: dict[str, Any] = json.loads(json.dumps(table | inner, default=str))
    return {key: _bare(value) for key, value in plain.items()}


def _bare(value: Any) -> Any:
    """A table inside a config without the keys that the trainer sets."""
    if isinstance(value, dict):
        return {key: _bare(each) for key, each in value.items() if key not in BESIDE - {"model_type"}}
    return value


def _defaults(config: ConfigClass) -> Mapping[str, Any]:
    try:
        return _plain(config())
    except Exception:  # a config class that rejects its own defaults
        return {}


def _unset(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths of None values."""
    for key, value in table.items():
        if value is None:
            yield path + key
        elif isinstance(value, dict):
            yield from _unset(value, f"{path}{key}.")


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file. Raises ValueError if it cannot be read or is not a table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read it: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path} is not a JSON object")
    return table
