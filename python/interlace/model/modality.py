"""ModalityModule: an unmodified HuggingFace encoder with its projector, run on packed items.

    media ── preprocess ── encoder ── postprocess ── stack k tokens ── projector ── postprocess_projector ── features
                (dict)     [1, N, D]     [N, D]        [N/k, k D]        [n, D_llm]                         [n, D_llm]

Images keep their own resolution. The part of the encoder before its layers (patches, interpolated positions) runs once
per distinct size, or once for all in encoders that take several sizes (images.py). All items are then concatenated into
one row [1, N, D], and a block-diagonal bitfield mask separates them. Audio is padded to the encoder's required length
for its convolutions only. The padding is dropped before the first layer, so it costs no attention and no compute.
Attention must go through `attn_implementation="interlace"`.

An encoder that takes numbers about each item (grid_thw, as in Qwen2-VL) gets all items in one call. It separates them
by its own boundaries, in each layer in its own way (patches.py).

Some encoders mix tokens elsewhere too (pooling or convolutions between or after the layers). A probe detects them
(probe/encoder.py). They get one call per item size, or one per item (rows.py). Stages still pass on one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.attention import AttentionPlan
from interlace.attention.hf import FLASH_NAME, NAME, use_plan
from interlace.masks import BitfieldMask
from interlace.model.counting.shapes import features_after_layers, measure, tokens_before_layers
from interlace.model.inputs import callbacks
from interlace.model.inputs.base import NOTHING, About, Inputs, Item, Shape
from interlace.model.inputs.clips import ClipInputs
from interlace.model.inputs.images import ImageInputs
from interlace.model.inputs.kinds import Feed, config_of, features_of, feeds_of, kind_of
from interlace.model.inputs.patches import PatchInputs
from interlace.model.inputs.tiles import TileInputs
from interlace.model.probe.encoder import encoder_packing
from interlace.model.projector import PROJECTORS, Grid, count_tokens, make_projector, project
from interlace.model.rows import PACKED, full_plan, packed_plan
from interlace.model.sample import Media
from interlace.model.stages.attention_switch import use_bitfield_attention
from interlace.model.stages.slice import carve, changing_output, find_layers, leave, run
from interlace.parallel.sending import plan_to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput
    from typing_extensions import Unpack

    from interlace.model.inputs.callbacks import Callbacks
    from interlace.parallel.context import Context

Rows = Callable[[Tensor], Tensor]


class ModalityModule(nn.Module):
    """An encoder for one modality, or (with projector=None) a language model with callbacks.

    module: HuggingFace model whose attention goes through its attention interface. Its main input decides the kind:
    `pixel_values` images (3, H, W), `input_features` audio (mel bins, frames), `input_ids` text; with an additional
    `grid_thw`, images and videos of (patches, numbers of a patch), whose grid is in Media.about.
    projector: "linear", "mlp", "pixel_shuffle", "qformer" or a class. The class is called with (downsample * D, D_llm,
    **projector_config) when the module joins a MultimodalModel, where D_llm is known. It may also be an ItemProjector,
    or your own module that maps [n, downsample * D] to [n, D_llm]. None for an encoder whose features already have
    width D_llm.
    preprocess: (inputs) -> inputs, called before the encoder. It runs on every stage. On stages after the first, the
    inputs are meta tensors, so it must depend on shapes only.
    postprocess: (inputs, output) -> output, features [N, D] of the encoder in item order, without class tokens.
    postprocess_projector: (inputs, output) -> output, features [n, D_llm]. (Cornstarch 2025-03 section 5.1.)
    downsample: number of consecutive tokens that become one. An item of n tokens becomes ceil(n / downsample).
    tokens: (shape, about) -> language-model tokens, for callbacks that change the number.
    collate: items -> inputs, instead of `pixel_values=[...]` or `input_features, lengths`.
    layers: path of the ModuleList that is cut into stages, if it cannot be found automatically.

    Raises ValueError for a module without recognisable layers or input, for one whose features here differ from its own
    forward, and for an unknown projector. Raises TypeError for a callback that does not take these arguments.
    """

    module: PreTrainedModel
    drops_prefix = True  # features do not include those of class tokens

    def __init__(
        self,
        module: nn.Module,
        projector: str | nn.Module | type[nn.Module] | None = "linear",
        *,
        projector_config: Mapping[str, Any] | None = None,
        downsample: int = 1,
        layers: str | None = None,
        **given: Unpack[Callbacks],
    ):
        super().__init__()
        self.module = module
        self.layer_path = find_layers(module, layers)
        self.num_layers = len(self.layers)
        self.start, self.stop = 0, self.num_layers
        self.backend: str | None = None
        self.kind = kind_of(module)
        callbacks.check(given)
        if downsample < 1:
            raise ValueError(f"downsample is {downsample}; it must be at least 1 (tokens that become one)")
        if isinstance(projector, str) and projector not in PROJECTORS:
            raise ValueError(f"unknown projector {projector!r}: use {', '.join(PROJECTORS)} or your own module")
        self.projector = projector if isinstance(projector, nn.Module) else None
        # Set only if the projector must be created: a given module would be registered under two names.
        self.projector_class = projector if isinstance(projector, type) else None
        if isinstance(projector, str):
            self.projector_class = PROJECTORS[projector]
        self.projector_config = dict(projector_config or {})
        self.downsample = downsample
        self.preprocess, self.postprocess = given.get("preprocess"), given.get("postprocess")
        self.postprocess_projector = given.get("postprocess_projector")
        self._tokens, self._collate = given.get("tokens"), given.get("collate")
        self.tower_names, self.projector_names = ["module"], ["projector"]  # module names for freezing
        self.out_features = 0
        self.hidden_size = self.feature_size = 0
        self.implementation = NAME
        self.packing = PACKED  # of interlace.model.rows
        self.prefix = 0  # class tokens before those of an item
        self._counts: dict[Any, int] = {}  # shape of an item -> features
        self._lengths: dict[Shape, int] = {}  # shape of an item -> tokens inside the layers
        self.returned: tuple[int | None, ...] = ()  # return kind of each layer, see slice.Absent
        if self.kind == "text":
            use_bitfield_attention(module)
            return
        try:
            config = config_of(module, self.layer_path)
            feeds = feeds_of(module, config, self.layer_path)
        except Exception as error:  # a config may lack any attribute
            raise self._unknown(error) from error
        self.feed: Feed = feeds[0]
        width = self.feed.width if isinstance(self.feed, PatchInputs) else None
        self.hidden_size = int(width or getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 0)
        if not self.hidden_size:
            raise ValueError(f"{type(module).__name__} has no config.hidden_size or d_model: pass a HuggingFace model")
        # An encoder that packs its items into one row separates them by its own mask, except under FLASH_NAME.
        apart = self.feed.in_one_row and not isinstance(self.feed, TileInputs)
        # An encoder with its own attention keeps it: it gets items alone or with equal ones, so no mask is needed.
        self.implementation = use_bitfield_attention(module, FLASH_NAME if apart else NAME, required=apart)
        try:
            self._measure(feeds)
        except Exception as error:  # a model may raise anything
            raise self._unknown(error) from error
        packing = encoder_packing(self)
        self.packing, self.returned = packing.name, packing.returned
        self.feature_size = packing.width or self.hidden_size
        self.feed = packing.feed or self.feed
        if packing.implementation:
            self.implementation = packing.implementation
            self.module.set_attn_implementation(self.implementation)

    def _unknown(self, error: Exception) -> ValueError:
        return ValueError(
            f"{type(self.module).__name__} is not a supported {self.kind} encoder "
            f"({type(error).__name__}: {error}): use one like SigLIP, CLIP or Whisper"
        )

    @property
    def images(self) -> ImageInputs | None:
        """Image inputs of the encoder; None if it takes no images."""
        return self.feed if isinstance(self.feed, ImageInputs) else None

    @property
    def in_one_row(self) -> bool:
        """True if one call of the encoder takes all items and concatenates their tokens itself."""
        return self.feed.in_one_row

    @property
    def default(self) -> Item:
        """An item of the encoder's configured size."""
        return self.feed.default

    @property
    def default_shape(self) -> Shape:
        """Shape of the default item."""
        return self.default.shape

    def _measure(self, feeds: Sequence[Feed]) -> None:
        measure(self, feeds)

    def connect(self, out_features: int) -> None:
        """Create the projector for a language model of this hidden size (called by MultimodalModel)."""
        self.out_features = out_features
        width = self.feature_size * self.downsample
        if self.projector_class is not None and self.projector is None:
            like = next(self.module.parameters())
            made = make_projector(self.projector_class, width, out_features, self.projector_config)
            self.projector = made.to(device=like.device, dtype=like.dtype)
        if self.projector is None and (self.kind == "text" or (width != out_features and self.postprocess is None)):
            raise ValueError(
                f'an encoder needs a projector: pass "linear", "mlp" or a module that maps {self.kind} features from '
                f"{width} to {out_features} channels"
            )

    # ------------------------------------------------------------------ lengths

    @property
    def nominal_length(self) -> int:
        """Tokens inside the layers for an item of the encoder's configured size."""
        return self._length(self.default)

    def encoder_length(self, shape: Shape, about: About = NOTHING) -> int:
        """Tokens of an item inside the encoder's layers, class tokens included.

        Raises ValueError for an item that the encoder does not support; the message lists what it supports.
        """
        item = Item(tuple(shape), about)
        self.feed.check(item, type(self.module).__name__)
        return self._length(item)

    def _length(self, item: Item) -> int:
        if not isinstance(self.feed, ClipInputs):
            return self.feed.tokens(item) + self.prefix
        if item.shape not in self._lengths:
            try:
                self._lengths[item.shape] = tokens_before_layers(self, item)
            except (RuntimeError, ValueError) as error:
                raise ValueError(
                    f"{type(self.module).__name__} does not take {self.kind} of shape {item.shape} ({error}): give it "
                    "a longer clip"
                ) from error
        return self._lengths[item.shape]

    def tokens(self, shape: Shape, about: About = NOTHING) -> int:
        """Number of language-model tokens (= placeholders) of an item. Raises ValueError as encoder_length.

        shape, about: of its Media. Image (3, H, W): ceil(patches / downsample). Audio (mel bins, frames):
        ceil(ceil(frames / stride) / downsample). (patches, numbers of a patch) with grid_thw: the features of the
        encoder's merger, divided by `downsample`, rounded up.
        """
        if self._tokens is not None:
            return callbacks.token_count(self._tokens, tuple(shape), about)
        item = Item(tuple(shape), about)
        count = -(-self._feature_count(item) // self.downsample)
        return count_tokens(self.projector or self.projector_class, count, self._grid(item, count))

    def _grid(self, item: Item, features: int) -> Grid | None:
        """Rows and columns of an item's features; None if they form no grid."""
        rows, columns = (0, 0) if self.images is None else self.images.grid(item)
        return (rows, columns) if rows * columns == features else None

    def _feature_count(self, item: Item) -> int:
        """Number of features of an item, before downsampling."""
        length = self.encoder_length(*item)
        if isinstance(self.feed, PatchInputs):
            return self.feed.features(item)
        if self.packing == PACKED and self.drops_prefix:
            return length - self.prefix
        key = (item.shape, length, tuple(sorted(item.about.items())) if self.takes_item_data else ())
        if key not in self._counts:
            self._counts[key] = features_after_layers(self, item, length)
        return self._counts[key] - (self.prefix if self.drops_prefix and self._counts[key] == length else 0)

    # ------------------------------------------------------------------ inputs

    def collate(self, items: Sequence[Media]) -> Inputs:
        """Inputs of `forward` for these items. Items without data become meta tensors: shapes for later stages.

        Images: pixel_values = list of [3, H, W]. Audio: input_features [n, mel, longest], padded with zeros, and
        lengths int64 [n] in frames. Both: plan, the attention plan of the packed items. It is absent if the items are
        not packed, or if a preprocess callback may change them. Patches: list of [patches, numbers of a patch], and
        int64 [n, k] for each per-item name of the encoder, such as grid_thw [n, 3].
        """
        if self._collate is not None:
            return callbacks.call("collate", self._collate, items)  # type: ignore[no-any-return]
        inputs = self.feed.collate(items)
        if self.preprocess is None and items and self.packing == PACKED and not self.takes_item_data:
            inputs["plan"] = packed_plan([self.encoder_length(item.shape, item.about) for item in items])
        return inputs

    def kwargs_of(self, items: Sequence[Media], like: Tensor | None = None) -> dict[str, Any]:
        """Encoder arguments for items of equal size.

        like: tensor with the device and dtype to use; default: a weight of the layers.
        """
        like = next(self.layers.parameters()) if like is None else like
        return self.feed.kwargs(self.feed.collate(items), range(len(items)), like)

    def _groups(self, inputs: Inputs, items: list[Item], like: Tensor) -> list[tuple[list[int], dict[str, Any]]]:
        """The items of each encoder call, with the arguments of that call on the first stage."""
        sets = self.feed.sets(items, self.packing)
        if not self.is_first:
            return [(which, {}) for which in sets]
        if any(item.is_meta for item in inputs[self.feed.argument]) and not like.is_meta:
            raise ValueError(
                f"the batch has {self.kind} items that were not decoded (Media.data is None), but this rank runs the "
                "encoder's first stage: decode this modality on this rank"
            )
        return [(which, self.feed.kwargs(inputs, which, like)) for which in sets]

    # ------------------------------------------------------------------ forward

    @property
    def layers(self) -> nn.ModuleList:
        """The list of layers that is cut into stages."""
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
        """Run this stage: hidden state [1, N, D] for the next stage, or features [n, D_llm] on the last stage.

        hidden: the previous stage's output. Stages after the first use only the shapes of `inputs`.
        With "context" in `inputs`, the layers and the hidden states between stages hold this rank's share of the rows.
        """
        if self.preprocess is not None:  # may drop unknown inputs
            inputs = {"context": inputs.get("context"), **callbacks.call("preprocess", self.preprocess, dict(inputs))}
        items = self.feed.items(inputs)
        lengths = [self.encoder_length(*item) for item in items]
        like = next(self.layers.parameters())
        if not items:
            empty = like.new_zeros
            return empty(0, self.out_features) if self.is_last else empty(1, 0, self.hidden_size)
        if hidden is None and not self.is_first:
            raise ValueError(f"layers {self.start} to {self.stop} need the previous stage's hidden state")
        if self.takes_item_data or self.packing != PACKED:
            pieces = self._run_in_sets(inputs, items, lengths, like, hidden)
        else:
            output = self._run_packed(inputs, items, lengths, like, hidden)
            if not self.is_last:
                return output
            pieces = self.features_of(output)[0].split(lengths)
        if not self.is_last:
            return torch.cat(pieces).unsqueeze(0)
        return self._project(inputs, [self.without_prefix(piece, n) for piece, n in zip(pieces, lengths)], items)

    @property
    def takes_item_data(self) -> bool:
        """True if the encoder takes numbers about each item (Media.about). It then also makes the features itself."""
        return isinstance(self.feed, (PatchInputs, TileInputs))

    def _run_packed(
        self, inputs: Inputs, items: list[Item], lengths: list[int], like: Tensor, hidden: Tensor | None
    ) -> Tensor | ModelOutput:
        plan = inputs.get("plan")
        if plan is None or plan.q_len != sum(lengths):
            plan = packed_plan(lengths)
        with self._sharing(inputs.get("context"), plan, like.device) as take:
            if hidden is None:
                return self._run_first(inputs, items, lengths, like, take)
            return self._run_later(hidden, like, items)

    @contextmanager
    def _sharing(self, context: Context | None, plan: AttentionPlan, device: torch.device) -> Iterator[Rows]:
        """Inside, attention follows `plan`. With a context, the layers must get the yielded share of the rows."""
        if context is None:
            with use_plan(plan_to_device(plan, device), backend=self.backend):
                yield lambda rows: rows
            return
        share = context.share(BitfieldMask.from_tokens(plan.queries(), plan.sinks), plan, self.backend)
        last = self.layers[self.stop - 1]
        with (
            use_plan(plan_to_device(share.plan, device), backend=share.attend),
            changing_output(last, share.unshard) if self.is_last else nullcontext(),
        ):
            yield share.shard

    def _run_later(self, hidden: Tensor, like: Tensor, items: list[Item]) -> Tensor | ModelOutput:
        # The first layer replaces the hollow prologue's output.
        kwargs = self.feed.blank(items, self.packing, like)
        if self.takes_item_data:  # layers may take tokens without a batch [N, D], or tiles as a batch
            return run(self.module, self._first_layer, kwargs, enter=lambda given: hidden.reshape(given.shape))[0]
        return run(self.module, self._first_layer, kwargs, hidden=hidden)[0]

    def _run_first(
        self, inputs: Inputs, items: list[Item], lengths: list[int], like: Tensor, take: Rows
    ) -> Tensor | ModelOutput:
        """Run the prologue per group. The last group continues with `take` of all packed tokens; others stop before."""
        *others, (last, kwargs) = self._groups(inputs, items, like)
        if self.in_one_row:
            return run(self.module, self._first_layer, kwargs)[0]
        pieces: dict[int, Tensor] = {}

        def keep(which: list[int], hidden: Tensor) -> None:
            pieces.update((i, hidden[row, : lengths[i]]) for row, i in enumerate(which))

        for which, given in others:
            captured, _ = run(self.module, self._first_layer, given, enter=leave)
            keep(which, captured)

        def enter(hidden: Tensor) -> Tensor:
            keep(last, hidden)
            return take(torch.cat([pieces[i] for i in range(len(lengths))]).unsqueeze(0))

        output, _ = run(self.module, self._first_layer, kwargs, enter=enter)
        return output

    def _run_in_sets(
        self, inputs: Inputs, items: list[Item], lengths: list[int], like: Tensor, hidden: Tensor | None
    ) -> list[Tensor]:
        """One call per group; returns each item's hidden state [L, D], or its features [n, D] on the last stage."""
        if self.takes_item_data and inputs.get("context") is not None:
            raise ValueError(f"{type(self.module).__name__} depends on the order of tokens: use cp = 1")
        given = () if hidden is None else hidden[0].split(lengths)
        pieces: dict[int, Tensor] = {}
        for which, kwargs in self._groups(inputs, items, like):
            some, length = [items[i] for i in which], lengths[which[0]]
            with use_plan(self._plan_of(some, length, like.device), backend=self.backend):
                if hidden is None:
                    enter = None if self.takes_item_data else partial(_first_tokens, length=length)
                    output, _ = run(self.module, self._first_layer, kwargs, enter=enter)
                else:
                    join = torch.cat if self.takes_item_data else torch.stack
                    output = self._run_later(join([given[i] for i in which]), like, some)
            output = self.features_of(output) if self.is_last else output
            if self.takes_item_data:
                counts = [self._feature_count(item) for item in some] if self.is_last else [lengths[i] for i in which]
                output = output.reshape(-1, output.shape[-1]).split(counts)
            pieces.update(zip(which, output))
        return [pieces[i] for i in range(len(lengths))]

    def _plan_of(self, items: list[Item], length: int, device: torch.device) -> AttentionPlan | None:
        """Plan of a call for these items; None if the encoder passes its own boundaries of attention to its layers."""
        if isinstance(self.feed, TileInputs):
            return full_plan(sum(item.shape[0] for item in items), self.feed.length, device)
        return None if self.takes_item_data else full_plan(len(items), length, device)

    def features_of(self, output: object) -> Tensor:
        """Features [B, n, D] in an encoder's output; [1, n, D] of all items if it takes numbers about each item."""
        if self.takes_item_data:  # it may merge tokens, and return the merged ones beside the tokens themselves
            pooled = isinstance(self.feed, TileInputs) or self.feed.pooled  # type: ignore[union-attr]
            features = getattr(output, "pooler_output", None) if pooled else None
            features = features_of(output) if features is None else features
            features = torch.cat(list(features)) if isinstance(features, (tuple, list)) else features
            return features.reshape(1, -1, features.shape[-1])
        return features_of(output)

    def without_prefix(self, features: Tensor, length: int) -> Tensor:
        """Features [n, D] without class tokens. Unchanged if the part after the layers has pooled the tokens."""
        return features[self.prefix :] if self.drops_prefix and len(features) == length else features

    def stage(self, start: int, stop: int, cut: Callable[..., nn.Module] = carve) -> ModalityModule:
        """Layers [start, stop) as a pipeline stage. cut: `carve` with options."""
        path = f"module.{self.layer_path}"
        part = cut(self, path, start, stop, returned=self.returned, zeros=self.in_one_row)
        assert isinstance(part, ModalityModule)
        part.start, part.stop = start, stop
        return part

    def _project(self, inputs: Inputs, pieces: Sequence[Tensor], items: Sequence[Item]) -> Tensor:
        features, lengths = torch.cat(list(pieces)), [len(piece) for piece in pieces]
        if self.postprocess is not None:
            features = callbacks.call("postprocess", self.postprocess, inputs, features)
        grids = [self._grid(item, -(-n // self.downsample)) for item, n in zip(items, lengths, strict=True)]
        features = project(self.projector, features, lengths, grids, self.downsample)
        if self.postprocess_projector is not None:
            features = callbacks.call("postprocess_projector", self.postprocess_projector, inputs, features)
        if self._tokens or self.postprocess or self.postprocess_projector:
            callbacks.check_features(features, [self.tokens(*item) for item in items])
        return features


def _first_tokens(hidden: Tensor, length: int) -> Tensor:
    return hidden[:, :length]


class Encoders(nn.ModuleDict):
    """Encoder name -> ModalityModule."""

    def __getitem__(self, name: str) -> ModalityModule:
        encoder = super().__getitem__(name)
        assert isinstance(encoder, ModalityModule)
        return encoder
