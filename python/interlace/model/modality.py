"""ModalityModule: an unmodified HuggingFace encoder with its projector, run on packed items.

    media ── preprocess ── encoder ── postprocess ── stack k tokens ── projector ── postprocess_projector ── features
                (dict)     [1, N, D]     [N, D]        [N/k, k D]        [n, D_llm]                         [n, D_llm]

Images keep their own resolution: the encoder's part before its layers (patches, interpolated positions) runs once for
each distinct size, then all items lie side by side in one row [1, N, D] and a block-diagonal bitfield mask keeps them
apart. Audio is padded to the length the encoder insists on for its convolutions only; the padding is dropped before
the first layer, so it is neither attended nor computed. Attention must go through `attn_implementation="interlace"`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interlace.attention import AttentionPlan
from interlace.attention.hf import NAME, use_plan
from interlace.masks import BitfieldMask, word
from interlace.model.projector import PROJECTORS, stack_tokens
from interlace.model.sample import Media
from interlace.model.slice import find_layers, leave, prologue, run

Inputs = dict[str, Any]
KINDS = {"pixel_values": "image", "input_features": "audio", "input_ids": "text"}


@dataclass(frozen=True)
class _Group:
    """Items that one call of the prologue takes: their indices and what the encoder is called with."""

    items: list[int]
    kwargs: dict[str, Any]


class ModalityModule(nn.Module):
    """An encoder for one modality, or (with projector=None) a language model with callbacks.

    module: HuggingFace model whose attention goes through its attention interface. Its main input decides the kind:
    `pixel_values` images (3, H, W), `input_features` audio (mel bins, frames), `input_ids` text.
    projector: "linear", "mlp", or your own module [n, downsample * D] -> [n, D_llm]; the named ones are made when the
    module joins a MultimodalModel, which knows D_llm.
    preprocess(inputs) -> inputs, before the encoder. It runs on every stage, on those after the first with meta
    tensors: let it depend on shapes only.
    postprocess(inputs, output) -> output, features [N, D] of the encoder in item order, class tokens dropped.
    postprocess_projector(inputs, output) -> output, features [n, D_llm]. (Cornstarch 2025-03 section 5.1.)
    downsample: consecutive tokens of an item that become one, so an item of n becomes ceil(n / downsample).
    tokens: shape -> language-model tokens, where callbacks change the number.
    collate: items -> inputs, in place of `pixel_values=[...]` or `input_features, lengths`.
    layers: path of the ModuleList that is cut into stages, where it is not plain.

    Raises ValueError for a module without recognisable layers or input, one whose layers take tensors about each image
    (grid_thw, as in Qwen2-VL), or an unknown projector.
    """

    def __init__(
        self,
        module: nn.Module,
        projector: str | nn.Module | None = "linear",
        *,
        preprocess: Callable[[Inputs], Inputs] | None = None,
        postprocess: Callable[..., Any] | None = None,
        postprocess_projector: Callable[[Inputs, Tensor], Tensor] | None = None,
        downsample: int = 1,
        tokens: Callable[[tuple[int, ...]], int] | None = None,
        collate: Callable[[Sequence[Media]], Inputs] | None = None,
        layers: str | None = None,
    ):
        super().__init__()
        self.module = module
        self.layer_path = find_layers(module, layers)
        self.num_layers = len(self.layers)
        self.start, self.stop = 0, self.num_layers
        self.backend: str | None = None
        parameters = inspect.signature(module.forward).parameters
        if "grid_thw" in parameters:
            raise ValueError(
                f"{type(module).__name__} takes grid_thw: its layers depend on where each image lies, which stages do "
                "not pass on. Use an encoder that takes pixel_values (SigLIP, CLIP)"
            )
        self.input_name = next((name for name in parameters if name in KINDS), "")
        if not self.input_name:
            raise ValueError(
                f"{type(module).__name__}.forward takes none of {', '.join(KINDS)}: it is no image, audio or text model"
            )
        self.kind = KINDS[self.input_name]
        self._interpolates = "interpolate_pos_encoding" in parameters
        if downsample < 1:
            raise ValueError(f"downsample is {downsample}; it must be at least 1 (tokens that become one)")
        if isinstance(projector, str) and projector not in PROJECTORS:
            raise ValueError(f"unknown projector {projector!r}: use {', '.join(PROJECTORS)} or your own module")
        self.projector = projector if isinstance(projector, nn.Module) else None
        self._projector_name = projector if isinstance(projector, str) else None
        self.downsample = downsample
        self.preprocess, self.postprocess = preprocess, postprocess
        self.postprocess_projector = postprocess_projector
        self._tokens, self._collate = tokens, collate
        self.out_features = 0
        config: Any = getattr(module, "config", None)
        self.hidden_size = int(getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 0)
        if not self.hidden_size:
            raise ValueError(f"{type(module).__name__} has no config.hidden_size or d_model: is it HuggingFace's?")
        use_bitfield_attention(module)
        if self.kind != "text":
            self._measure()

    def _measure(self) -> None:
        """Learn the encoder's geometry from its config and from one run of its prologue without memory."""
        config: Any = self.module.config
        self.channels = int(getattr(config, "num_channels", None) or getattr(config, "num_mel_bins", None) or 0)
        if self.kind == "image":
            self.patch = int(config.patch_size)
            side = int(config.image_size)
            self._default: tuple[int, ...] = (self.channels, side, side)
            item = torch.empty((1, *self._default), device="meta")
            hidden, _ = run(prologue(self.module, self.layer_path), self._first_layer, self._kwargs(item))
            self.prefix = hidden.shape[1] - (side // self.patch) ** 2
        else:
            convolutions = [m for m in self.module.modules() if isinstance(m, nn.Conv1d)]
            self.stride = math.prod(int(conv.stride[0]) for conv in convolutions)
            self.frames = int(config.max_source_positions) * self.stride
            self._default = (self.channels, self.frames)
            self.prefix = 0

    def connect(self, out_features: int) -> None:
        """Make the projector for a language model of this hidden size (called by MultimodalModel)."""
        self.out_features = out_features
        if self._projector_name is not None and self.projector is None:
            like = next(self.module.parameters())
            made = PROJECTORS[self._projector_name](self.hidden_size * self.downsample, out_features)
            self.projector = made.to(device=like.device, dtype=like.dtype)
        if self.projector is None:
            raise ValueError(f'an encoder needs a projector: "linear", "mlp" or a module, for {self.kind}')

    # ------------------------------------------------------------------ lengths

    @property
    def nominal_length(self) -> int:
        """Tokens inside the layers of an item of the size that the encoder was configured for."""
        shape = self._default
        if self.kind == "image":  # 384 pixels in patches of 14: the library's own processors cut the rim off
            return (shape[1] // self.patch) * (shape[2] // self.patch) + self.prefix
        return self.encoder_length(shape)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError for an item that the encoder cannot take, saying what it takes."""
        if self.kind == "image":
            if len(shape) != 3 or shape[0] != self.channels or min(shape[1:]) < self.patch:
                raise ValueError(
                    f"an image of shape {shape} does not fit {type(self.module).__name__}, which takes "
                    f"({self.channels}, height, width) of at least {self.patch} x {self.patch} pixels"
                )
            if shape[1] % self.patch or shape[2] % self.patch:
                raise ValueError(
                    f"an image of {shape[1]} x {shape[2]} pixels would lose its rim: resize it so that both sides are "
                    f"multiples of the patch, {self.patch}"
                )
            if not self._interpolates and tuple(shape) != self._default:
                raise ValueError(
                    f"an image of shape {shape} does not fit {type(self.module).__name__}, whose positions do not "
                    f"interpolate: resize images to {self._default}"
                )
        elif len(shape) != 2 or shape[0] != self.channels:
            raise ValueError(
                f"audio of shape {shape} does not fit {type(self.module).__name__}, which takes "
                f"({self.channels} mel bins, frames)"
            )
        elif shape[1] > self.frames:
            raise ValueError(
                f"audio of {shape[1]} frames is too long for {type(self.module).__name__}, which has positions for "
                f"{self.frames} frames: shorten the clip or raise max_source_positions to {-(-shape[1] // self.stride)}"
            )

    def encoder_length(self, shape: tuple[int, ...]) -> int:
        """Tokens of an item inside the encoder's layers, class tokens included."""
        self.check_shape(tuple(shape))
        if self.kind == "audio":
            return -(-shape[1] // self.stride)
        return (shape[1] // self.patch) * (shape[2] // self.patch) + self.prefix

    def tokens(self, shape: tuple[int, ...]) -> int:
        """Language-model tokens (= placeholders) that an item of this shape becomes. Raises ValueError as check_shape.

        image (3, H, W): ceil(patches / downsample); audio (mel bins, frames): ceil(ceil(frames / stride) / downsample).
        """
        if self._tokens is not None:
            return self._tokens(tuple(shape))
        return -(-(self.encoder_length(tuple(shape)) - self.prefix) // self.downsample)

    # ------------------------------------------------------------------ inputs

    def collate(self, items: Sequence[Media]) -> Inputs:
        """Inputs of `forward` for these items. Items without data become meta tensors: shapes for later stages.

        images: pixel_values = list of [3, H, W]; audio: input_features [n, mel, longest], padded with zeros, and
        lengths int64 [n] in frames. Both: plan, the attention plan of the packed items (absent with a preprocess
        callback, which may change them).
        """
        if self._collate is not None:
            return self._collate(items)
        if self.kind == "image":
            inputs: Inputs = {"pixel_values": [_data(item) for item in items]}
        else:
            frames = max((item.shape[1] for item in items), default=0)
            device = "meta" if any(item.data is None for item in items) else None
            features = torch.zeros(len(items), self.channels, frames, device=device)
            for row, item in zip(features, items, strict=True):
                row[:, : item.shape[1]] = _data(item)
            inputs = {
                "input_features": features,
                "lengths": torch.tensor([item.shape[1] for item in items], dtype=torch.int64, device="cpu"),
            }
        if self.preprocess is None and items:
            inputs["plan"] = packed_plan([self.encoder_length(item.shape) for item in items])
        return inputs

    def _kwargs(self, batch: Tensor) -> dict[str, Any]:
        kwargs: dict[str, Any] = {self.input_name: batch}
        if self._interpolates:
            kwargs["interpolate_pos_encoding"] = True
        return kwargs

    def _shapes(self, inputs: Inputs) -> list[tuple[int, ...]]:
        batch = inputs[self.input_name]
        if self.kind == "image":
            return [tuple(image.shape) for image in batch]
        return [(batch.shape[1], int(n)) for n in inputs["lengths"]]

    def _groups(self, inputs: Inputs, shapes: list[tuple[int, ...]], like: Tensor) -> list[_Group]:
        """One call of the prologue per image size; audio in one call, padded to the length that the encoder wants."""
        batch = inputs[self.input_name]
        if any(item.is_meta for item in batch) and not like.is_meta:
            raise ValueError(
                f"the batch holds {self.kind} items that were not decoded (Media.data is None), but this is the "
                "encoder's first stage, which reads them: decode this modality on this rank"
            )
        if self.kind == "audio":
            batch = nn.functional.pad(batch.to(like), (0, self.frames - batch.shape[2]))
            return [_Group(list(range(len(shapes))), self._kwargs(batch))]
        sizes: dict[tuple[int, ...], list[int]] = {}
        for i, shape in enumerate(shapes):
            sizes.setdefault(shape, []).append(i)
        return [
            _Group(items, self._kwargs(torch.stack([batch[i].to(like) for i in items]))) for items in sizes.values()
        ]

    # ------------------------------------------------------------------ forward

    @property
    def layers(self) -> nn.ModuleList:
        """The list that is cut into stages."""
        layers = self.module.get_submodule(self.layer_path)
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def _first_layer(self) -> nn.Module:
        return self.layers[self.start]

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers

    def forward(self, **inputs: Any) -> Tensor:
        """Features [sum of tokens, D_llm] in item order; [0, D_llm] for no items. Keywords: see `collate`."""
        return self.run(inputs)

    def run(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        """This stage's part: hidden state [1, N, D] for the next stage, or on the last one features [n, D_llm].

        `hidden` is the previous stage's output; on stages after the first only the shapes of `inputs` matter.
        """
        if self.preprocess is not None:
            inputs = self.preprocess(dict(inputs))
        shapes = self._shapes(inputs)
        lengths = [self.encoder_length(shape) for shape in shapes]
        like = next(self.layers.parameters())
        if not shapes:
            empty = like.new_zeros
            return empty(0, self.out_features) if self.is_last else empty(1, 0, self.hidden_size)
        plan = inputs.get("plan")
        if plan is None or plan.q_len != sum(lengths):
            plan = packed_plan(lengths)
        with use_plan(plan.to(like.device), backend=self.backend):
            if self.is_first:
                output = self._run_first(inputs, shapes, lengths, like)
            else:
                if hidden is None:
                    raise ValueError(f"layers {self.start} to {self.stop} need the previous stage's hidden state")
                # Shapes do not matter: what the hollow prologue makes of this is replaced at the first layer.
                blank = torch.empty((1, *self._default), device="meta", dtype=like.dtype)
                output, _ = run(self.module, self._first_layer, self._kwargs(blank), hidden=hidden)
        if not self.is_last:
            return output
        features = output[0] if isinstance(output, tuple) else output.last_hidden_state
        return self._project(inputs, features[0], lengths)

    def _run_first(self, inputs: Inputs, shapes: list[tuple[int, ...]], lengths: list[int], like: Tensor) -> Any:
        """All groups but the last stop at the first layer; the last one goes on with everything packed."""
        *others, last = self._groups(inputs, shapes, like)
        pieces: dict[int, Tensor] = {}

        def keep(group: _Group, hidden: Tensor) -> None:
            pieces.update((i, hidden[row, : lengths[i]]) for row, i in enumerate(group.items))

        for group in others:
            captured, _ = run(self.module, self._first_layer, group.kwargs, enter=leave)
            keep(group, captured)

        def enter(hidden: Tensor) -> Tensor:
            keep(last, hidden)
            return torch.cat([pieces[i] for i in range(len(lengths))]).unsqueeze(0)

        output, _ = run(self.module, self._first_layer, last.kwargs, enter=enter)
        return output

    def _project(self, inputs: Inputs, features: Tensor, lengths: list[int]) -> Tensor:
        if self.prefix:
            rows = torch.cat([torch.arange(n, device=features.device) >= self.prefix for n in lengths])
            features = features.index_select(0, rows.nonzero().squeeze(1))
            lengths = [n - self.prefix for n in lengths]
        if self.postprocess is not None:
            features = self.postprocess(inputs, features)
            if features.shape[0] != sum(lengths):
                lengths = [features.shape[0]] if self.downsample == 1 else self._bad_postprocess(features, lengths)
        features = stack_tokens(features, lengths, self.downsample)
        assert self.projector is not None
        features = self.projector(features)
        if self.postprocess_projector is not None:
            features = self.postprocess_projector(inputs, features)
        return features

    def _bad_postprocess(self, features: Tensor, lengths: list[int]) -> list[int]:
        raise ValueError(
            f"postprocess made {features.shape[0]} tokens of {sum(lengths)}, so downsample={self.downsample} cannot "
            "tell items apart: stack tokens in the callback and set downsample=1"
        )


def packed_plan(lengths: Sequence[int]) -> AttentionPlan:
    """Plan of items side by side in one row, each seeing all of itself and nothing else."""
    counts = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    doc = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32, device="cpu"), counts).unsqueeze(0)
    bits = torch.full(doc.shape, word(0), dtype=torch.int64, device="cpu")
    return AttentionPlan.build(BitfieldMask(bits, doc=doc))


def use_bitfield_attention(module: nn.Module) -> None:
    """Switch a HuggingFace model to `attn_implementation="interlace"`.

    Raises ValueError where that cannot be done, and for layer drop: a dropped layer may be the one that a stage's
    hidden state enters or leaves at.
    """
    drop = getattr(module, "layerdrop", 0.0)
    if drop:
        raise ValueError(
            f"{type(module).__name__} has layer drop {drop}, which cannot be cut into stages: set layerdrop "
            "(encoder_layerdrop in Whisper's config) to 0"
        )
    setter = getattr(module, "set_attn_implementation", None)
    if setter is None:
        raise ValueError(f"{type(module).__name__} is no HuggingFace model: its attention cannot be switched")
    config: Any = module.config
    if config._attn_implementation != NAME:
        setter(NAME)
    if config._attn_implementation != NAME:
        raise ValueError(
            f"{type(module).__name__} does not take attn_implementation={NAME!r}: its attention does not go through "
            "HuggingFace's attention interface"
        )


def _data(item: Media) -> Tensor:
    return torch.empty(item.shape, device="meta") if item.data is None else item.data
