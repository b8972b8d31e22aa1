"""Bytes of a model's weights on a rank, and of activations that its forwards keep, measured on tensors without memory.

A whole module is run once on fake tensors, with the code of its stages: cut for tensor parallelism as in the layout,
under the autocast and the checkpointing of the run. All storages that autograd saves are recorded with the layers that
save them, and all others that are alive at the end. From these the share of a stage is computed for any cut. Runs at
several lengths give the bytes per chunk, per row and per row with a target. Only some of several identical layers are
run (see `identical_layers`).

If sequence parallelism cuts rows, the input of a stage is counted whole, which includes the rank's own rows. If context
parallelism cuts the rows of an encoder, modules before and after its layers are counted for all rows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from interlace.comm.transports.silent import SilentTransport
from interlace.estimate.identical_layers import Alike, NotAlike, Storage
from interlace.layout import Layout
from interlace.model import Checkpointing, Media
from interlace.model.counting.fake_run import blank_inputs, give_shapes, without_gc
from interlace.model.inputs.base import Item
from interlace.model.loss import LOGITS_BYTES, head_of
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.stages.slice import hidden_argument
from interlace.model.stages.stage import StageModule
from interlace.parallel import Ranks
from interlace.parallel.vocabulary import VocabularyHead
from interlace.plan.memory import Activations, Kept, WeightSize
from interlace.run.execute.deferred import LinearLayers
from interlace.run.execute.weights import Cut, cut_weights
from interlace.run.graph import parameter_layers, users_of
from interlace.run.lanes import cut, how_cut, rows_of_plan

if TYPE_CHECKING:
    from interlace.model import MultimodalModel

_Case = TypeVar("_Case")
_ITEMS = (1, 2)  # of an encoder
_SAMPLES = ((4, 2), (8, 1), (4, 4))  # of the language model: number of samples, and targets of each


def weights_of(mllm: MultimodalModel, layout: Layout, *, sequence_parallel: bool = True) -> list[WeightSize]:
    """The parameters of a model on the meta device, as held by the ranks of the layout's lanes; a tied one once.

    sequence_parallel: as in `parallelize`.

    Raises ValueError for a module that its tp cannot cut.
    """
    layers = parameter_layers(mllm)
    held: dict[str, nn.Parameter] = {}
    cuts: dict[str, Cut] = {}
    in_part: set[str] = set()
    for name in layout.modules:
        stage = _stage(mllm, name, _Options(layout.spec(name).tp, sequence_parallel))
        held.update(stage.module.named_parameters(remove_duplicate=False))
        cuts.update(cut_weights(stage.module))
        in_part |= stage.in_part
    aliases: dict[int, list[str]] = {}
    parameters = dict(mllm.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        aliases.setdefault(id(parameter), []).append(name)
    held_weights = []
    users = users_of(mllm, [layer for name in layout.modules for layer in mllm.layer_list(name)])
    for names in aliases.values():
        parameter, (module, _) = held[names[0]], layers[names[0]]
        rows = _rows(parameter, cuts.get(names[0]), layout.spec(module).tp)
        shared_use = not in_part.isdisjoint(names)
        held_weights.append(
            WeightSize(
                name=names[0],
                module=module,
                layers=tuple(sorted({layers[name][1] for name in names})),
                rows=rows,
                width=parameter.numel() // max(rows[0], 1),
                itemsize=parameter.element_size(),
                trainable=parameter.requires_grad,
                in_part=shared_use,
                sharable=parameter.is_floating_point() and not (shared_use and parameter.requires_grad),
                beside=0 in (having := users[id(parameters[names[0]])]) or len(having) > 1,
            )
        )
    return held_weights


def _rows(parameter: nn.Parameter, cut: Cut | None, tp: int) -> tuple[int, ...]:
    """Rows on each rank of a lane. parameter: the piece of the first rank; other ranks may have fewer rows."""
    if cut is not None and cut.layer.cut[cut.key] == 0:
        parts = cut.layer.parts
        return tuple(parts * count for count in cut.layer.ranks.counts(cut.layer.sizes[0] // parts))
    return (len(parameter) if parameter.dim() else 1,) * tp


def activations_of(
    mllm: MultimodalModel,
    layout: Layout,
    *,
    checkpointing: Checkpointing = "none",
    sequence_parallel: bool = True,
    autocast: torch.dtype | None = None,
    items: Mapping[str, tuple[int, ...]] | None = None,
    split: bool = False,
) -> dict[str, Activations]:
    """Module -> activations that its forwards keep.

    mllm: on the meta device. checkpointing, sequence_parallel: as in `parallelize`. items: encoder -> shape of an item
    of the data (default: the one that the encoder was configured for). split: whether backwards may be split in two
    halves; then a backward of each run also measures the bytes kept between them.

    Raises ValueError for a module that its tp cannot cut.
    """
    by_module, outputs = dict[str, Activations](), dict[str, Tensor]()
    for name in layout.modules:  # the language model last
        spec, measure = layout.spec(name), partial(_language, mllm, outputs)
        if name != LANGUAGE_MODEL:
            shape = (items or {}).get(name)
            measure = partial(_encoder, mllm, mllm.encoders[name].default if shape is None else Item(shape))
        dealt = name != LANGUAGE_MODEL and spec.cp > 1
        options = _Options(spec.tp, sequence_parallel, dealt, checkpointing, autocast, split)
        try:
            by_module[name], outputs[name] = measure(name, Alike.of(mllm, name), options)
        except NotAlike:
            alike = Alike.none(len(mllm.layer_list(name)))
            by_module[name], outputs[name] = measure(name, alike, options)
    return by_module


# ---------------------------------------------------------------------- one module


def _encoder(
    mllm: MultimodalModel, shown: Item, name: str, alike: Alike, options: _Options
) -> tuple[Activations, Tensor]:
    """Activations that an encoder keeps, and its output features. shown: its item."""
    encoder, shaped = mllm.encoders[name], _shaped(mllm, name, alike)
    item = Media(shown.shape, encoder.tokens(*shown), torch.zeros(shown.shape), about=shown.about)

    def run(count: int, options: _Options, halves: bool) -> _Run:
        return shaped(options, halves).run(lambda _: encoder.collate([item] * count))

    recomputed = any(part.trainable for part in mllm.layers(name)[-1].parts if part.kind == "layer")
    return _kept(run, _ITEMS, options, recomputed)


def _language(
    mllm: MultimodalModel, features: Mapping[str, Tensor], name: str, alike: Alike, options: _Options
) -> tuple[Activations, Tensor]:
    """Activations that the language model keeps, and its output. features: the output of each encoder."""
    settings, shaped = mllm.language_settings, _shaped(mllm, name, alike)

    def run(each: tuple[int, int], options: _Options, halves: bool) -> _Run:
        measured = shaped(options, halves).run(partial(blank_inputs, mllm, features, *each))
        return measured._replace(targets=each[0] * each[1])

    activations, output = _kept(run, _SAMPLES, options, recomputed=True)
    whole = shaped(options, False).module
    head = head_of(whole.language_model) if settings.ends_with_head and settings.postprocess is None else None
    activations = replace(
        activations,
        feature=max((float(given.shape[1] * given.element_size()) for given in features.values()), default=0.0),
        words=0 if head is None else head.weight.shape[0],
        logits_bytes=LOGITS_BYTES,
        shared_head=isinstance(head, VocabularyHead),
    )
    return activations, output


def _kept(
    run: Callable[[_Case, _Options, bool], _Run], cases: Sequence[_Case], options: _Options, recomputed: bool
) -> tuple[Activations, Tensor]:
    """Activations that a module keeps, from runs on several inputs, and the output of the first.

    The first two cases have equally many targets, so they differ only in rows. recomputed: whether checkpointing
    recomputes layers even if only the last one has a backward.
    """
    runs = [run(case, options, False) for case in cases]
    kept, edges = _fitted(runs)
    plain, inner = options._replace(checkpointing="none"), tuple[float, ...]()
    if options.checkpointing != "none" and (recomputed or any(runs[0].backward[:-1])):
        inner = _recomputed(kept, _fitted([run(case, plain, False) for case in cases[:2]])[0], edges)
    deferred = _fitted([run(case, plain, True) for case in cases])[0] if options.split else ()
    return Activations(kept, edges, tuple(runs[0].backward), inner=inner, deferred=deferred), runs[0].made


def _fitted(runs: Sequence[_Run]) -> tuple[tuple[Kept, ...], tuple[float, ...]]:
    """Bytes per chunk, per row and per row with a target of each kind of storage; and bytes per row at the edges."""
    columns = [[1.0, run.rows, run.targets][: len(runs)] for run in runs]
    sums: dict[tuple[tuple[int, ...], int, int, bool], NDArray[np.float64]] = {}
    for place, run in enumerate(runs):
        for storage in run.storages:
            key = tuple(sorted(storage.layers)), storage.edge, storage.between, storage.outside
            sums.setdefault(key, np.zeros(len(runs)))[place] += storage.bytes
    kept = []
    for (layers, edge, between, outside), sizes in sorted(sums.items()):
        fixed, per_row, *more = np.linalg.solve(np.array(columns), sizes).round(6).tolist()
        per_target = more[0] if more else 0.0
        kept.append(Kept(layers, edge, fixed, per_row, per_target, between=between, outside=outside))
    return tuple(kept), tuple(size / runs[0].rows for size in runs[0].edges)


def _recomputed(kept: Sequence[Kept], whole: Sequence[Kept], edges: Sequence[float]) -> tuple[float, ...]:
    """Bytes per row that each layer keeps only without checkpointing. whole: storages without checkpointing."""

    def per_row(kept: Sequence[Kept], layer: int) -> float:
        return sum(each.per_row for each in kept if layer in each.layers)

    return tuple(max(per_row(whole, i) - per_row(kept, i), 0.0) for i in range(len(edges) - 1))


# ---------------------------------------------------------------------- one forward


class _Run(NamedTuple):
    """Results of one forward. edges: bytes of the input of each layer, and of the output; made: the output."""

    storages: list[Storage]
    edges: list[int]
    backward: list[bool]
    rows: int
    targets: int
    made: Tensor


class _Options(NamedTuple):
    """Options of a module's run. tp: ranks that share its weights. sequence_parallel: they also share its rows,
    if possible. dealt: context parallelism: a rank has some of the rows inside the layers and all rows outside. The
    other options: see `activations_of`."""

    tp: int
    sequence_parallel: bool
    dealt: bool = False
    checkpointing: Checkpointing = "none"
    autocast: torch.dtype | None = None
    split: bool = False


class _Stage(NamedTuple):
    """A whole module on the first rank of a lane. in_part: weights that it uses in part. cut: whether rows are cut."""

    module: StageModule
    in_part: set[str]
    cut: bool


def _stage(mllm: MultimodalModel, name: str, options: _Options) -> _Stage:
    layers, tp = len(mllm.layer_list(name)), options.tp
    stage = mllm.slice(name, 0, layers, copy=True, checkpointing=options.checkpointing)
    if tp == 1:
        return _Stage(stage, set(), False)
    how = how_cut(mllm, name, stage, tp, sequence_parallel=options.sequence_parallel)
    ranks = _Unanswered.at(0, tp)
    cut(stage, ranks, rows=how.rows)
    ranks.connect(SilentTransport(tp))
    return _Stage(stage, how.in_part, how.rows)


class _Shaped:
    """A module on fake tensors, for runs on inputs of several lengths. halves: record the tensors that its backward
    keeps for BACKWARD_WEIGHT, instead of those that its forward keeps."""

    def __init__(self, mllm: MultimodalModel, name: str, alike: Alike, options: _Options, halves: bool) -> None:
        self._mllm, self._alike, self._options, self._halves = mllm, alike, options, halves
        self._mode = _Shapes(allow_non_fake_inputs=True)
        self.module, _, self._rows_cut = _stage(mllm, name, options)
        self._weights = give_shapes(self.module, self._mode)
        self._layers = [self.module.get_submodule(layer.name) for layer in mllm.layers(name)]
        alike.leave_out(self._layers)

    def run(self, inputs: Callable[[FakeTensorMode], dict[str, Any]]) -> _Run:
        notes, autocast = _Notes(self._weights, self._rows_cut, self._options.dealt), self._options.autocast
        stage_inputs = inputs(self._mode)
        context = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
        with notes.watching(self._layers):
            if self._halves:
                # Including a tied head: its gradient is deferred if the embedding is on another rank.
                linears = LinearLayers(self.module, ())
                with notes, context, linears.forward():
                    output = self.module(stage_inputs)
                storages = self._alike.filled(
                    _put_off(self._mllm, self.module, linears, output, self._layers, self._options.dealt)
                )
            else:
                gc.collect(0)
                with without_gc(), torch.autograd.graph.saved_tensors_hooks(notes.save, lambda saved: saved):
                    with notes, context:
                        output = self.module(stage_inputs)
                    gc.collect(0)  # frees new objects in reference cycles, without a search through older objects
                storages = notes.alive(output, self._alike)
        edges = [*notes.edges.values(), output.numel() * output.element_size()]
        backward = [*list(notes.wanted.values())[1:], output.requires_grad]
        return _Run(storages, edges, backward, notes.rows, 0, output)


def _shaped(mllm: MultimodalModel, name: str, alike: Alike) -> Callable[[_Options, bool], _Shaped]:
    """Cached constructor of `_Shaped` by options and by whether backwards are split."""
    return cache(partial(_Shaped, mllm, name, alike))


def _put_off(
    mllm: MultimodalModel,
    stage: nn.Module,
    linears: LinearLayers,
    made: Tensor,
    layers: Sequence[nn.Module],
    dealt: bool,
) -> list[Storage]:
    """Storages that the backward of `made` keeps for BACKWARD_WEIGHT, with their layers."""
    if not made.requires_grad or not linears.weights:
        return []
    home = parameter_layers(mllm)
    of = {id(parameter): home[name][1] for name, parameter in stage.named_parameters(remove_duplicate=False)}
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    with linears.backward() as gradients:
        torch.autograd.backward(made, torch.ones_like(made))
    storages: dict[int, Storage] = {}
    for weight, operand in gradients.operands():
        storage = operand.untyped_storage()
        outside = dealt and id(weight) not in inside
        made_of = Storage(storage.nbytes(), outside, of[id(weight)])
        storages.setdefault(storage._cdata, made_of).layers.add(of[id(weight)])
    return list(storages.values())


class _Shapes(FakeTensorMode):
    """Fake tensors on which experts run in any dtype. PyTorch's shape rule for a grouped product supports only
    bfloat16, though its CPU kernels also support float32 and float16."""

    def dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return self._grouped(*args[:2], *args[2:3], **(kwargs or {}))
        return super().dispatch(func, types, args, kwargs)

    def _grouped(self, left: Tensor, right: Tensor, offs: Tensor | None = None, **_: object) -> Tensor:
        """A tensor like the result of a grouped product, with rows aligned to 16 bytes."""
        outer: tuple[int, ...] = ()
        if left.dim() == right.dim():  # a product for each group, instead of one over all rows
            outer = (left if left.dim() == 3 else offs).shape[:1]  # type: ignore[union-attr]
        rows, columns = left.shape[-2], right.shape[-1]
        each = 16 // left.element_size()
        padded = -(-columns // each) * each
        strides = [rows * padded] * len(outer) + [padded, 1]
        with self:
            return torch.empty_strided((*outer, rows, columns), strides, dtype=left.dtype, device=left.device)


class _Notes(TorchDispatchMode):
    """Records the storages that a forward makes, the layers that save them, and the inputs of the layers.

    weights: the storages of parameters and buffers, which are not counted. rows_cut: whether layers process only a
    rank's own rows; the input and the output of a stage then still have all rows. dealt: whether storages kept outside
    the layers have other rows than those kept inside.
    """

    def __init__(self, weights: set[int], rows_cut: bool, dealt: bool) -> None:
        super().__init__()
        self._weights, self._rows_cut, self._dealt = weights, rows_cut, dealt
        self._inside = False
        self._edges: list[Storage] = []
        self._layer = 0
        self._before = True  # no layer has started
        self._made: dict[int, tuple[StorageWeakRef, int, int, bool]] = {}
        self._saved: dict[tuple[int, bool], Storage] = {}  # storages kept inside and outside have two entries
        self.edges: dict[int, int] = {}
        self.wanted: dict[int, bool] = {}
        self.rows = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                # The reference prevents reuse of the key for another storage.
                made = StorageWeakRef(storage), storage.nbytes(), self._layer, self._before
                self._made.setdefault(storage._cdata, made)
        return result

    @contextmanager
    def watching(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Context with hooks that record the inputs of `layers`."""
        hooks: list[RemovableHandle] = []
        for index, layer in enumerate(layers):
            hooks.append(layer.register_forward_pre_hook(partial(self.enter, index)))
            hooks.append(layer.register_forward_hook(partial(self.entered, index), with_kwargs=True))
        hooks.append(layers[-1].register_forward_hook(self.leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def enter(self, layer: int, *_: object) -> None:
        self._layer, self._inside = layer, True

    def leave(self, *_: object) -> None:
        self._inside = False

    def entered(self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: object) -> None:
        self._before = False
        hidden = hidden_argument(args, kwargs)
        rows = rows_of_plan() if self._rows_cut else hidden.numel() // hidden.shape[-1]
        size = rows * hidden.shape[-1] * hidden.element_size()
        if layer and self._rows_cut:  # a stage that starts here cuts its input; one that ends here joins its output
            self._edges.append(Storage(size))
            self._edges[-1].edge = layer
            if (storage := self._of(hidden)) is not None:  # a view of the stage's input, if it starts here
                storage.between = layer
        elif layer and (storage := self._of(hidden)) is not None:  # the first stage receives no hidden state
            storage.edge = layer
        # Samples that are run alone enter one after the other.
        self.edges[layer] = self.edges.get(layer, 0) + size
        self.wanted[layer] = self.wanted.get(layer, False) or hidden.requires_grad
        if layer == 0:
            self.rows += rows

    def save(self, tensor: Tensor) -> Tensor:
        storage = self._of(tensor)
        if storage is not None:
            storage.layers.add(self._layer)
        return tensor

    def alive(self, output: Tensor, alike: Alike) -> list[Storage]:
        """All storages that are kept for the backward of `output`."""
        if not output.requires_grad:
            return []
        layers = len(self.wanted)
        if output.dim() and (last := self._of(output)) is not None:
            last.edge = layers
        saved = {key for key, _ in self._saved}
        for key, (reference, size, layer, before) in self._made.items():
            if key not in saved and key not in self._weights and not reference.expired():
                # Not saved by autograd: kept by checkpointing for a layer, or passed by it to each layer.
                self._saved[key, False] = storage = Storage(size, home=-1 if before else layer)
                storage.layers.update(range(layers) if before else (layer,))
        storages = alike.filled([*self._saved.values(), *self._edges])
        for storage in storages:
            if storage.between in storage.layers:
                storage.layers.discard(storage.between)
            else:
                storage.between = -1
        return [each for each in storages if each.layers or each.edge >= 0 or each.between >= 0]

    def _of(self, tensor: Tensor) -> Storage | None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._weights:
            return None
        outside = self._dealt and not self._inside
        _, _, layer, before = self._made.get(storage._cdata, (None, 0, 0, True))
        made = Storage(storage.nbytes(), outside, -1 if before else layer)
        return self._saved.setdefault((storage._cdata, outside), made)


class _Unanswered(Ranks):
    """Ranks whose gather only makes a tensor of the right shape: a real one needs memory addresses of tensors."""

    def gather(self, piece: Tensor, dim: int, total: int | None = None) -> Tensor:
        shape = list(piece.shape)
        shape[dim] = self.world * shape[dim] if total is None else total
        return piece.new_empty(shape)
