"""Tensor parallelism of a module by a plan: module path -> style. The module's code stays unchanged.

    plan = {**plan_for(model), "projector": "replicate"}
    tensor_parallel(model, plan, mesh["tp"])
    model.load_state_dict(checkpoint)                            # an ordinary checkpoint; each rank takes its shards
    model(**batch).loss.backward()                               # every gradient is the whole one, or its shard
    state = full_state_dict(model)                               # an ordinary state dict again

    "column"           an nn.Linear, cut by its outputs
    "column_halves"    the same, two layers fused in one (gate and up): each half is cut, so chunk(2) works as before
    "column_thirds"    the same, three layers fused in one (queries, keys and values)
    "column_gathered"  the same, its outputs joined on every rank
    "column_apart"     the same, with its own input, which is whole on every rank whatever the modules around it do;
                       also "column_halves_apart" and "column_thirds_apart"
    "vocabulary"       a language model's embedding (nn.Embedding) or head (nn.Linear), cut by its vocabulary, evenly or
                       not; outputs are whole on every rank, and a tied weight stays one tensor
    "row"              an nn.Linear, cut by its inputs
    "gather"           a module whose "column" layers are applied to its input (an attention, a gated MLP): the rows of
                       all ranks are gathered once for all of them, under their products; head counts are divided
    "gather_narrow"    the same, for code that takes the width of its result from its input (SigLIP in transformers 4)
    "sequence"         works on this rank's rows (a norm between blocks): replicated, gradients are summed over ranks;
                       inner modules with a style of their own follow that style
    "heads"            works on this rank's heads (a norm of queries): otherwise as "sequence"
    "replicate"        works on all rows: replicated, gradients are the same on every rank
    "layers"           a ModuleList of blocks: each rank keeps its rows before the first, all are joined after the last

A layer with an adapter (LoRA) is named as without one; its inner layers are cut as described in
`interlace.parallel.adapters`.

Patterns match paths component by component, with * as in file names. If several match, the last one counts. Every
module with parameters must be matched, itself or through a module around it: nothing is replicated silently.

With sequence parallelism a block takes and returns m of world * m rows [..., m, hidden]. Position embeddings, masks
and other inputs of an attention keep the whole sequence. Without it, rows are whole everywhere. With `length`, the
number of rows may be arbitrary: rows are padded to world * m between the products only. Attention does not see the
padding rows, and they get no gradient.

Dropout uses each rank's own random state. On whole rows (around the blocks, and inside them without sequence
parallelism) all ranks must have the same state, or they diverge. On sharded rows, heads or features the same state only
repeats masks from rank to rank. So with sequence parallelism ranks may have different seeds inside the blocks. Random
layer drop must be the same on all ranks.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn

from interlace.comm import all_gather_matmul
from interlace.comm.process.agreement import Fingerprint
from interlace.comm.process.groups import Group
from interlace.parallel.adapters import APART, adapter_styles, is_adapted
from interlace.parallel.families import PARTS, ancestors, plan_for
from interlace.parallel.layer import ParallelLayer
from interlace.parallel.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from interlace.parallel.mappings import Ranks, SummedGradients, average_gradient, gather, split
from interlace.parallel.products import copied_products
from interlace.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, can_be_cut, has_hooks, is_plain

PARTS_APART = {f"{style}{APART}": parts for style, parts in PARTS.items()}
CUT = (*PARTS, *PARTS_APART, "column_gathered", "vocabulary", "row")
REPLICATED = ("sequence", "heads", "replicate")
CONTAINERS = ("gather", "gather_narrow", "layers")
STYLES = (*CUT, *REPLICATED, *CONTAINERS)
HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
HEAD_WIDTHS = ("embed_dim", "all_head_size")  # total width of all heads


@dataclass(frozen=True)
class _Options:
    """Options of `tensor_parallel`."""

    sequence_parallel: bool
    num_chunks: int | Literal["auto"]
    regather: bool
    length: Callable[[], int] | None
    sum_gradients: bool


def tensor_parallel(
    module: nn.Module,
    plan: Mapping[str, str] | None = None,
    group: Group | Ranks = None,
    *,
    sequence_parallel: bool = True,
    num_chunks: int | Literal["auto"] = "auto",
    regather: bool = False,
    length: Callable[[], int] | None = None,
    sum_gradients: bool = True,
) -> nn.Module:
    """Cuts `module` among the ranks of `group`, in place, and returns it.

    All ranks must pass the same module, plan and options. These (not the weights) are compared before the first
    transfer.

    Args:
        module: parameters may have any dtype and device, including meta (weights are then loaded afterwards). Frozen
            parameters stay frozen.
        plan: see above; by default `plan_for(module)`, which derives it for most of HuggingFace's transformers.
        group: a Transport, ProcessGroup, one-dimensional DeviceMesh or None (see `interlace.comm.process.groups`), or a
            Ranks.
        sequence_parallel: cut the sequence between the products. Its length must be a multiple of the ranks, unless
            `length` is given.
        num_chunks: of every product whose rows or sums are transferred, see `all_gather_matmul`.
        regather: see `all_gather_matmul`.
        length: returns the number of rows of the current whole sequence, any number. Called in every forward with
            sequence parallelism. A recomputed forward must get the same number again.
        sum_gradients: sum the gradients of the `used_in_part` parameters in every backward. False leaves that to the
            caller.

    Raises:
        ValueError: a parameter that no pattern matches; a pattern that matches nothing or cannot be applied; heads or
            features that are not divisible. The module is then unchanged.
    """
    ranks = group if isinstance(group, Ranks) else Ranks(group)
    styles, shared = _checked(module, plan, ranks)
    options = _Options(sequence_parallel, num_chunks, regather, length, sum_gradients)
    ranks.must_agree(
        "tensor_parallel", module=type(module).__name__, plan=Fingerprint(repr(sorted(styles.items())), []),
        parameters=Fingerprint(repr([(name, p.shape, p.dtype) for name, p in module.named_parameters()]), []),
        sequence_parallel=sequence_parallel, num_chunks=num_chunks, regather=regather, any_length=length is not None,
        sum_gradients=sum_gradients,
    )  # fmt: skip
    parts = {
        path: _part(module.get_submodule(path), path, style, ranks, options, shared)
        for path, style in styles.items()
        if style in CUT
    }
    pieces: dict[int, nn.Parameter] = {}  # id of a whole parameter -> its shard; tied weights share one
    for path, part in parts.items():
        for key, parameter in module.get_submodule(path).named_parameters():
            part.register_parameter(key, pieces.setdefault(id(parameter), getattr(part, key)))
    for path, part in parts.items():
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, part)
    for path in _in_part(module, styles, sequence_parallel) if sum_gradients else ():
        module.get_submodule(path).register_forward_pre_hook(SummedGradients(ranks))
    for path, style in styles.items():
        if style == "layers" and sequence_parallel:
            # A child without parameters may be a placeholder for a block of another stage: do not split rows there.
            children = list(module.get_submodule(path).children())
            blocks = [block for block in children if next(block.parameters(), None) is not None] or children
            blocks[0].register_forward_pre_hook(SplitInput(ranks, length), with_kwargs=True)
            blocks[-1].register_forward_hook(GatherOutput(ranks, length))
    for path, columns in shared.items():
        shared_module = module.get_submodule(path)
        names = [column[len(path) + 1 if path else 0 :] for column in columns]
        hook = SharedInput(ranks, names, options, narrow=styles[path] == "gather_narrow")
        shared_module.register_forward_pre_hook(hook, with_kwargs=True)
        shared_module.register_forward_hook(hook.release, always_call=True)
        if hasattr(shared_module, "head_dim"):
            widths = [cast(ParallelLinear, parts[column]).out_features // PARTS[styles[column]] for column in columns]
            _divide_heads(shared_module, max(widths), ranks)
    return module


def check_plan(module: nn.Module, plan: Mapping[str, str] | None, world: int) -> None:
    """Raises the ValueError of `tensor_parallel(module, plan)` for `world` ranks, if any.

    Creates and changes nothing, so one rank can detect errors that would occur on others.
    """
    ranks = Ranks.at(0, world)
    styles, shared = _checked(module, plan, ranks)
    options = _Options(False, "auto", False, None, True)
    seen: set[tuple[str, str]] = set()  # layers checked so far; layers of other blocks are identical
    for path, style in styles.items():
        if style in CUT:
            layer = module.get_submodule(path)
            if (style, repr(layer)) not in seen:
                seen.add((style, repr(layer)))
                _part(_shapes(layer), path, style, ranks, options, shared)


def used_in_part(module: nn.Module, plan: Mapping[str, str], *, sequence_parallel: bool) -> set[str]:
    """Names of replicated parameters that a rank applies to its own rows or heads only: gradients are sums over ranks.

    module: not cut yet. Raises ValueError if a tied weight is such a parameter and is also used on all rows.
    """
    styles = _styles(module, plan)
    names = {
        f"{path}.{key}" if path else key
        for path in _in_part(module, styles, sequence_parallel)
        for key, parameter in module.get_submodule(path)._parameters.items()
        if parameter is not None
    }
    rows = [path for path, style in styles.items() if style == "row" and sequence_parallel]
    names |= {f"{path}.bias" for path in rows if _linear(module, path).bias is not None}
    parameters = list(module.named_parameters(remove_duplicate=False))
    partial = {id(parameter): name for name, parameter in parameters if name in names}
    for name, parameter in parameters:
        if name not in names and id(parameter) in partial:
            raise ValueError(
                f"{name} and {partial[id(parameter)]} are one weight, applied to all rows in one module and to "
                "this rank's rows in the other; these need different gradient sums: untie the weight"
            )
    return names


def _in_part(module: nn.Module, styles: Mapping[str, str], sequence_parallel: bool) -> Iterator[str]:
    """Paths of the modules that a rank applies to its own rows or heads."""
    for path, style in styles.items():
        if style == "heads" or (style == "sequence" and sequence_parallel):
            for name, _ in module.get_submodule(path).named_modules(prefix=path):
                if path == next(outer for outer in (name, *ancestors(name)) if outer in styles):
                    yield name


def _checked(
    module: nn.Module, plan: Mapping[str, str] | None, ranks: Ranks
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Path -> style, and the result of `_shared_inputs` for these. Raises ValueError for an invalid plan."""
    styles = _styles(module, plan_for(module) if plan is None else plan)
    _check(module, styles)
    shared = _shared_inputs(styles)
    _check_heads(module, shared, styles, ranks)
    return styles, shared


def _linear(module: nn.Module, path: str) -> nn.Linear:
    return cast(nn.Linear, module.get_submodule(path))


def _shapes(layer: nn.Module) -> nn.Module:
    """A layer of the same shapes, on meta."""
    if isinstance(layer, nn.Embedding):
        return nn.Embedding(layer.num_embeddings, layer.embedding_dim, device="meta")
    assert isinstance(layer, nn.Linear)
    return nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")


def _part(
    layer: nn.Module, path: str, style: str, ranks: Ranks, options: _Options, shared: Mapping[str, list[str]]
) -> ParallelLayer:
    try:
        if isinstance(layer, nn.Embedding):
            return VocabularyEmbedding(layer, ranks)
        assert isinstance(layer, nn.Linear)
        if style == "vocabulary":
            return VocabularyHead.from_linear(layer, ranks)
        if style == "row":
            return RowParallelLinear.from_linear(
                layer, ranks, sequence_parallel=options.sequence_parallel, num_chunks=options.num_chunks,
                fill=options.length is not None, sum_gradients=options.sum_gradients,
            )  # fmt: skip
        parts = (PARTS | PARTS_APART).get(style, 1)
        if parts > 1 and layer.out_features % (parts * ranks.world):
            raise ValueError(f"{layer.out_features} outputs in {parts} parts are not divisible by {ranks.world} ranks")
        has_full_rows = style not in PARTS or any(path in columns for columns in shared.values())
        return ColumnParallelLinear.from_linear(
            layer, ranks, sequence_parallel=options.sequence_parallel and not has_full_rows,
            num_chunks=options.num_chunks, gather_output=style == "column_gathered", regather=options.regather,
            parts=parts,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _divide_heads(attention: nn.Module, width: int, ranks: Ranks) -> None:
    """Divides head counts and widths of an attention by the ranks. width: of its queries."""
    for name in (*HEAD_COUNTS, *HEAD_WIDTHS):
        value = getattr(attention, name, None)
        if isinstance(value, int) and (name in HEAD_COUNTS or value == width):
            setattr(attention, name, value // ranks.world)


# ---------------------------------------------------------------------- hooks


class SplitInput:
    """Forward pre-hook: keeps this rank's rows of the hidden state.

    length: as for `tensor_parallel`. If rows are not divisible, copies of the last row pad them: unlike zeros, these
    are valid input for every norm. Only the last ranks pad, so the others need no copy of their rows.
    """

    def __init__(self, ranks: Ranks, length: Callable[[], int] | None) -> None:
        self.ranks, self.length = ranks, length

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = _hidden(module, args, kwargs)
        if self.length is not None and (rows := hidden.shape[-2]) != (length := self.length()):
            raise ValueError(
                f"{type(module).__name__} got {rows} rows, but length() returned {length}: its rows cannot be sharded, "
                "pass sequence_parallel=False"
            )
        return replaced(args, kwargs, hidden, split(hidden, self.ranks, -2, fill=self.length is not None))


class GatherOutput:
    """Forward hook: joins the rows of all ranks and drops padding rows."""

    def __init__(self, ranks: Ranks, length: Callable[[], int] | None) -> None:
        self.ranks, self.length = ranks, length

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        rows = gather(hidden, self.ranks, -2)
        if self.length is not None:
            rows = rows[..., : self.length(), :]
        return (rows, *output[1:]) if isinstance(output, tuple) else rows


class SharedInput:
    """Forward pre-hook: gathers a module's input once for all its column layers and computes their products with it.

    The module gets the gathered rows. A column layer that is called with that same tensor returns its product. With any
    other tensor (derived from it, or the other sequence of a cross attention) it computes as without sequence
    parallelism.
    """

    def __init__(self, ranks: Ranks, columns: list[str], options: _Options, *, narrow: bool) -> None:
        self.ranks, self.columns, self.options, self.narrow = ranks, columns, options, narrow

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = _hidden(module, args, kwargs)
        columns = self._layers(module)
        weights = [column.weight for column in columns]
        deferral = next((column.deferral for column in columns if column.deferral is not None), None)
        options = self.options
        if options.sequence_parallel:
            rows, products = all_gather_matmul(
                hidden, weights, group=self.ranks.transport(hidden), num_chunks=options.num_chunks,
                regather=options.regather, deferral=deferral,
            )  # fmt: skip
            if options.length is not None and rows.shape[-2] != (length := options.length()):
                rows, *products = (tensor[..., :length, :].contiguous() for tensor in (rows, *products))
        else:
            rows, products = copied_products(hidden, weights, self.ranks, options.num_chunks, deferral)
        # Tensors derived from these rows reach column layers through copied_products, which sums gradients.
        shared_rows = average_gradient(rows[..., : weights[0].shape[0]] if self.narrow else rows, self.ranks)
        for column, product in zip(columns, products):
            column.precomputed = (shared_rows, product)
        return replaced(args, kwargs, hidden, shared_rows)

    def release(self, module: nn.Module, args: Any, output: Any) -> None:
        for column in self._layers(module):
            column.precomputed = None

    def _layers(self, module: nn.Module) -> list[ColumnParallelLinear]:
        # By name: copies of a module share its hooks.
        return [cast(ColumnParallelLinear, module.get_submodule(name)) for name in self.columns]


def _hidden(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden = args[0] if args else next((kwargs[k] for k in ("hidden_states", "hidden_state", "x") if k in kwargs), None)
    if not isinstance(hidden, Tensor):
        raise TypeError(
            f"{type(module).__name__} got no hidden state to shard: pass a tensor as the first argument or as "
            "hidden_states"
        )
    return hidden


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: object) -> Any:
    """(args, kwargs) of a forward with its hidden state, the first argument or a keyword `old`, replaced by `new`."""
    if args:
        return (new, *args[1:]), kwargs
    return args, {key: new if value is old else value for key, value in kwargs.items()}


# ---------------------------------------------------------------------- reading and checking the plan


def _styles(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Path -> style of the modules that a pattern matches. For a layer with an adapter: of its inner layers."""
    paths = [path for path, _ in module.named_modules()]
    known, styles = set(paths), {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise ValueError(f"plan: {pattern!r} has the unknown style {style!r}: use one of {', '.join(STYLES)}")
        if any(character in pattern for character in "*?["):
            matched = [path for path in paths if _matches(path, pattern)]
        else:
            matched = [pattern] if pattern in known else []
        if not matched:
            raise ValueError(
                f"plan: {pattern!r} matches no module of {type(module).__name__}: correct or remove the pattern"
            )
        styles.update(dict.fromkeys(matched, style))
    for path in [path for path, style in styles.items() if style in CUT and is_adapted(module.get_submodule(path))]:
        outer = {block: styles[block] for block in ancestors(path) if block in styles}
        styles |= adapter_styles(module.get_submodule(path), path, styles.pop(path), outer)
    return styles


def _matches(path: str, pattern: str) -> bool:
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _check(module: nn.Module, styles: Mapping[str, str]) -> None:
    missing = [
        path
        for path, part in module.named_modules()
        if any(parameter is not None for parameter in part._parameters.values())
        and styles.get(path) not in (*CUT, *REPLICATED)
        and not any(styles.get(outer) in REPLICATED for outer in ancestors(path))
    ]
    if missing:
        listed = ", ".join(repr(path) for path in missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise ValueError(
            f"no pattern of the plan matches {listed}, which have parameters: add for example "
            f'{{{missing[0]!r}: "replicate"}} for a module that works on all rows, "sequence" for a norm between blocks'
        )
    owners: dict[int, set[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for parameter in part._parameters.values():
            owners.setdefault(id(parameter), set()).add(path)
    for path, style in styles.items():
        target = module.get_submodule(path)
        if style in CUT:
            _check_cut(target, path, style, styles, owners)
        if style == "layers" and not (isinstance(target, nn.ModuleList) and len(target)):
            raise ValueError(f'{path} is a {type(target).__name__}: only a ModuleList of blocks can be "layers"')


def _check_cut(
    layer: nn.Module, path: str, style: str, styles: Mapping[str, str], owners: Mapping[int, set[str]]
) -> None:
    """Raise ValueError for a layer that cannot have this style. owners: id of a parameter -> paths."""
    embeds = style == "vocabulary" and isinstance(layer, nn.Embedding)
    kind = nn.Embedding if embeds else nn.Linear
    if not is_plain(layer, kind) or not path:
        expected = "nn.Linear or plain or scaled nn.Embedding" if style == "vocabulary" else "nn.Linear"
        raise ValueError(
            f"{path or 'the module itself'} is a {type(layer).__name__}: only an {expected} inside a module can be "
            f'"{style}"'
        )
    if set(layer._parameters) != {"weight", *(() if embeds else ("bias",))} or has_hooks(layer):
        raise ValueError(
            f"{path} has hooks or parameters that a plain nn.{kind.__name__} lacks (for example of weight_norm); as "
            f'"{style}" it would lose them: add them to the sharded layer afterwards'
        )
    if embeds and not can_be_cut(layer, kind):
        raise ValueError(
            f"{path} has max_norm, scale_grad_by_freq, sparse gradients or its own forward, which it would lose as "
            '"vocabulary": use "replicate"'
        )
    for parameter in layer.parameters():
        tied = sorted(owners[id(parameter)])
        if len(tied) > 1 and not all(styles.get(other) == "vocabulary" for other in tied):
            advice = 'use "replicate"' + ', or "vocabulary" for all of them' * (style == "vocabulary")
            raise ValueError(f"{', '.join(tied)} share a parameter, which cannot be sharded: {advice}")


def _shared_inputs(styles: Mapping[str, str]) -> dict[str, list[str]]:
    """Module that gathers its input -> its column layers."""
    shared: dict[str, list[str]] = {path: [] for path, style in styles.items() if style.startswith("gather")}
    for path, style in styles.items():
        gathering = next((outer for outer in ancestors(path) if outer in shared), None)
        if style in PARTS and gathering is not None:
            shared[gathering].append(path)
    for path, columns in shared.items():
        if not columns:
            raise ValueError(
                f'{path} is "{styles[path]}": no layer inside it is "column"; use another style, or '
                'make its layers "column"'
            )
    return shared


def _check_heads(module: nn.Module, shared: Mapping[str, list[str]], styles: Mapping[str, str], ranks: Ranks) -> None:
    for path, columns in shared.items():
        size = getattr(module.get_submodule(path), "head_dim", None)
        for column in columns:
            features = _linear(module, column).out_features // PARTS[styles[column]]
            if not isinstance(size, int) or features % size or (features // size) % ranks.world == 0:
                continue
            heads = features // size
            advice = f"use a number of ranks that divides {heads}"
            if heads < ranks.world:
                advice += f", or repeat the weights of each head to get {ranks.world} heads"
            raise ValueError(f"{column} has {heads} heads, not divisible by {ranks.world} ranks: {advice}")
