"""[model] of a training config: modules with free names, each a class of transformers."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from interlace._hints import close
from interlace.train.config.base import IMPORT, LocalPath, Positive, Rate, Section

PROJECTORS = ("linear", "mlp", "pixel_shuffle", "qformer")
TAKEN = ("text", "language_model")
"""Reserved names: lengths of samples and the layers of a run use them."""
PIXELS = {"mean", "std"}
OF_WHOLE = {"freeze", "freeze_projector", "lr", "projector_lr", "weight_decay"} | PIXELS
"""Keys of a module that is part of a whole model."""
ImportPath = Annotated[str, Field(pattern=IMPORT)]
Channels = Annotated[list[Annotated[float, Field(ge=-1e3, le=1e3)]], Field(min_length=3, max_length=3)]


class Module(Section):
    """Common keys of encoders and the language model."""

    architecture: Annotated[str, Field(min_length=1)] | None = None
    """Class of transformers, such as "SiglipVisionModel" or "Qwen3ForCausalLM", or the model_type of its config.
    Default: read from ``path``. Required without ``path``."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of the architecture's HuggingFace config class that differ from its defaults or, with ``path``, from its
    config.json. If ``path``, ``architecture`` and ``config`` are all given, ``config`` must repeat every non-default
    key of config.json."""
    unset: list[str] = Field(default_factory=list)
    """Keys of ``config`` to set to None, which TOML cannot express. Keys of an inner table: ``table.key``."""
    path: LocalPath | None = None
    """Folder written by HuggingFace's ``save_pretrained``: initial weights, and ``architecture`` and ``config`` unless
    given. Each rank reads only the weights that it holds. A projector starts at random. Default: random weights."""
    freeze: bool = False
    """Do not train the module's weights. An encoder's projector is still trained."""
    lr: Rate | None = None
    """Peak learning rate. Default: ``train.lr``."""
    weight_decay: Rate | None = None
    """Decoupled weight decay, of an encoder and its projector. Default: ``train.weight_decay``."""


class Encoder(Module):
    """One encoder of images or audio, and the projector that maps its features to the language model's width."""

    projector: Annotated[str, Field(min_length=1)] = "mlp"
    """Maps encoder features to the language model's hidden size. linear: one linear layer. mlp: two with GELU
    (LLaVA-1.5). pixel_shuffle: merges scale x scale neighbouring patches into one token, then an MLP (InternVL, Idefics
    3); rows and columns of patches must be multiples of scale. qformer: a fixed number of learned queries that attend
    to each item (BLIP-2). "package.module:Class": a torch module, constructed with (in_features, out_features,
    **projector_config)."""
    projector_config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the projector, with defaults. pixel_shuffle: scale (2). qformer: queries (32), layers (2), heads
    (8)."""
    preprocess: ImportPath | None = None
    """"package.module:function" (inputs) -> inputs. Runs before the encoder."""
    postprocess: ImportPath | None = None
    """"package.module:function" (inputs, features [N, D]) -> features. Runs between encoder and projector."""
    postprocess_projector: ImportPath | None = None
    """"package.module:function" (inputs, features [n, D of the language model]) -> features. Runs after the
    projector."""
    tokens: ImportPath | None = None
    """"package.module:function" (shape, about) -> number of language-model tokens of an item. For callbacks that change
    this number."""
    mean: Channels | None = None
    """Mean per channel of the pixels (0 to 1) in the encoder's training images. Default: from preprocessor_config.json
    in ``path``, else the known values of the architecture."""
    std: Channels | None = None
    """Standard deviation per channel of these pixels, > 0. Default: as for ``mean``."""
    downsample: Positive = 1
    """Number of consecutive encoder tokens merged into one language-model token, before the projector. Order: row by
    row in an image, by time in audio."""
    freeze_projector: bool = False
    """Do not train the projector's weights."""
    projector_lr: Rate | None = None
    """Peak learning rate of the projector. Default: the encoder's."""

    @model_validator(mode="after")
    def _known(self) -> Encoder:
        if ":" not in self.projector and self.projector not in PROJECTORS:
            hint = close(self.projector, PROJECTORS) or f"use {', '.join(PROJECTORS)} or 'package.module:Class'"
            raise ValueError(f"there is no projector {self.projector!r}; {hint}")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std = {self.std} must be more than 0: pixels are divided by it")
        return self


class LanguageModel(Module):
    """Language model: reads text and the encoders' features. ``vocab_size`` of its config follows the tokenizer unless
    given."""


class Model(Section):
    """Multimodal model: a language model and a section [model.NAME] per encoder, or a whole model by ``path``. NAME: a
    letter, then letters, digits and _; not "text" or a key of [parallel]."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Encoder] = Field(init=False)
    free: ClassVar[type[Section]] = Encoder

    path: LocalPath | None = None
    """Folder of a whole HuggingFace vision- or audio-language model. Its modules are named "vision" or "audio", and
    "language_model". Their sections may then set only freeze, freeze_projector, lr, projector_lr and weight_decay."""
    language_model: LanguageModel
    """Language model: the only required module."""

    def encoders(self) -> dict[str, Encoder]:
        """Configured encoders by name, in config order, which is the order of their streams."""
        return dict(self.__pydantic_extra__)

    def modules(self) -> dict[str, Encoder | LanguageModel]:
        """All modules by name, the language model last."""
        return {**self.encoders(), "language_model": self.language_model}

    @model_validator(mode="after")
    def _names_and_sources(self) -> Model:
        for name in self.encoders():
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or name in TAKEN:
                raise ValueError(f"an encoder cannot be called {name!r}: take another name of letters, digits and _")
        for name, module in self.modules().items():
            if self.path is not None:
                plain = type(module)()
                keys = [key for key in type(module).model_fields if getattr(module, key) != getattr(plain, key)]
                if others := [key for key in keys if key not in OF_WHOLE]:
                    raise ValueError(
                        f"[model.{name}] says {others[0]}, but [model] path is a whole model, of which it says all: "
                        f"leave it out (here go {', '.join(sorted(OF_WHOLE - PIXELS))}), or leave out [model] path"
                    )
            elif module.path is None and module.architecture is None:
                others = [other for other in self.modules() if other != name]
                near = difflib.get_close_matches(name, others, n=1)
                hint = f" (or did you mean [model.{near[0]}]?)" if near else ""
                raise ValueError(
                    f"[model.{name}] says neither path (a folder of HuggingFace's save_pretrained) nor architecture (a "
                    f"class of transformers): give one{hint}"
                )
        return self
