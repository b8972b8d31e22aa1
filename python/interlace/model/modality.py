"""ModalityModule: an unmodified encoder with its projector, from media items to language model tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interlace.attention import AttentionPlan
from interlace.masks import BitfieldMask
from interlace.model.projector import Projector, stack_tokens
from interlace.model.sample import Media
from interlace.model.slice import SlicedModule, find_layers, meta_clone, split_names

Inputs = dict[str, Any]


class ModalityModule(nn.Module):
    """An encoder, its projector and the callbacks around them (cornstarch-2025-03 section 5.1).

    module: a HuggingFace encoder whose main input is ``pixel_values`` (images, each at its own size, packed into one
        row) or ``input_features`` (mel spectrograms, padded to the length that the module expects).
    projector: "linear", "mlp", or a module mapping [n, width * downsample] to [n, language model width].
    downsample: how many consecutive tokens of an item become one.
    preprocess: ``inputs -> inputs`` before the encoder; runs on every stage, where absent media are meta tensors.
    postprocess: ``(inputs, features) -> features`` between encoder and projector, features [tokens, width].
    postprocess_projector: ``(inputs, features) -> features`` after the projector.
    layers: path of the list of repeated blocks; found by itself where there is one.
    """

    def __init__(
        self,
        module: nn.Module,
        projector: str | nn.Module = "linear",
        *,
        preprocess: Callable[[Inputs], Inputs] | None = None,
        postprocess: Callable[[Inputs, Tensor], Tensor] | None = None,
        postprocess_projector: Callable[[Inputs, Tensor], Tensor] | None = None,
        downsample: int = 1,
        layers: str | None = None,
    ):
        super().__init__()
        self.module = module
        self.downsample = downsample
        self.preprocess = preprocess
        self.postprocess = postprocess
        self.postprocess_projector = postprocess_projector
        self.layers_path = layers or find_layers(module)
        self._projector_kind = projector if isinstance(projector, str) else None
        self.projector: nn.Module | None = None if isinstance(projector, str) else projector
        if self._projector_kind is not None:
            Projector(self._projector_kind, 1, 1, downsample)  # an unknown kind is an error here, not at connect
        self.main_input = getattr(module, "main_input_name", None)
        if self.main_input not in ("pixel_values", "input_features"):
            raise ValueError(
                f"{type(module).__name__} takes {self.main_input!r}: encoders take 'pixel_values' or 'input_features'"
            )
        before, _ = split_names(module, self.layers_path)
        beginning = [
            part
            for name in before
            if name.split(".")[-1] not in module.get_submodule(name.rpartition(".")[0])._parameters
            for part in module.get_submodule(name).modules()
        ]
        if self.main_input == "pixel_values":
            strides = [part.stride[0] for part in beginning if isinstance(part, nn.Conv2d)]
            self.patch = int(math.prod(int(s) for s in strides)) or 1
        else:
            strides = [part.stride[0] for part in beginning if isinstance(part, nn.Conv1d)]
            self.stride = int(math.prod(int(s) for s in strides)) or 1
            self.frames = int(module.config.max_source_positions) * self.stride  # type: ignore[union-attr, arg-type]
        self._interpolates = "interpolate_pos_encoding" in inspect.signature(module.forward).parameters
        self._prefix: int | None = None

    @property
    def num_layers(self) -> int:
        """Layers that a stage can be cut to."""
        return len(self.module.get_submodule(self.layers_path))  # type: ignore[arg-type]

    @property
    def width(self) -> int:
        """Hidden size of the encoder."""
        config: Any = self.module.config
        return int(getattr(config, "hidden_size", None) or config.d_model)

    def connect(self, width_out: int) -> None:
        """Make the projector for a language model of this width, unless one was given."""
        if self.projector is None:
            assert self._projector_kind is not None
            self.projector = Projector(self._projector_kind, self.width, width_out, self.downsample)

    # -- counting --------------------------------------------------------------------------------------------

    @property
    def prefix(self) -> int:
        """Tokens that the encoder puts before an image's patches (a class token); they are not handed on."""
        if self._prefix is None:
            self._prefix = 0
            if self.main_input == "pixel_values":
                probe = SlicedModule(meta_clone(self.module), self.layers_path, 0, self.num_layers)
                image = torch.empty(1, 3, 2 * self.patch, 2 * self.patch, device="meta")
                self._prefix = probe.capture(self.image_inputs(image)).shape[1] - 4
        return self._prefix

    def encoder_tokens(self, shape: Sequence[int]) -> int:
        """Tokens of an item inside the encoder, without prefix. Raises ValueError for a shape it cannot take."""
        if self.main_input == "pixel_values":
            _, height, width = shape
            if height % self.patch or width % self.patch or min(height, width) < self.patch:
                raise ValueError(f"image of {height} x {width}: both sides must be multiples of the patch, {self.patch}")
            return (height // self.patch) * (width // self.patch)
        frames = int(shape[-1])
        if not 0 < frames <= self.frames:
            raise ValueError(
                f"clip of {frames} frames, the encoder has positions for 1 to {self.frames}: "
                "drop it, or raise max_source_positions in the encoder's config"
            )
        return -(-frames // self.stride)

    def tokens(self, shape: Sequence[int]) -> int:
        """Language model tokens that an item of ``shape`` becomes: (3, height, width) or (mel bins, frames)."""
        return -(-self.encoder_tokens(shape) // self.downsample)

    # -- inputs ----------------------------------------------------------------------------------------------

    def image_inputs(self, pixel_values: Tensor) -> Inputs:
        """Arguments of the encoder for images of one size, [n, 3, height, width]."""
        extra = {"interpolate_pos_encoding": True} if self._interpolates else {}
        return {"pixel_values": pixel_values, **extra}

    def collate(self, items: Sequence[Media]) -> Inputs:
        """Inputs of a microbatch's items, in order. Items without data become meta tensors of their shape."""
        tensors = [torch.empty(m.shape, device="meta") if m.data is None else m.data for m in items]
        if self.main_input == "pixel_values":
            return self.complete({"pixel_values": tensors})
        for m in items:
            self.encoder_tokens(m.shape)  # an error that names the clip's length, before padding fails
        padded = [nn.functional.pad(t, (0, self.frames - t.shape[-1])) for t in tensors]
        return self.complete(
            {"input_features": torch.stack(padded), "lengths": torch.tensor([m.shape[-1] for m in items])}
        )

    def complete(self, inputs: Inputs) -> Inputs:
        """Run ``preprocess`` and add what the stages read: ``encoder_lengths`` (tokens per item) and ``plan``."""
        if "plan" in inputs:
            return inputs
        if self.preprocess is not None:
            inputs = self.preprocess(dict(inputs))
        device = next(self.module.parameters()).device
        if self.main_input == "pixel_values":
            images = inputs["pixel_values"]
            lengths = [self.encoder_tokens(image.shape) for image in images]
            document = torch.repeat_interleave(
                torch.arange(len(lengths), dtype=torch.int32), torch.tensor([n + self.prefix for n in lengths])
            )[None]
        else:
            features = inputs["input_features"]
            lengths = [self.encoder_tokens((features.shape[1], int(n))) for n in inputs["lengths"]]
            positions = torch.arange(self.frames // self.stride)[None]
            document = torch.where(positions < torch.tensor(lengths)[:, None], 0, -1).to(torch.int32)
        full = torch.ones(document.shape, dtype=torch.int64)  # everything is stream 0 and sees stream 0, both ways
        plan = AttentionPlan.build(BitfieldMask(full, doc=document)).to(device)
        return {**inputs, "encoder_lengths": lengths, "plan": plan}

    # -- outputs ---------------------------------------------------------------------------------------------

    def project(self, inputs: Inputs, output: Any) -> Tensor:
        """From the encoder's output to language model tokens, [tokens of all items, width of the language model]."""
        hidden = output.last_hidden_state if hasattr(output, "last_hidden_state") else output
        lengths = inputs["encoder_lengths"]
        if self.main_input == "pixel_values":
            items = hidden[0].split([n + self.prefix for n in lengths])
            features = torch.cat([item[self.prefix :] for item in items])
        else:
            features = torch.cat([hidden[i, :n] for i, n in enumerate(lengths)])
        if self.postprocess is not None:
            features = self.postprocess(inputs, features)
        assert self.projector is not None, "connect() was not called"
        features = self.projector(stack_tokens(features, lengths, self.downsample))
        if self.postprocess_projector is not None:
            features = self.postprocess_projector(inputs, features)
        return features
