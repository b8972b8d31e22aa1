"""ModalityModule: an unmodified HuggingFace encoder with its projector, run on packed items.

    media ── preprocess ── encoder ── postprocess ── stack k tokens ── projector ── postprocess_projector ── features
                (dict)     [1, N, D]     [N, D]        [N/k, k D]        [n, D_llm]                         [n, D_llm]

Images keep their own resolution: the encoder's part before its layers (patches, interpolated positions) runs once for
each distinct size (or for all, in encoders that take several: images.py), then all items lie side by side in one row
[1, N, D] and a block-diagonal bitfield mask keeps them apart. Audio is padded to the length the encoder insists on for
its convolutions only; the padding is dropped before the first layer, so it is neither attended nor computed. Attention
must go through `attn_implementation="interlace"`.

An encoder that mixes tokens elsewhere too (pooling or convolutions between or after its layers), as a trial finds out
(trial_encoder.py), gets a call per size of items instead, or per item (rows.py); stages still hand on one row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.attention import AttentionPlan
from interlace.attention.hf import FLASH_NAME, NAME, use_plan
from interlace.masks import BitfieldMask
from interlace.model.images import ImageInputs, Size, stack_images
from interlace.model.projector import PROJECTORS, Grid, ItemProjector, count_tokens, make_projector, stack_tokens
from interlace.model.rows import ALONE, PACKED, mask_of, packed_plan
from interlace.model.sample import Media
from interlace.model.slice import changing_output, epilogue, find_layers, leave, prologue, run
from interlace.model.switch import use_bitfield_attention
from interlace.model.trial_encoder import encoder_packing

if TYPE_CHECKING:
    from interlace.parallel.context import Context

Inputs = dict[str, Any]
Rows = Callable[[Tensor], Tensor]
KINDS = {"pixel_values": "image", "input_features": "audio", "input_ids": "text"}


@dataclass(frozen=True)
class _Group:
    """Items that one call of the prologue takes: their indices and what the encoder is called with."""

    items: list[int]
    kwargs: dict[str, Any] = field(default_factory=dict)


class ModalityModule(nn.Module):
    """An encoder for one modality, or (with projector=None) a language model with callbacks.

    module: HuggingFace model whose attention goes through its attention interface. Its main input decides the kind:
    `pixel_values` images (3, H, W), `input_features` audio (mel bins, frames), `input_ids` text.
    projector: "linear", "mlp", "pixel_shuffle", "qformer" or a class, called with (downsample * D, D_llm,
    **projector_config) when the module joins a MultimodalModel, which knows D_llm; or your own module
    [n, downsample * D] -> [n, D_llm], or an ItemProjector.
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
        projector: str | nn.Module | type[nn.Module] | None = "linear",
        *,
        projector_config: Mapping[str, Any] | None = None,
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
        try:
            self.images = ImageInputs.of(module.config, list(parameters)) if self.kind == "image" else None
        except ValueError as error:
            raise self._unknown(error) from None
        if downsample < 1:
            raise ValueError(f"downsample is {downsample}; it must be at least 1 (tokens that become one)")
        if isinstance(projector, str) and projector not in PROJECTORS:
            raise ValueError(f"unknown projector {projector!r}: use {', '.join(PROJECTORS)} or your own module")
        self.projector = projector if isinstance(projector, nn.Module) else None
        self._projector = PROJECTORS.get(projector) if isinstance(projector, str) else projector  # class of one to make
        self._projector_config = dict(projector_config or {})
        self.downsample = downsample
        self.preprocess, self.postprocess = preprocess, postprocess
        self.postprocess_projector = postprocess_projector
        self._tokens, self._collate = tokens, collate
        self.tower_names, self.projector_names = ["module"], ["projector"]  # what freezing the one or the other freezes
        self.out_features = 0
        config: Any = getattr(module, "config", None)
        self.hidden_size = int(getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 0)
        if not self.hidden_size and self.kind != "text":
            raise ValueError(f"{type(module).__name__} has no config.hidden_size or d_model: is it HuggingFace's?")
        self.in_one_row = self.images is not None and self.images.in_one_row
        # An encoder that lays its images in one row keeps them apart by a mask of its own, except under this name.
        self.implementation = FLASH_NAME if self.in_one_row else NAME
        use_bitfield_attention(module, self.implementation)
        self.packing = PACKED  # of interlace.model.rows
        self._counts: dict[tuple[int, ...], int] = {}
        self.returned: tuple[int | None, ...] = ()  # what each layer returns, see slice.Absent
        if self.kind != "text":
            try:
                self._measure()
            except Exception as error:  # whatever a config lacks, or a model may raise
                raise self._unknown(error) from error
            packing = encoder_packing(self)
            self.packing, self.returned = packing.name, packing.returned

    def _unknown(self, error: Exception) -> ValueError:
        return ValueError(
            f"{type(self.module).__name__} is no {self.kind} encoder that a ModalityModule knows how to feed "
            f"({type(error).__name__}: {error}): use one like SigLIP, CLIP or Whisper"
        )

    def _measure(self) -> None:
        """Learn the encoder's geometry from its config and from one run of its prologue without memory."""
        config: Any = self.module.config
        self.channels = int(getattr(config, "num_channels", None) or getattr(config, "num_mel_bins", None) or 0)
        if self.images is not None:
            self.default_shape: tuple[int, ...] = (self.channels, *self.images.size)
            self.prefix = self._tokens_before_layers(self.images.size) - self.images.tokens(self.images.size)
            self.any_size = self.images.interpolates or self._takes_any_size(self.images)
        else:
            convolutions = [m for m in self.module.modules() if isinstance(m, nn.Conv1d)]
            self.stride = math.prod(int(conv.stride[0]) for conv in convolutions)
            self.frames = int(config.max_source_positions) * self.stride
            self.default_shape = (self.channels, self.frames)
            self.prefix = 0

    def _tokens_before_layers(self, size: Size) -> int:
        """Tokens that the encoder makes of an image of this size; without memory."""
        item = torch.empty((1, self.channels, *size), device="meta")
        hidden, _ = run(prologue(self.module, self.layer_path), self._first_layer, self.kwargs_of(item))
        if hidden.dim() != 3:
            raise ValueError(f"its layers take {list(hidden.shape)}, not tokens [B, N, D]")
        return int(hidden.shape[1])

    def _takes_any_size(self, images: ImageInputs) -> bool:
        """Whether an image of another shape than the configured one gets the tokens that it should."""
        other = images.patch[0] * 3, images.patch[1] * 2
        try:
            return self._tokens_before_layers(other) == images.tokens(other) + self.prefix
        except Exception:  # whatever a model may raise for a size that it does not take
            return False

    def connect(self, out_features: int) -> None:
        """Make the projector for a language model of this hidden size (called by MultimodalModel)."""
        self.out_features = out_features
        if isinstance(self._projector, type) and self.projector is None:
            like = next(self.module.parameters())
            width = self.hidden_size * self.downsample
            made = make_projector(self._projector, width, out_features, self._projector_config)
            self.projector = made.to(device=like.device, dtype=like.dtype)
        if self.projector is None:
            raise ValueError(f'an encoder needs a projector: "linear", "mlp" or a module, for {self.kind}')

    # ------------------------------------------------------------------ lengths

    @property
    def nominal_length(self) -> int:
        """Tokens inside the layers of an item of the size that the encoder was configured for."""
        if self.images is not None:  # 384 pixels in patches of 14: the library's own processors cut the rim off
            return self.images.tokens(self.images.size) + self.prefix
        return self.encoder_length(self.default_shape)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError for an item that the encoder cannot take, saying what it takes."""
        if self.images is not None:
            self.images.check_shape(shape, self.channels, type(self.module).__name__)
            if not self.any_size and tuple(shape) != self.default_shape:
                raise ValueError(
                    f"an image of shape {shape} does not fit {type(self.module).__name__}, whose positions do not "
                    f"interpolate: resize images to {self.default_shape}"
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
        if self.images is None:
            return -(-shape[1] // self.stride)
        return self.images.tokens((shape[1], shape[2])) + self.prefix

    def tokens(self, shape: tuple[int, ...]) -> int:
        """Language-model tokens (= placeholders) that an item of this shape becomes. Raises ValueError as check_shape.

        image (3, H, W): ceil(patches / downsample); audio (mel bins, frames): ceil(ceil(frames / stride) / downsample).
        """
        if self._tokens is not None:
            return self._tokens(tuple(shape))
        count = -(-self._feature_count(tuple(shape)) // self.downsample)
        return count_tokens(self.projector or self._projector, count, self._grid(tuple(shape), count))

    @property
    def unit(self) -> int:
        """Rows and columns of an image's patches must be multiples of it."""
        return self.projector.unit if isinstance(self.projector, ItemProjector) else 1

    def _grid(self, shape: tuple[int, ...], features: int) -> Grid | None:
        """Rows and columns of an item's features; None where they are no grid."""
        if self.images is None:
            return None
        rows, columns = shape[1] // self.images.patch[0], shape[2] // self.images.patch[1]
        return (rows, columns) if rows * columns == features else None

    def _feature_count(self, shape: tuple[int, ...]) -> int:
        """Features of an item of this shape, before downsampling."""
        length = self.encoder_length(shape)
        if self.packing == PACKED:
            return length - self.prefix
        if shape not in self._counts:
            like = next(self.layers.parameters())
            hidden = torch.empty((1, length, self.hidden_size), device="meta", dtype=like.dtype)
            shell = epilogue(self.module, self.layer_path, self.returned)
            kept: Any = shell.get_submodule(self.layer_path)[0]  # type: ignore[index]
            output, _ = run(shell, kept, self._blank(like, shape), hidden=hidden)
            count = self.features_of(output).shape[1]
            self._counts[shape] = count - self.prefix if count == length else count
        return self._counts[shape]

    # ------------------------------------------------------------------ inputs

    def collate(self, items: Sequence[Media]) -> Inputs:
        """Inputs of `forward` for these items. Items without data become meta tensors: shapes for later stages.

        images: pixel_values = list of [3, H, W]; audio: input_features [n, mel, longest], padded with zeros, and
        lengths int64 [n] in frames. Both: plan, the attention plan of the packed items (absent where they are not
        packed, and with a preprocess callback, which may change them).
        """
        if self._collate is not None:
            return self._collate(items)
        if self.images is not None:
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
        if self.preprocess is None and items and self.packing == PACKED:
            inputs["plan"] = packed_plan([self.encoder_length(item.shape) for item in items])
        return inputs

    def kwargs_of(self, batch: Tensor, sizes: Sequence[Size] | None = None) -> dict[str, Any]:
        """What the encoder is called with for a batch of items; sizes: of images, where they are padded."""
        if self.images is None:
            return {self.input_name: batch}
        whole = (batch.shape[2], batch.shape[3])
        return self.images.kwargs(batch, [whole] * len(batch) if sizes is None else sizes)

    def _shapes(self, inputs: Inputs) -> list[tuple[int, ...]]:
        batch = inputs[self.input_name]
        if self.images is not None:
            return [tuple(image.shape) for image in batch]
        return [(batch.shape[1], int(n)) for n in inputs["lengths"]]

    def _sets(self, shapes: list[tuple[int, ...]]) -> list[list[int]]:
        """Items that one call takes: those of a size; alone each; where they are packed all that may be padded."""
        if self.packing == ALONE or (self.packing == PACKED and (self.images is None or self.in_one_row)):
            every = list(range(len(shapes)))
            return [every] if self.packing == PACKED else [[i] for i in every]
        sizes: dict[tuple[int, ...], list[int]] = {}
        for i, shape in enumerate(shapes):
            sizes.setdefault(shape, []).append(i)
        return list(sizes.values())

    def _groups(self, inputs: Inputs, shapes: list[tuple[int, ...]], like: Tensor) -> list[_Group]:
        """The calls of the prologue; audio is padded to the length that the encoder wants."""
        batch = inputs[self.input_name]
        if any(item.is_meta for item in batch) and not like.is_meta:
            raise ValueError(
                f"the batch holds {self.kind} items that were not decoded (Media.data is None), but this is the "
                "encoder's first stage, which reads them: decode this modality on this rank"
            )
        groups = []
        for items in self._sets(shapes):
            given = [batch[i].to(like) for i in items]
            if self.images is not None:
                kwargs = self.kwargs_of(stack_images(given), [(shapes[i][1], shapes[i][2]) for i in items])
            else:
                stacked = torch.stack(given)
                kwargs = self.kwargs_of(nn.functional.pad(stacked, (0, self.frames - stacked.shape[2])))
            groups.append(_Group(items, kwargs))
        return groups

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

        `hidden` is the previous stage's output; on stages after the first only the shapes of `inputs` matter. With
        "context" in `inputs` the layers, and the hidden states between stages, have this rank's share of the rows.
        """
        if self.preprocess is not None:  # which may leave out what it does not know
            inputs = {"context": inputs.get("context"), **self.preprocess(dict(inputs))}
        shapes = self._shapes(inputs)
        lengths = [self.encoder_length(shape) for shape in shapes]
        like = next(self.layers.parameters())
        if not shapes:
            empty = like.new_zeros
            return empty(0, self.out_features) if self.is_last else empty(1, 0, self.hidden_size)
        if self.packing == PACKED:
            output = self._run_packed(inputs, shapes, lengths, like, hidden)
            if not self.is_last:
                return output
            pieces = self.features_of(output)[0].split(lengths)
        else:
            pieces = self._run_apart(inputs, shapes, lengths, like, hidden)
            if not self.is_last:
                return torch.cat(pieces).unsqueeze(0)
        return self._project(inputs, [self.without_prefix(piece, n) for piece, n in zip(pieces, lengths)], shapes)

    def _run_packed(
        self, inputs: Inputs, shapes: list[tuple[int, ...]], lengths: list[int], like: Tensor, hidden: Tensor | None
    ) -> Any:
        plan = inputs.get("plan")
        if plan is None or plan.q_len != sum(lengths):
            plan = packed_plan(lengths)
        with self._sharing(inputs.get("context"), plan, like.device) as take:
            if self.is_first:
                return self._run_first(inputs, shapes, lengths, like, take)
            return self._run_later(hidden, like, shapes)

    @contextmanager
    def _sharing(self, context: Context | None, plan: AttentionPlan, device: torch.device) -> Iterator[Rows]:
        """Inside, attention follows `plan`; with a context the layers are to have what is yielded of the rows."""
        if context is None:
            with use_plan(plan.to(device), backend=self.backend):
                yield _all
            return
        share = context.share(mask_of(plan.queries(), plan.sinks), plan, self.backend)
        joined = changing_output(self.layers[self.stop - 1], share.whole) if self.is_last else nullcontext()
        with use_plan(share.plan.to(device), backend=share.attend), joined:
            yield share.take

    def _run_later(self, hidden: Tensor | None, like: Tensor, shapes: list[tuple[int, ...]]) -> Any:
        if hidden is None:
            raise ValueError(f"layers {self.start} to {self.stop} need the previous stage's hidden state")
        if self.in_one_row:  # its layers are told where each patch lies
            height, width = (max(shape[side] for shape in shapes) for side in (1, 2))
            zeros = like.new_zeros(()).expand(len(shapes), self.channels, height, width)
            kwargs = self.kwargs_of(zeros, [(shape[1], shape[2]) for shape in shapes])
        else:
            kwargs = self._blank(like, self.default_shape if self.packing == PACKED else shapes[0])
        # What the hollow prologue makes of this is replaced at the first layer.
        output, _ = run(self.module, self._first_layer, kwargs, hidden=hidden)
        return output

    def _blank(self, like: Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
        """What the encoder is called with for one item, without memory; its layers may be told the size of an image."""
        if self.images is None:
            shape = self.default_shape  # audio of any length is padded to it
        return self.kwargs_of(torch.empty((1, *shape), device="meta", dtype=like.dtype))

    def _run_first(
        self, inputs: Inputs, shapes: list[tuple[int, ...]], lengths: list[int], like: Tensor, take: Rows
    ) -> Any:
        """All groups but the last stop at the first layer; the last goes on with what `take` takes of all, packed."""
        if self.in_one_row:
            [group] = self._groups(inputs, shapes, like)
            return run(self.module, self._first_layer, group.kwargs)[0]
        *others, last = self._groups(inputs, shapes, like)
        pieces: dict[int, Tensor] = {}

        def keep(group: _Group, hidden: Tensor) -> None:
            pieces.update((i, hidden[row, : lengths[i]]) for row, i in enumerate(group.items))

        for group in others:
            captured, _ = run(self.module, self._first_layer, group.kwargs, enter=leave)
            keep(group, captured)

        def enter(hidden: Tensor) -> Tensor:
            keep(last, hidden)
            return take(torch.cat([pieces[i] for i in range(len(lengths))]).unsqueeze(0))

        output, _ = run(self.module, self._first_layer, last.kwargs, enter=enter)
        return output

    def _run_apart(
        self, inputs: Inputs, shapes: list[tuple[int, ...]], lengths: list[int], like: Tensor, hidden: Tensor | None
    ) -> list[Tensor]:
        """A call per group; the hidden state [L, D] of each item, or its features [n, D] on the last stage."""
        given = None if hidden is None else hidden[0].split(lengths)
        pieces: dict[int, Tensor] = {}
        groups = self._groups(inputs, shapes, like) if self.is_first else map(_Group, self._sets(shapes))
        for group in groups:
            length = lengths[group.items[0]]
            plan = AttentionPlan.build(BitfieldMask.full(len(group.items), length))
            with use_plan(plan.to(like.device), backend=self.backend):
                if self.is_first:
                    enter = partial(_first_tokens, length=length)
                    output, _ = run(self.module, self._first_layer, group.kwargs, enter=enter)
                else:
                    rows = None if given is None else torch.stack([given[i] for i in group.items])
                    output = self._run_later(rows, like, [shapes[i] for i in group.items])
            pieces.update(zip(group.items, self.features_of(output) if self.is_last else output))
        return [pieces[i] for i in range(len(lengths))]

    @staticmethod
    def features_of(output: Any) -> Tensor:
        """[B, n, D] of what the encoder returns."""
        features: Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        return features

    def without_prefix(self, features: Tensor, length: int) -> Tensor:
        """Features [n, D] without class tokens, as far as what follows the layers has not pooled all tokens."""
        return features[self.prefix :] if len(features) == length else features

    def _project(self, inputs: Inputs, pieces: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        features, lengths = torch.cat(list(pieces)), [len(piece) for piece in pieces]
        if self.postprocess is not None:
            features = self.postprocess(inputs, features)
            if features.shape[0] != sum(lengths):
                apart = self.downsample > 1 or isinstance(self.projector, ItemProjector)
                lengths = self._bad_postprocess(features, lengths) if apart else [features.shape[0]]
        features = stack_tokens(features, lengths, self.downsample)
        assert self.projector is not None
        if isinstance(self.projector, ItemProjector):
            lengths = [-(-n // self.downsample) for n in lengths]
            features = self.projector(features, lengths, [self._grid(*item) for item in zip(shapes, lengths)])
        else:
            features = self.projector(features)
        if self.postprocess_projector is not None:
            features = self.postprocess_projector(inputs, features)
        return features

    def _bad_postprocess(self, features: Tensor, lengths: list[int]) -> list[int]:
        raise ValueError(
            f"postprocess made {features.shape[0]} tokens of {sum(lengths)}, so downsample={self.downsample} or a "
            "projector that looks at items as a whole cannot tell them apart: stack tokens in the callback, set "
            'downsample=1 and use the projector "linear" or "mlp"'
        )


def _all(hidden: Tensor) -> Tensor:
    return hidden


def _first_tokens(hidden: Tensor, length: int) -> Tensor:
    return hidden[:, :length]


def _data(item: Media) -> Tensor:
    return torch.empty(item.shape, device="meta") if item.data is None else item.data
