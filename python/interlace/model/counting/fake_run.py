"""One run of a module on fake tensors, forward and backward, that counts matrix products.

Of identical layers only the first runs, forward and backward separately from the rest. The others count with their
number of calls. Attention calls are recorded with their plans, which are real. `interlace.model.counting.flops` counts
their FLOPs from the plans.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from interlace.attention.op import _backward as attention_backward
from interlace.attention.op import _forward as attention_forward
from interlace.attention.plan import AttentionPlan
from interlace.model.inputs.placeholders import blank_id, token_ids
from interlace.model.naming import LANGUAGE_MODEL
from interlace.model.probe.stand_in import kind_of
from interlace.model.sample import IGNORE, Sample
from interlace.model.stages.slice import clone

if TYPE_CHECKING:
    from interlace.model.multimodal import MultimodalModel

LENGTH = 8  # tokens of a sample for a run of the language model
PRODUCT_WORDS = ("mm", "matmul", "conv", "attention", "linear", "gru", "lstm", "rnn", "fft")
"""Words in names of operations that are products."""


class Uncountable(ValueError):
    """Raised if the FLOPs of a module cannot be counted; the message has the reason."""


class Attends(NamedTuple):
    """Attention of `layers` identical layers.

    heads, size, values: number of heads, size of their queries, size of their values.
    backward: True if it has a backward.
    limits: attention limits of the layers; None in the `Work` of an encoder, which lists its documents.
    """

    heads: int
    size: int
    values: int
    backward: bool
    limits: Any
    layers: int = 1

    def forward(self, pairs: int) -> int:
        """FLOPs of a forward with this many pairs."""
        return 2 * pairs * self.heads * (self.size + self.values) * self.layers

    def model(self, pairs: int) -> int:
        """FLOPs required for forward and backward."""
        return self.forward(pairs) * (3 if self.backward else 1)

    def executed(self, pairs: int, *, recompute: bool) -> int:
        """FLOPs of forward and backward in kernels that compute this many pairs."""
        if not self.backward:
            return self.forward(pairs)
        backward = 2 * pairs * self.heads * (3 * self.size + 2 * self.values) * self.layers
        return self.forward(pairs) * (2 if recompute else 1) + backward


class Products(NamedTuple):
    """FLOPs of matrix products. again: FLOPs to recompute the forward of layers that have a backward."""

    forward: int = 0
    backward: int = 0
    again: int = 0

    def plus(self, other: Products, times: int = 1) -> Products:
        """The sum with `times` times another."""
        return Products(*(a + times * b for a, b in zip(self, other, strict=True)))

    @property
    def model(self) -> int:
        """FLOPs of forward and backward."""
        return self.forward + self.backward


class Found(NamedTuple):
    """Result of one run.

    inside: products of the layers and of the modules before and after them.
    projected: products of the projector.
    attention: attention calls with their plans.
    """

    inside: Products
    projected: Products
    attention: tuple[tuple[Attends, AttentionPlan], ...]
    output: Tensor


class Forward(NamedTuple):
    """FLOPs of the products of one forward.

    layers: of each layer.
    pairs: of each layer, per pair of a query and a key in its attention.
    around: of the modules before and after the layers, by their given names.
    """

    layers: tuple[float, ...]
    pairs: tuple[float, ...]
    around: dict[str, float]

    @property
    def products(self) -> float:
        """FLOPs of all products, without attention."""
        return sum(self.layers) + sum(self.around.values())


class _Segment(NamedTuple):
    """A call of a layer or projector. Only tensors with gradients are listed.

    roots: its own outputs (none if it is identical to an earlier one).
    outputs: the substitutes that later modules got.
    inputs: its original inputs, with the substitutes that it computed with.
    """

    key: Any
    roots: list[Tensor]
    outputs: list[Tensor]
    inputs: list[tuple[Tensor, Tensor | None]]


# ---------------------------------------------------------------------- one run


class _Tally(TorchDispatchMode):
    """Counts the products of a forward and of backwards, and records attention calls with their plans.

    owners: storage of a weight -> key for its products, used while no other key is set.
    """

    def __init__(self, owners: Mapping[int, Any] | None = None) -> None:
        super().__init__()
        self.owners = owners or {}
        self.rest: Any = None  # key for products without a key or owner
        self.key: Any = None  # current key
        self.in_backward = False
        self.sums: dict[Any, list[int]] = {}  # FLOPs of forward and backward, by key
        # By key: heads, sizes of q and v, plan tensors, block, sinks, has a backward.
        self.calls: dict[Any, list[list[Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet in _INDEXING:
            args = (args[0], _places(args[1]), *args[2:])
        result = func(*args, **kwargs)
        if packet is _ATTENTION:
            q, _, v, plan, block, sinks = args[:6]
            call = [q.shape[1], q.shape[3], v.shape[3], plan, block, sinks, False]
            self.calls.setdefault(self.key, []).append(call)
        elif packet is _ATTENTION_BACKWARD:
            self._count_backward(args[2], args[4], args[7])
        elif packet is _DENSE:
            self._add(sdpa_flop_count(*(args[i].shape for i in range(3))), args)
        elif packet is _DENSE_BACKWARD:
            self._add(sdpa_backward_flop_count(*(args[i].shape for i in range(4))), args)
        elif packet in flop_registry:
            self._add(flop_registry[packet](*args, **kwargs, out_val=result), args)
        elif not (name := packet.__name__).startswith(PLAIN) and any(word in name for word in PRODUCT_WORDS):
            raise Uncountable(f"no FLOP formula for {func.name()}")
        return result

    def _add(self, flops: int, operands: Sequence[object]) -> None:
        key = self.key
        if key is None:
            storages = (x.untyped_storage()._cdata for x in operands if isinstance(x, Tensor))
            key = next((self.owners[each] for each in storages if each in self.owners), self.rest)
        self.sums.setdefault(key, [0, 0])[self.in_backward] += int(flops)

    @contextmanager
    def counting(self, key: Hashable) -> Iterator[None]:
        """Inside, operations count for `key`."""
        before, self.key = self.key, key
        try:
            yield
        finally:
            self.key = before

    def run_backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run a backward from `roots`."""
        self.in_backward = True
        try:
            torch.autograd.backward(list(roots), list(gradients))
        except RuntimeError as error:
            if "second time" in str(error):  # it would count twice
                raise Uncountable("inputs of its layers are also used outside the layers") from None
            raise
        finally:
            self.in_backward = False

    def _count_backward(self, q: Tensor, v: Tensor, plan: Sequence[Tensor]) -> None:
        wanted = (q.shape[1], q.shape[3], v.shape[3], plan[0].data_ptr())
        for call in reversed(self.calls.get(self.key, [])):
            if not call[-1] and (*call[:3], call[3][0].data_ptr()) == wanted:
                call[-1] = True
                return
        raise Uncountable("attention has a backward without a forward")


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace masks with known values by indices: fake tensors do not support masks."""
    indices_only: list[Tensor | None] = []
    for index in indices:
        known = index is not None and index.dtype is torch.bool and not isinstance(index, FakeTensor)
        indices_only += index.nonzero().unbind(1) if known and index is not None else [index]
    return indices_only


_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}
_ATTENTION = attention_forward._opoverload._overloadpacket
_ATTENTION_BACKWARD = attention_backward._opoverload._overloadpacket
_DENSE = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_DENSE_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
PLAIN = ("upsample_", "_upsample_")  # name prefixes of non-products that contain a word of PRODUCT_WORDS


class Run:
    """A module of a model on fake tensors. It can run on several inputs."""

    def __init__(self, mllm: MultimodalModel, name: str) -> None:
        layers = mllm.layer_list(name)
        owner, _ = mllm.root(name)
        root = mllm.language_model if name == LANGUAGE_MODEL else mllm.encoders[name].module
        self._kinds = [
            (kind_of(root, layer, i, len(layers)), tuple(p.requires_grad for p in layer.parameters()))
            for i, layer in enumerate(layers)
        ]
        memo = _one_of_each_kind(layers, self._kinds, {id(each): each for each in owner.parameters()})
        self.stage = mllm.slice(name, 0, len(layers), copy=memo, checkpointing="none")
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        choose_experts(self.stage)
        give_shapes(self.stage, self.mode, torch.float32)  # frozen weights may be in 16 bits
        for kind, layer in zip(self._kinds, self.stage.layers, strict=True):
            self._cut_out(layer, kind)
        projector = self.stage.encoders[name].projector if self.stage.is_encoder else None
        if projector is not None:
            self._cut_out(projector, PROJECTOR)

    def __call__(self, inputs: dict[str, Any]) -> Found:
        self.tally = tally = _Tally()
        self._after: Any = None  # key for other products once the layers have begun
        self._known: dict[Any, Any] = {}
        self._segments: list[_Segment] = []
        with without_gc(), tally:
            made = self.stage(inputs)
            went = self._backward(made) if made.requires_grad else Counter()
        times = Counter(segment.key for segment in self._segments)
        inside, projected = Products(*tally.sums.get(None, (0, 0))), Products()
        attention: Counter[Any] = Counter()
        plans: dict[Any, AttentionPlan] = {}
        for key, count in [(None, 1), *times.items()]:
            forward, backward = tally.sums.get(key, (0, 0))
            back = 1 if key is None else went[key]
            products = Products(count * forward, back * backward, back * forward)
            if key == PROJECTOR:
                projected = products._replace(again=0)
            elif key is not None:
                inside = inside.plus(products)
            for heads, size, values, plan, block, sinks, has_backward in tally.calls.get(key, ()):
                kind = Attends(heads, size, values, False, plan[0].data_ptr())
                plans[kind.limits] = AttentionPlan.from_tensors(list(plan), block, sinks)
                attention[kind] += count - back * has_backward
                attention[kind._replace(backward=True)] += back * has_backward
        return Found(
            inside,
            projected,
            tuple((kind._replace(layers=n), plans[kind.limits]) for kind, n in attention.items() if n),
            made.detach().requires_grad_(made.requires_grad),
        )

    def forward(
        self, inputs: dict[str, Any], before: Mapping[str, nn.Module], after: Mapping[str, nn.Module]
    ) -> Forward:
        """Count the FLOPs of one forward.

        before, after: parts of the stage around its layers, by name. Products with other weights count for the last
        part before the layers, or for the first part after them.
        """
        parts = {**before, **after}
        owners = {p.untyped_storage()._cdata: name for name, part in parts.items() for p in part.parameters()}
        self.tally = tally = _Tally(owners)
        self._known, self._segments = {}, []
        tally.rest = next(reversed([*before]), None)
        self._after = next(iter(after), tally.rest)
        with without_gc(), torch.no_grad(), tally:
            self.stage(inputs)
        sums = {key: float(forward) for key, (forward, _) in tally.sums.items()}
        pairs = {
            key: float(sum(Attends(heads, size, values, False, None).forward(1) for heads, size, values, *_ in calls))
            for key, calls in tally.calls.items()
        }
        times, alike, count = Counter(segment.key for segment in self._segments), Counter(self._kinds), len(self._kinds)

        def of_layers(totals: Mapping[Any, float]) -> tuple[float, ...]:
            """Values per layer. Counts outside all layers and parts are divided among all layers."""
            of_kind: dict[Any, float] = dict.fromkeys(self._kinds, 0.0)
            for key, number in times.items():
                if key != PROJECTOR:
                    of_kind[key[0]] += number * totals.get(key, 0.0)
            return tuple(of_kind[kind] / alike[kind] + totals.get(None, 0.0) / count for kind in self._kinds)

        return Forward(of_layers(sums), of_layers(pairs), {name: sums.get(name, 0.0) for name in (*parts, PROJECTOR)})

    def _cut_out(self, module: nn.Module, kind: Hashable) -> None:
        """Make the calls of a layer, or of the projector, segments."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if kind == PROJECTOR:
                return self._call(PROJECTOR, module, args, kwargs)
            self.tally.rest = self._after
            tensors = (x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor))
            return self._call((kind, *((tuple(x.shape), x.requires_grad) for x in tensors)), module, args, kwargs)

        module.__dict__["forward"] = MethodType(forward, module)

    def _call(self, key: Hashable, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a layer and return its output as tensors without history: its backward runs later, separately."""
        leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        fresh = key not in self._known

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            return leaves.setdefault(id(value), (value, _fresh(value) if fresh else None))[1]

        given, named = tree_map(cut, args), tree_map(cut, kwargs)
        roots: list[Tensor] = []
        if fresh:
            with self.tally.counting(key):
                self._known[key] = type(module).forward(module, *given, **named)
            roots = _with_gradients(self._known[key])
        made = tree_map(_fresh, self._known[key])
        self._segments.append(_Segment(key, roots, _with_gradients(made), list(leaves.values())))
        return made

    def _backward(self, made: Tensor) -> Counter[Any]:
        """Backward from the output, segment by segment as gradients arrive. Returns the number of backwards per key."""
        outputs = {id(x) for segment in self._segments for x in segment.outputs}
        first: dict[int, int] = {}  # the first segment that took the tensor
        for number, segment in enumerate(self._segments):
            for value, _ in segment.inputs:
                first.setdefault(id(value), number if _depends_on(value, outputs) else -1)
        waiting: dict[int, tuple[Tensor, Tensor]] = {}  # gradients of tensors made between segments
        went: Counter[Any] = Counter()
        self.tally.run_backward([made], [torch.ones_like(made)])
        for number, segment in reversed(list(enumerate(self._segments))):
            reached = [i for i, output in enumerate(segment.outputs) if output.grad is not None]
            if reached:
                went[segment.key] += 1
                if segment.roots:
                    with self.tally.counting(segment.key):
                        gradients = [segment.outputs[i].grad for i in reached]
                        self.tally.run_backward(
                            [segment.roots[i] for i in reached], [g for g in gradients if g is not None]
                        )
                for value, leaf in segment.inputs:
                    gradient = torch.ones_like(value) if leaf is None else leaf.grad
                    if gradient is None:
                        continue
                    if value.grad_fn is None:
                        value.grad = gradient if value.grad is None else value.grad + gradient
                    else:
                        before = waiting.get(id(value))
                        waiting[id(value)] = value, gradient if before is None else before[1] + gradient
            self._continue_backward([waiting.pop(each) for each in list(waiting) if first[each] == number])
        self._continue_backward(list(waiting.values()))
        return went

    def _continue_backward(self, ready: list[tuple[Tensor, Tensor]]) -> None:
        if ready:
            self.tally.run_backward(*zip(*ready, strict=True))


def _with_gradients(value: Any) -> list[Tensor]:
    return [x for x in tree_iter(value) if isinstance(x, Tensor) and x.requires_grad]


def _depends_on(value: Tensor, leaves: set[int]) -> bool:
    """True if any of `leaves` (by id) is in the history of a tensor."""
    todo, seen = [value.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        todo += [function for function, _ in node.next_functions]
    return False


PROJECTOR = "projector"


def _one_of_each_kind(layers: nn.ModuleList, kinds: Sequence[Any], memo: dict[int, Any]) -> dict[int, Any]:
    """Extend a `copy.deepcopy` memo so that each layer of the copy shares the contents of the first layer of its kind.

    Only these first layers are run.
    """
    first: dict[Any, nn.Module] = {}
    for layer, kind in zip(layers, kinds, strict=True):
        if kind not in first:
            first[kind] = copy.deepcopy(layer, memo)
            continue
        memo[id(layer)] = own = clone(layer)  # with its hooks, which may depend on the layer
        for table in ("_parameters", "_buffers", "_modules"):
            vars(own)[table] = vars(first[kind])[table].copy()
    return memo


def _fresh(value: Any) -> Any:
    """A tensor with the same values and without history."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().requires_grad_(value.requires_grad)


def choose_experts(stage: nn.Module) -> None:
    """Let experts in a copied module compute only the chosen ones for each token, independent of values.

    This gathers weights, which take no memory as fake tensors.
    """
    for part in stage.modules():
        config = vars(part).get("config")
        if config is not None and getattr(config, "_experts_implementation", None) is not None:
            part.__dict__["config"] = own = copy.copy(config)
            own._experts_implementation_internal = "batched_mm"


def give_shapes(stage: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> set[int]:
    """Replace parameters and buffers by fake CPU tensors, because autocast works there; returns their storages.

    dtype: of floating-point tensors; default: unchanged.
    """
    made: dict[int, Tensor] = {}
    for module in stage.modules():
        tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for table in tables:
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    with mode:
                        own = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
                        fake = torch.empty(tensor.shape, dtype=own)
                    trained = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if trained else fake
                    made[id(tensor)]._was = tensor  # type: ignore[attr-defined]  # a freed id could be another's
                table[key] = made[id(tensor)]
    return {tensor.untyped_storage()._cdata for tensor in made.values()}


@contextmanager
def without_gc() -> Iterator[None]:
    """Inside, Python's cyclic garbage collection is off: it would scan the whole model again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def blank_inputs(
    mllm: MultimodalModel,
    features: Mapping[str, Tensor],
    count: int,
    targets: int,
    mode: FakeTensorMode,
    length: int | None = None,
) -> dict[str, Any]:
    """Inputs of the language model for `count` samples of `length` blank tokens, collated as in a batch.

    targets: number of first tokens with a target.
    features: encoder -> its features [n, D]. The last tokens stand for one row of each encoder. These rows are fake
    tensors of `mode` and require gradients if the features do.
    length: default: `shortest`.
    """
    settings = mllm.language_settings
    length = shortest(mllm) if length is None else length
    ordinary = blank_id(settings.placeholders)
    labels = torch.full((length,), IGNORE)
    labels[:targets] = (ordinary + 1) % mllm.vocab_size  # not a copy of the ids
    samples = [Sample(torch.full((length,), ordinary), labels.clone()) for _ in range(count)]
    made: dict[str, Any] = mllm.collate_module(LANGUAGE_MODEL, samples)
    for place, encoder in enumerate(features, start=1):
        made["input_ids"][0, length - place] = token_ids(settings.placeholders[encoder])[0]
    with mode:
        rows = {name: torch.empty((1, given.shape[1]), dtype=given.dtype) for name, given in features.items()}
    made["features"] = {name: row.requires_grad_(features[name].requires_grad) for name, row in rows.items()}
    return made


def shortest(mllm: MultimodalModel) -> int:
    """Tokens of the shortest sample for a run of a language model: few, and not more than its positions."""
    return min(LENGTH, mllm.max_length or LENGTH)
