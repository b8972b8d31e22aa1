"""Whole HuggingFace checkpoints: loaded from a folder, split for a MultimodalModel, joined and saved again.

whole = read_whole(folder)                   # HuggingFace's own model
given = take_apart(whole)                    # its encoder and its language model, which share its weights
encoder.parts.joined(language_model, encoder.module.base)  # HuggingFace's own model again
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from interlace._text import one_line
from interlace.attention.hf import NAME
from interlace.modalities import VIDEO
from interlace.model.checkpoints.config_file import CONFIG, copy_config
from interlace.model.checkpoints.folder_kinds import refuse_other_kinds
from interlace.model.checkpoints.tied import log_untied
from interlace.model.inputs.patches import PatchInputs
from interlace.model.inputs.placeholders import configured
from interlace.model.probe.whole import TakenApart, bidirectional_media
from interlace.model.stages.deepstack import layers_of
from interlace.model.whole.parts import Parts
from interlace.model.whole.positions import RopeIndex
from interlace.model.whole.tower import WholeEncoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".msgpack", ".h5"),
    *(".gguf", ".onnx", ".onnx_data", ".ckpt"),
)
ADAPTER = ("adapter_config.json",)  # if copied, HuggingFace would look for an adapter that is absent
FOLDERS = ("additional_chat_templates",)  # of a tokenizer or processor with several templates


def whole_class(folder: Path) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """HuggingFace's class of the model in `folder`, and its config.

    Raises ValueError for a folder without a config, and for a model that is not a vision- or audio-language model of
    the installed transformers.
    """
    if transformers.__version__.partition(".")[0] == "4":
        raise ValueError(f"whole models need transformers 5, this is {transformers.__version__}")
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    refuse_other_kinds(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}: give a folder written by HuggingFace's save_pretrained")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library's own checks may raise anything
        raise ValueError(f"{folder / CONFIG}: {one_line(error, 300)}") from None
    architectures = config.architectures or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"{folder / CONFIG}: architectures is {architectures!r}, not a list of names of classes")
    named = architectures[0] if architectures else ""
    model_class = getattr(transformers, named, None) or MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if (
        model_class is None
        or not hasattr(model_class, "get_output_embeddings")
        or type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING
    ):
        raise ValueError(
            f"{folder} has {named or config.model_type}, which is not a vision- or audio-language model of this "
            "version of transformers: use it as [model.NAME] path, or load it with its class and make a ModalityModule"
        )
    return model_class, config


def read_whole(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load HuggingFace's model with the weights of `folder`. dtype: None = that of the checkpoint.

    Raises ValueError as `whole_class`, and if weights are missing, unexpected or of other shapes.
    """
    return read_module(whole_class(folder)[0], folder, dtype)


def read_module(model_class: type[PreTrainedModel], folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load a model of the class `model_class` with the weights of `folder`. Raises ValueError as `read_whole`."""
    try:
        module, info = model_class.from_pretrained(
            folder,
            dtype="auto" if dtype is None else dtype,
            attn_implementation=NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # the library may raise anything for broken files and configs
        reason = one_line(error, 300)
        what = reason if isinstance(error, (OSError, RuntimeError, ValueError)) else f"{type(error).__name__}: {reason}"
        raise ValueError(f"{folder} cannot be read: {what}") from None
    for what, keys in (
        ("has no weight", info["missing_keys"]),
        ("has a weight of another shape than the config says,", [key for key, *_ in info["mismatched_keys"]]),
        ("has a weight that the model does not,", info["unexpected_keys"]),
    ):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ValueError(f"{folder} {what} {sorted(keys)[0]!r}{more}, so the model would not compute the same")
    log_untied(module)
    return module


def build_whole(folder: Path) -> PreTrainedModel:
    """HuggingFace's model of the config in `folder`, with torch's initial weights in fp32: for the meta device."""
    model_class, config = whole_class(folder)
    try:
        return model_class._from_config(config, attn_implementation=NAME, dtype=torch.float32)
    except Exception as error:  # as above
        raise ValueError(
            f"{folder / CONFIG}: transformers cannot build a {model_class.__name__} from it: {one_line(error, 300)}"
        ) from None


def dtype_of(folder: Path) -> torch.dtype:
    """Dtype of the weights that `read_whole` loads: the config's; otherwise that of the first floating-point weight.

    Raises ValueError as `whole_class`, and for a folder whose weights cannot be read.
    """
    dtype = getattr(whole_class(folder)[1], "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    one = folder / "model.safetensors"
    file = one if one.exists() else next(iter(sorted(folder.glob("model-*.safetensors"))), one)
    try:
        with safe_open(file, framework="pt") as stored:
            dtypes = (stored.get_tensor(key).dtype for key in stored.keys())
            return next((each for each in dtypes if each.is_floating_point), torch.float32)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {one_line(error, 300)}") from None


def modules_of(folder: Path) -> tuple[str, str]:
    """Name of the encoder of the model in `folder`, and the model_type of its tower; allocates no memory.

    Raises ValueError as `whole_class`, and for a model that cannot be split.
    """
    with torch.device("meta"):
        whole = build_whole(folder)
    parts = Parts.of(whole)
    return parts.encoder, getattr(getattr(whole, parts.base), parts.tower).config.model_type


def take_apart(whole: PreTrainedModel) -> TakenApart:
    """Split a HuggingFace model into modules that share its weights.

    Raises ValueError for a model whose modules would not compute the same as HuggingFace's; see probe/whole.py.
    """
    parts = Parts.of(whole)
    language_model = parts.language_model(whole)
    language_model.set_attn_implementation(NAME)  # before the tower, which may take the other name
    try:
        encoder = WholeEncoder(whole, parts)
    except ValueError as error:
        raise ValueError(f"{type(whole).__name__} cannot be cut into its modules: {error}") from error
    base = getattr(language_model, parts.base)
    # Other models compute video features in separate code (pooling, another tower), which is not called here.
    videos = isinstance(encoder.feed, PatchInputs) and hasattr(base, f"get_{VIDEO.name}_features")
    kinds = (parts.modality, VIDEO.name) if videos else (parts.modality,)
    tokens = tuple(token for kind in kinds if (token := configured(kind, whole.config)) is not None)
    if not tokens:
        raise ValueError(f"{type(whole).__name__} has no {parts.modality}_token_id in its config")
    made = TakenApart(
        encoders={parts.encoder: encoder},
        language_model=language_model,
        placeholders={parts.encoder: tokens[0] if len(tokens) == 1 else tokens},
        bidirectional=False,
        positions=RopeIndex(base, parts.encoder, tokens) if hasattr(base, "get_rope_index") else None,
        deepstack=layers_of(encoder.module.tower, base.get_decoder()),
    )
    return made._replace(bidirectional=bidirectional_media(whole, made))


def copy_original(source: Path | None, folder: Path) -> None:
    """Copy config, tokenizer and processor of `source`, if given, to the folder of the saved weights."""
    if source is not None:
        copy_config(folder, source)
        copy_companions(source, folder)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy tokenizer, processor and generation settings to the folder of the weights, unless already written."""
    for file in sorted(source.iterdir() if source.is_dir() else ()):
        if (folder / file.name).exists():
            continue
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.name not in ADAPTER:
            shutil.copyfile(file, folder / file.name)
        elif file.is_dir() and file.name in FOLDERS:
            shutil.copytree(file, folder / file.name)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`. It is renamed to `folder` after success and deleted after a failure.

    Raises ValueError if `folder` exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield made
        made.chmod(0o755)  # mkdtemp grants access to the owner only
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
