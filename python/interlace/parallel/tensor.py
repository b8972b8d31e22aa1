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
from typing import Any, Literal, cast

from torch import Tensor, nn

from interlace.comm import all_gather_matmul
from interlace.comm.process.agreement import Fingerprint
from interlace.comm.process.groups import Group
from interlace.parallel.adapters import APART, adapter_styles, is_adapted
from interlace.parallel.families import around, plan_for
from interlace.parallel.layer import ParallelLayer
from interlace.parallel.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from interlace.parallel.mappings import Ranks, SummedGradients, gather, split, whole_on_each
from interlace.parallel.products import copied_products
from interlace.parallel.vocabulary import VocabularyEmbedding, VocabularyHead, can_be_cut, has_hooks, is_plain

PARTS = {"column": 1, "column_halves": 2, "column_thirds": 3}
PARTS_APART = {f"{style}{APART}": parts for style, parts in PARTS.items()}
CUT = (*PARTS, *PARTS_APART, "column_gathered", "vocabulary", "row")
WHOLE = ("sequence", "heads", "replicate")
AROUND = ("gather", "gather_narrow", "layers")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")
HEAD_WIDTHS = ("embed_dim", "all_head_size")  # total width of all heads


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
    of_rows = {"fill": length is not None, "sum_gradients": sum_gradients}
    ranks.must_agree(
        "tensor_parallel", module=type(module).__name__, plan=Fingerprint(repr(sorted(styles.items())), []),
        parameters=Fingerprint(repr([(name, p.shape, p.dtype) for name, p in module.named_parameters()]), []),
        sequence_parallel=sequence_parallel, num_chunks=num_chunks, regather=regather, any_length=length is not None,
        sum_gradients=sum_gradients,
    )  # fmt: skip
    parts = {
        path: _part(
            module.get_submodule(path), path, style, ranks, sequence_parallel, num_chunks, regather, shared, of_rows
        )
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
            every = list(module.get_submodule(path).children())
            blocks = [block for block in every if next(block.parameters(), None) is not None] or every
            blocks[0].register_forward_pre_hook(SplitInput(ranks, length), with_kwargs=True)
            blocks[-1].register_forward_hook(GatherOutput(ranks, length))
    for path, columns in shared.items():
        there = module.get_submodule(path)
        names = [column[len(path) + 1 if path else 0 :] for column in columns]
        narrow = styles[path] == "gather_narrow"
        hook = SharedInput(ranks, names, sequence_parallel, num_chunks, regather, narrow, length)
        there.register_forward_pre_hook(hook, with_kwargs=True)
        there.register_forward_hook(hook.release, always_call=True)
        if hasattr(there, "head_dim"):
            widths = [cast(ParallelLinear, parts[column]).out_features // PARTS[styles[column]] for column in columns]
            _divide_heads(there, max(widths), ranks)
    return module


def check_plan(module: nn.Module, plan: Mapping[str, str] | None, world: int) -> None:
    """Raises the ValueError of `tensor_parallel(module, plan)` for `world` ranks, if any.

    Creates and changes nothing, so one rank can detect errors that would occur on others.
    """
    ranks = Ranks.at(0, world)
    styles, shared = _checked(module, plan, ranks)
    seen: set[tuple[str, str]] = set()  # layers checked so far; layers of other blocks are identical
    for path, style in styles.items():
        if style in CUT:
            whole = module.get_submodule(path)
            if (style, repr(whole)) not in seen:
                seen.add((style, repr(whole)))
                _part(_shapes(whole), path, style, ranks, False, "auto", False, shared, {})


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
    every = list(module.named_parameters(remove_duplicate=False))
    held = {id(parameter): name for name, parameter in every if name in names}
    for name, parameter in every:
        if name not in names and id(parameter) in held:
            raise ValueError(
                f"{name} and {held[id(parameter)]} are one weight, used there on all rows and here on those of a rank: "
                "no sum over ranks is right for both, untie it"
            )
    return names


def _in_part(module: nn.Module, styles: Mapping[str, str], sequence_parallel: bool) -> Iterator[str]:
    """Paths of the modules that a rank applies to its own rows or heads."""
    for path, style in styles.items():
        if style == "heads" or (style == "sequence" and sequence_parallel):
            for name, _ in module.get_submodule(path).named_modules(prefix=path):
                if path == next(outer for outer in (name, *around(name)) if outer in styles):
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


def _shapes(whole: nn.Module) -> nn.Module:
    """A layer of the same shapes, on meta."""
    if isinstance(whole, nn.Embedding):
        return nn.Embedding(whole.num_embeddings, whole.embedding_dim, device="meta")
    assert isinstance(whole, nn.Linear)
    return nn.Linear(whole.in_features, whole.out_features, whole.bias is not None, device="meta")


def _part(
    whole: nn.Module, path: str, style: str, ranks: Ranks, sequence_parallel: bool,
    num_chunks: int | Literal["auto"], regather: bool, shared: Mapping[str, list[str]], of_rows: Mapping[str, bool],
) -> ParallelLayer:  # fmt: skip
    try:
        if isinstance(whole, nn.Embedding):
            return VocabularyEmbedding(whole, ranks)
        assert isinstance(whole, nn.Linear)
        if style == "vocabulary":
            return VocabularyHead.from_linear(whole, ranks)
        if style == "row":
            return RowParallelLinear.from_linear(
                whole, ranks, sequence_parallel=sequence_parallel, num_chunks=num_chunks, **of_rows
            )
        parts = (PARTS | PARTS_APART).get(style, 1)
        if parts > 1 and whole.out_features % (parts * ranks.world):
            raise ValueError(f"{whole.out_features} outputs in {parts} parts do not divide among {ranks.world}")
        given_rows = style not in PARTS or any(path in columns for columns in shared.values())
        return ColumnParallelLinear.from_linear(
            whole, ranks, sequence_parallel=sequence_parallel and not given_rows, num_chunks=num_chunks,
            gather_output=style == "column_gathered", regather=regather, parts=parts,
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
        given = _hidden(module, args, kwargs)
        if self.length is not None and (rows := given.shape[-2]) != (due := self.length()):
            raise ValueError(
                f"{type(module).__name__} is given {rows} rows, where the sequence is said to have {due}: its rows "
                "cannot be cut among ranks, pass sequence_parallel=False"
            )
        return _replaced(args, kwargs, given, split(given, self.ranks, -2, fill=self.length is not None))


class GatherOutput:
    """Forward hook: joins the rows of all ranks and drops padding rows."""

    def __init__(self, ranks: Ranks, length: Callable[[], int] | None) -> None:
        self.ranks, self.length = ranks, length

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        mine = output[0] if isinstance(output, tuple) else output
        rows = gather(mine, self.ranks, -2)
        if self.length is not None:
            rows = rows[..., : self.length(), :]
        return (rows, *output[1:]) if isinstance(output, tuple) else rows


class SharedInput:
    """Forward pre-hook: gathers a module's input once for all its column layers and computes their products with it.

    The module gets the gathered rows. A column layer that is called with that same tensor returns its product. With any
    other tensor (derived from it, or the other sequence of a cross attention) it computes as without sequence
    parallelism.
    """

    def __init__(
        self, ranks: Ranks, columns: list[str], sequence_parallel: bool, num_chunks: int | Literal["auto"],
        regather: bool, narrow: bool, length: Callable[[], int] | None,
    ) -> None:  # fmt: skip
        self.ranks, self.columns, self.narrow, self.length = ranks, columns, narrow, length
        self.sequence_parallel, self.num_chunks, self.regather = sequence_parallel, num_chunks, regather

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _hidden(module, args, kwargs)
        columns = self._layers(module)
        weights = [column.weight for column in columns]
        deferral = next((column.deferral for column in columns if column.deferral is not None), None)
        if self.sequence_parallel:
            rows, products = all_gather_matmul(
                given, weights, group=self.ranks.transport(given), num_chunks=self.num_chunks, regather=self.regather,
                deferral=deferral,
            )  # fmt: skip
            if self.length is not None and rows.shape[-2] != (due := self.length()):
                rows, *products = (tensor[..., :due, :].contiguous() for tensor in (rows, *products))
        else:
            rows, products = copied_products(given, weights, self.ranks, self.num_chunks, deferral)
        # Tensors derived from these rows reach column layers through copied_products, which sums gradients.
        handed = whole_on_each(rows[..., : weights[0].shape[0]] if self.narrow else rows, self.ranks)
        for column, product in zip(columns, products):
            column.handed = (handed, product)
        return _replaced(args, kwargs, given, handed)

    def release(self, module: nn.Module, args: Any, output: Any) -> None:
        for column in self._layers(module):
            column.handed = None

    def _layers(self, module: nn.Module) -> list[ColumnParallelLinear]:
        # By name: copies of a module share its hooks.
        return [cast(ColumnParallelLinear, module.get_submodule(name)) for name in self.columns]


def _hidden(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = args[0] if args else next((kwargs[k] for k in ("hidden_states", "hidden_state", "x") if k in kwargs), None)
    if not isinstance(given, Tensor):
        raise TypeError(
            f"{type(module).__name__}: the tensor to be cut among ranks must be the first argument, or be named "
            "hidden_states"
        )
    return given


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], given: Tensor, new: Tensor) -> Any:
    if args:
        return (new, *args[1:]), kwargs
    return args, {key: new if value is given else value for key, value in kwargs.items()}


# ---------------------------------------------------------------------- reading and checking the plan


def _styles(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Path -> style of the modules that a pattern matches. For a layer with an adapter: of its inner layers."""
    paths = [path for path, _ in module.named_modules()]
    known, found = set(paths), {}
    for pattern, style in plan.items():
        if style not in (*CUT, *WHOLE, *AROUND):
            raise ValueError(f"plan: {pattern!r} is {style!r}, which is none of {', '.join((*CUT, *WHOLE, *AROUND))}")
        if any(character in pattern for character in "*?["):
            matched = [path for path in paths if _matches(path, pattern)]
        else:
            matched = [pattern] if pattern in known else []
        if not matched:
            raise ValueError(f"plan: {pattern!r} matches no module of {type(module).__name__}")
        found.update(dict.fromkeys(matched, style))
    for path in [path for path, style in found.items() if style in CUT and is_adapted(module.get_submodule(path))]:
        outer = {each: found[each] for each in around(path) if each in found}
        found |= adapter_styles(module.get_submodule(path), path, found.pop(path), outer)
    return found


def _matches(path: str, pattern: str) -> bool:
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _check(module: nn.Module, styles: Mapping[str, str]) -> None:
    missing = [
        path
        for path, part in module.named_modules()
        if any(parameter is not None for parameter in part._parameters.values())
        and styles.get(path) not in (*CUT, *WHOLE)
        and not any(styles.get(outer) in WHOLE for outer in around(path))
    ]
    if missing:
        listed = ", ".join(repr(path) for path in missing[:8]) + (" ..." if len(missing) > 8 else "")
        raise ValueError(
            f"no pattern of the plan says what becomes of {listed}, which hold parameters: add for instance "
            f'{{{missing[0]!r}: "replicate"}} for what works on all rows, "sequence" for a norm between blocks'
        )
    owners: dict[int, set[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for parameter in part._parameters.values():
            owners.setdefault(id(parameter), set()).add(path)
    for path, style in styles.items():
        there = module.get_submodule(path)
        if style in CUT:
            _check_cut(there, path, style, styles, owners)
        if style == "layers" and not (isinstance(there, nn.ModuleList) and len(there)):
            raise ValueError(f'{path} is a {type(there).__name__}: only a ModuleList of blocks can be "layers"')


def _check_cut(
    there: nn.Module, path: str, style: str, styles: Mapping[str, str], owners: Mapping[int, set[str]]
) -> None:
    """Raise ValueError for a layer that cannot have this style. owners: id of a parameter -> paths."""
    embeds = style == "vocabulary" and isinstance(there, nn.Embedding)
    kind = nn.Embedding if embeds else nn.Linear
    if not is_plain(there, kind) or not path:
        what = "nn.Linear, or a plain or scaled nn.Embedding," if style == "vocabulary" else "nn.Linear"
        raise ValueError(
            f"{path or 'the module itself'} is a {type(there).__name__}: only an {what} inside a module can be "
            f'"{style}"'
        )
    if set(there._parameters) != {"weight", *(() if embeds else ("bias",))} or has_hooks(there):
        raise ValueError(
            f"{path} has hooks or parameters that an ordinary nn.{kind.__name__} has not (weight_norm has both): once "
            f'"{style}" it would lose them; add them afterwards, to the cut layer'
        )
    if embeds and not can_be_cut(there, kind):
        raise ValueError(
            f"{path} has max_norm, scale_grad_by_freq, sparse gradients or a forward of its own, which it would lose "
            'once "vocabulary": make it "replicate"'
        )
    for parameter in there.parameters():
        tied = sorted(owners[id(parameter)])
        if len(tied) > 1 and not all(styles.get(other) == "vocabulary" for other in tied):
            mend = 'make them "replicate"' + ', or all of them "vocabulary"' * (style == "vocabulary")
            raise ValueError(f"{', '.join(tied)} share a parameter, which cannot be cut: {mend}")


def _shared_inputs(styles: Mapping[str, str]) -> dict[str, list[str]]:
    """Module that gathers its input -> its column layers."""
    found: dict[str, list[str]] = {path: [] for path, style in styles.items() if style.startswith("gather")}
    for path, style in styles.items():
        inner = next((outer for outer in around(path) if outer in found), None)
        if style in PARTS and inner is not None:
            found[inner].append(path)
    for path, columns in found.items():
        if not columns:
            raise ValueError(f'{path} is "{styles[path]}", but no layer inside it is "column"')
    return found


def _check_heads(module: nn.Module, shared: Mapping[str, list[str]], styles: Mapping[str, str], ranks: Ranks) -> None:
    for path, columns in shared.items():
        size = getattr(module.get_submodule(path), "head_dim", None)
        for column in columns:
            features = _linear(module, column).out_features // PARTS[styles[column]]
            if not isinstance(size, int) or features % size or (features // size) % ranks.world == 0:
                continue
            heads = features // size
            mend = f"use a number of ranks that divides {heads}"
            if heads < ranks.world:
                mend += f", or repeat the weights of each head so that there are {ranks.world}"
            raise ValueError(f"{column} has {heads} heads, which do not divide among {ranks.world} ranks: {mend}")
