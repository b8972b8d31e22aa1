"""[model] of a training config: modules under names of their own, each a class of transformers."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from interlace.train.schema_base import LocalPath, Positive, Rate, Section

PROJECTORS = ("linear", "mlp", "pixel_shuffle", "qformer")
TAKEN = ("text", "language_model")
"""What lengths of samples and the layers of a run already call something else."""
PIXELS = {"mean", "std"}
OF_WHOLE = {"freeze", "freeze_projector", "lr", "projector_lr", "weight_decay"} | PIXELS
"""Keys of a module that is part of a whole model."""
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
Channels = Annotated[list[Annotated[float, Field(ge=-1e3, le=1e3)]], Field(min_length=3, max_length=3)]


class Module(Section):
    """What an encoder and the language model have in common: where the module comes from."""

    architecture: Annotated[str, Field(min_length=1)] | None = None
    """Class of transformers, such as "SiglipVisionModel" or "Qwen3ForCausalLM", or the model_type of its config. With a
    ``path`` it is read there unless given."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of the architecture's HuggingFace config class that differ from its defaults, or with a ``path`` from what
    its config.json says; beside both ``path`` and ``architecture`` it says all of them."""
    unset: list[str] = Field(default_factory=list)
    """Keys of ``config`` that are None, for which TOML has no word; of a table inside it ``table.key``."""
    path: LocalPath | None = None
    """Folder that HuggingFace's ``save_pretrained`` wrote: the weights to start from (by default random ones), and
    architecture and config where they are not given. Each rank reads what it holds; a projector starts at random."""
    freeze: bool = False
    """Keep the module's weights as they are; an encoder's projector still trains."""
    lr: Rate | None = None
    """Peak learning rate; by default ``train.lr``."""
    weight_decay: Rate | None = None
    """Decoupled weight decay, of an encoder and its projector; by default ``train.weight_decay``."""


class Encoder(Module):
    """One encoder of images or sound, and the projector that maps its features to the language model's width."""

    projector: Annotated[str, Field(min_length=1)] = "mlp"
    """What maps encoder features to the language model's hidden size: linear; mlp; pixel_shuffle: scale x scale
    neighbouring patches become one token, then an MLP (InternVL, Idefics 3); qformer: a fixed number of learned queries
    that look at each item (BLIP-2); or "package.module:Class", a torch module called with (in_features, out_features,
    **projector_config)."""
    projector_config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the projector: of pixel_shuffle scale (2); of qformer queries (32), layers (2), heads (8)."""
    preprocess: ImportPath | None = None
    """"package.module:function" (inputs) -> inputs, before the encoder."""
    postprocess: ImportPath | None = None
    """"package.module:function" (inputs, features [N, D]) -> features, between encoder and projector."""
    postprocess_projector: ImportPath | None = None
    """"package.module:function" (inputs, features [n, D of the language model]) -> features, after the projector."""
    tokens: ImportPath | None = None
    """"package.module:function" (shape, about) -> language-model tokens of an item, where callbacks change them."""
    mean: Channels | None = None
    """Of the pixels of images (0 to 1) that the encoder was trained with, per channel; by default those of the
    preprocessor_config.json in ``path``, else those known of the architecture."""
    std: Channels | None = None
    """Their standard deviation, likewise."""
    downsample: Positive = 1
    """So many consecutive encoder tokens (of an image row by row, of sound in time) become one of the language model,
    before the projector."""
    freeze_projector: bool = False
    """Keep the projector's weights as they are."""
    projector_lr: Rate | None = None
    """Peak learning rate of the projector; by default the encoder's."""

    @model_validator(mode="after")
    def _known(self) -> Encoder:
        if ":" not in self.projector and self.projector not in PROJECTORS:
            near = difflib.get_close_matches(self.projector, PROJECTORS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(PROJECTORS)} or 'package.module:Class'"
            raise ValueError(f"there is no projector {self.projector!r}; {hint}")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std = {self.std} must be more than 0: pixels are divided by it")
        return self


class LanguageModel(Module):
    """The language model that reads text and the encoders' features; ``vocab_size`` of its config follows the tokenizer
    unless given."""


class Model(Section):
    """The multimodal model: a language model, and [model.NAME] for each encoder, under any name; or a whole one."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Encoder] = Field(init=False)
    free: ClassVar[type[Section]] = Encoder

    path: LocalPath | None = None
    """Folder of a whole HuggingFace vision- or audio-language model. Its modules are called "vision" or "audio", and
    "language_model"; their tables then say only what is frozen and how fast the rest learns."""
    language_model: LanguageModel
    """The language model; the only module that must exist."""

    def encoders(self) -> dict[str, Encoder]:
        """The configured encoders by name, in the order of the config, which is that of their streams."""
        return dict(self.__pydantic_extra__)

    def modules(self) -> dict[str, Encoder | LanguageModel]:
        """All modules by name, the language model last."""
        return {**self.encoders(), "language_model": self.language_model}

    @model_validator(mode="after")
    def _names(self) -> Model:
        for name in self.encoders():
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or name in TAKEN:
                raise ValueError(f"an encoder cannot be called {name!r}: take another name of letters, digits and _")
        return self

    @model_validator(mode="after")
    def _sources(self) -> Model:
        for name, module in self.modules().items():
            if self.path is not None:
                plain = type(module)()
                said = [key for key in type(module).model_fields if getattr(module, key) != getattr(plain, key)]
                if others := [key for key in said if key not in OF_WHOLE]:
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
