"""Costs of layers for a chunk of any size: fitted to measurements, or scaled from an estimate.

Seconds of a layer are a sum of non-negative terms: per pair of a query and a key in the blocks that attention visits,
per row, per row with a target (the head), and a constant. Forward, input gradient and weight gradient have separate
fits. Layers of one kind share a fit. The first and the last layer of a module include the modules before and after the
layers, so they are separate kinds. (Entrain fits a x^2 + b x + c to tokens, dissertation 4.4.1; with packed rows the
square is of the documents, not of the tokens.)

    costs.of("language_model", Size(rows=2048, pairs=2.1e6, targets=900), tp=2) -> ModuleCosts of one rank
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace.costs.fitted import FREE, LinkModel, non_negative_fit
from interlace.costs.host_overhead import NO_HOST_OVERHEAD, HostOverhead
from interlace.costs.layer import LayerTimes
from interlace.costs.links import NO_LINK, Link
from interlace.costs.modules import ModuleCosts

VERSION = 3  # of the file
BESIDE = ("collate", "forward", "backward")
PARTS = ("forward", "input_grad", "weight_grad", "weight_only")


class Size(NamedTuple):
    """Size of a chunk, which determines its cost: rows in the layers (including padding), (query, key) pairs in the
    blocks that attention visits, rows with a target. For many chunks at once (`sizes_at_once`) each is an array."""

    rows: float
    pairs: float
    targets: float = 0.0

    def over(self, ranks: int) -> Size:
        """The share of each of `ranks` context-parallel ranks."""
        return Size(self.rows / ranks, self.pairs / ranks, self.targets / ranks)


def sizes_at_once(sizes: Sequence[Size] | NDArray[np.float64]) -> Size:
    """Sizes of n chunks as one Size of arrays [n]: for it, `Costs` returns times [layers, n]."""
    columns: Any = np.asarray(sizes, np.float64).reshape(-1, len(Size._fields)).T
    return Size(*columns)


class Fit(NamedTuple):
    """seconds = per_pair * pairs + per_row * rows + per_target * targets + fixed. error: mean leave-one-out error,
    relative to the whole timed interval (nan for fewer than two measurements)."""

    per_pair: float = 0.0
    per_row: float = 0.0
    per_target: float = 0.0
    fixed: float = 0.0
    error: float = math.nan

    def seconds(self, size: Size) -> float:
        """Seconds of a chunk of this size."""
        return self.per_pair * size.pairs + self.per_row * size.rows + self.per_target * size.targets + self.fixed


NOTHING = Fit(error=0.0)
"""Fit of an operation that takes no time."""


def fit(sizes: Sequence[Size], seconds: ArrayLike, *, scale: ArrayLike | None = None) -> Fit:
    """The Fit with the least relative error for measured seconds [n], no term negative; exact: checks all sets of
    terms.

    scale: [n], reference of the relative errors (default: the seconds themselves). For a difference of two measured
    times use the larger one of them, because the difference has its noise. If all seconds are 0, no term is used.

    Raises ValueError for no measurement, different numbers of sizes and seconds, or a value that is negative or not
    finite.
    """
    y = np.asarray(seconds, dtype=np.float64)
    if not len(sizes) or y.shape != (len(sizes),):
        raise ValueError(f"got {len(sizes)} sizes and seconds of shape {y.shape}: give at least one, and equally many")
    if not (np.isfinite(y) & (y >= 0)).all():
        raise ValueError(f"seconds[{int((~(np.isfinite(y) & (y >= 0))).argmax())}] is not a number >= 0")
    if not y.any():
        return NOTHING
    scales = np.maximum(y if scale is None else np.asarray(scale, dtype=np.float64), 1e-3 * y.max())
    rows = np.array([(size.pairs, size.rows, size.targets, 1.0) for size in sizes])
    used = rows.any(axis=0)
    rows = rows[:, used] / scales[:, None]
    target = y / scales
    errors = []
    for left_out in range(len(y)) if len(y) > 1 else ():
        rest = np.arange(len(y)) != left_out
        errors.append(abs(rows[left_out] @ _fitted(rows[rest], target[rest]) - target[left_out]))
    terms = np.zeros(4)
    terms[used] = _fitted(rows, target)
    per_pair, per_row, per_target, fixed = terms.tolist()
    return Fit(per_pair, per_row, per_target, fixed, float(np.mean(errors)) if errors else math.nan)


def _fitted(rows: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    used = rows.any(axis=0)  # again: a column may be 0 in the remaining sizes
    terms = np.zeros(rows.shape[1])
    terms[used] = non_negative_fit(rows[:, used], target)
    return terms


@dataclass(frozen=True)
class LaneTraffic:
    """Traffic of one rank with the others of its lane for one layer: messages, and bytes per row of the chunk, in a
    forward and in a backward."""

    forward_messages: float = 0.0
    forward_bytes: float = 0.0
    backward_messages: float = 0.0
    backward_bytes: float = 0.0

    def seconds(self, size: Size, link: Link) -> tuple[float, float]:
        """Seconds in a forward and in a backward, without overlap with computation."""
        model = link.message
        return (
            self.forward_messages * model.latency + self.forward_bytes * size.rows * model.per_byte,
            self.backward_messages * model.latency + self.backward_bytes * size.rows * model.per_byte,
        )


NO_TRAFFIC = LaneTraffic()
"""Traffic of a rank that is alone in its lane."""


def context_traffic(cp: int, key_bytes: float) -> LaneTraffic:
    """Traffic of one of `cp` context-parallel ranks for one layer. key_bytes: bytes per row of its keys and values. A
    rank sends its own rows, in the forward and again in the backward; in the backward it also sends the gradients that
    it computed for the others' rows."""
    if cp == 1 or not key_bytes:
        return NO_TRAFFIC
    peers = cp - 1
    return LaneTraffic(peers, peers * key_bytes, 2 * peers, 2 * peers * key_bytes)


@dataclass(frozen=True)
class LayerFit:
    """One kind of layer on one rank of a lane: see `LayerTimes` for the parts."""

    forward: Fit
    input_grad: Fit
    weight_grad: Fit
    weight_only: Fit
    traffic: LaneTraffic = NO_TRAFFIC


class Costs(Protocol):
    """Interface for `interlace.estimate.predict`: costs of each layer of a module on one rank, for any chunk size."""

    def of(self, module: str, size: Size, tp: int = 1, cp: int = 1, link: Link = NO_LINK) -> ModuleCosts:
        """Seconds of each layer on one rank of a lane of tp * cp ranks connected by `link`; [layers, n] for many chunks
        at once (a size from `sizes_at_once`).

        Raises ValueError for a module or a tp that was not measured.
        """

    def beside(self, module: str, size: Size, tp: int = 1, cp: int = 1, link: Link = NO_LINK) -> tuple[float, float]:
        """Seconds that a stage of the module spends on a chunk outside its layers, in its forward (including collation)
        and in its backward. For many chunks at once: [n] each, or one number for all."""

    @property
    def optimizer(self) -> LinkModel:
        """Seconds of the optimizer's step, including gradient norm and clipping, as a function of the bytes of weights
        that a rank trains."""

    @property
    def host_overhead(self) -> HostOverhead:
        """Other work of a rank for a step."""


@dataclass(frozen=True)
class ModuleFits:
    """A module: the kind of each layer, whether it is trained, and the costs of the kinds under each tp."""

    layers: tuple[str, ...]
    trainable: tuple[bool, ...]
    kinds: Mapping[int, Mapping[str, LayerFit]]
    """tp -> kind -> its fit."""
    collate: Fit = NOTHING
    forward: Fit = NOTHING
    """Time of a stage in a forward, independent of its number of layers; `backward`: the same for a backward."""
    backward: Fit = NOTHING
    traffic: Mapping[int, LaneTraffic] = field(default_factory=dict)
    """tp -> traffic of a rank with its lane for a stage, outside its layers."""
    key_bytes: float = 0.0
    """Bytes of a row's keys and values in one layer, over all heads; context-parallel ranks exchange these."""


@dataclass(frozen=True)
class FittedCosts:
    """Measured costs of a model on one kind of device. origin: description of the measurement."""

    modules: Mapping[str, ModuleFits]
    optimizer: LinkModel = FREE
    origin: str = ""
    host_overhead: HostOverhead = NO_HOST_OVERHEAD

    def of(self, module: str, size: Size, tp: int = 1, cp: int = 1, link: Link = NO_LINK) -> ModuleCosts:
        """See `Costs`. Context-parallel ranks have equal parts of rows, pairs and targets. Each sends its keys and
        values to all others, without overlap with attention."""
        if module not in self.modules:
            raise ValueError(f"no costs of module {module!r}: measured are {', '.join(self.modules) or 'none'}")
        fits = self.modules[module]
        if tp not in fits.kinds:
            known = ", ".join(map(str, sorted(fits.kinds)))
            raise ValueError(
                f"{module} was not measured with tp = {tp}, only with {known}: measure it again with this degree"
            )
        local_size = size.over(cp)
        shared = context_traffic(cp, fits.key_bytes / tp).seconds(local_size, link)
        times = {kind: self._times(layer_fit, local_size, link, shared) for kind, layer_fit in fits.kinds[tp].items()}
        columns = np.moveaxis(np.array([times[kind] for kind in fits.layers]), 1, 0)
        return ModuleCosts(np.arange(len(fits.layers)), LayerTimes(*columns), np.array(fits.trainable))

    @staticmethod
    def _times(layer_fit: LayerFit, local_size: Size, link: Link, shared: tuple[float, float]) -> tuple[float, ...]:
        forward, input_grad, weight_grad, weight_only = (getattr(layer_fit, part).seconds(local_size) for part in PARTS)
        there, back = map(sum, zip(layer_fit.traffic.seconds(local_size, link), shared, strict=True))
        return forward + there, input_grad + back, weight_grad, weight_only + back

    def beside(self, module: str, size: Size, tp: int = 1, cp: int = 1, link: Link = NO_LINK) -> tuple[float, float]:
        """See `Costs`. Every rank of a lane collates the whole chunk."""
        fits, local_size = self.modules[module], size.over(cp)
        forward_traffic, backward_traffic = fits.traffic.get(tp, NO_TRAFFIC).seconds(local_size, link)
        ahead = fits.collate.seconds(size) + fits.forward.seconds(local_size)
        return ahead + forward_traffic, fits.backward.seconds(local_size) + backward_traffic

    @property
    def errors(self) -> dict[str, float]:
        """Module -> the mean leave-one-out error of its kinds' forwards and backwards."""
        errors = {}
        for name, fits in self.modules.items():
            kinds = [kind for by_name in fits.kinds.values() for kind in by_name.values()]
            every = [error for kind in kinds for error in (kind.forward.error, kind.input_grad.error)]
            finite = [error for error in every if math.isfinite(error)]
            errors[name] = float(np.mean(finite)) if finite else math.nan
        return errors


@dataclass(frozen=True)
class ScaledCosts:
    """Costs of one chunk (counted in FLOPs, or timed at one size), scaled in proportion to rows.

    costs: of a chunk with `rows` rows in each module's layers, on one rank that computes all of it.
    """

    costs: Mapping[str, ModuleCosts]
    rows: Mapping[str, float]
    optimizer: LinkModel = FREE
    host_overhead: HostOverhead = NO_HOST_OVERHEAD

    def of(self, module: str, size: Size, tp: int = 1, cp: int = 1, link: Link = NO_LINK) -> ModuleCosts:
        """See `Costs`. The ranks of a lane have equal parts; their traffic is not counted."""
        cost, share = self.costs[module], size.rows / self.rows[module] / (tp * cp) if self.rows[module] else 0.0
        times = LayerTimes(*(np.multiply.outer(getattr(cost.times, part), share) for part in PARTS))
        return replace(cost, times=times)

    def beside(self, module: str, size: Size, tp: int = 1, cp: int = 1, link: Link = NO_LINK) -> tuple[float, float]:
        """See `Costs`: not counted."""
        return 0.0, 0.0


# ---------------------------------------------------------------------- the file


def costs_text(costs: FittedCosts, **more: Any) -> str:
    """The text of a file of costs. more: further JSON values; `read_costs` reads both."""
    table = {"version": VERSION, **more, "origin": costs.origin, "optimizer": costs.optimizer.__dict__}
    table["around"] = costs.host_overhead.to_table()
    table["modules"] = {name: _module_table(fits) for name, fits in costs.modules.items()}
    return json.dumps(table, indent=1) + "\n"


def _module_table(fits: ModuleFits) -> dict[str, Any]:
    kinds = {
        str(tp): {
            name: {part: _numbers(getattr(layer_fit, part)) for part in PARTS} | {"traffic": layer_fit.traffic.__dict__}
            for name, layer_fit in kinds.items()
        }
        for tp, kinds in fits.kinds.items()
    }
    beside = {name: _numbers(getattr(fits, name)) for name in BESIDE}
    traffic = {str(tp): layer_fit.__dict__ for tp, layer_fit in fits.traffic.items()}
    table = {"layers": fits.layers, "trainable": fits.trainable, "beside": beside, "key_bytes": fits.key_bytes}
    return table | {"traffic": traffic, "kinds": kinds}


def _numbers(fitted: Fit) -> list[float | None]:
    return [None if math.isnan(value) else value for value in fitted]


def read_costs(path: Path) -> tuple[FittedCosts, dict[str, Any]]:
    """The costs in a file made by `costs_text`, and the whole table. Raises ValueError, with the file's name, for an
    invalid file."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["version"] != VERSION:
            raise ValueError(f"its version is {table['version']}, this program reads {VERSION}: measure again")
        modules = {name: _module_of(entry) for name, entry in table["modules"].items()}
        optimizer = LinkModel(float(table["optimizer"]["latency"]), float(table["optimizer"]["per_byte"]))
        overhead = HostOverhead.from_table(table["around"])
        return FittedCosts(modules, optimizer, str(table["origin"]), overhead), table
    except OSError as error:
        raise ValueError(f"{path}: cannot read the file: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: not a valid file of costs: {reason}") from None


def _module_of(table: Mapping[str, Any]) -> ModuleFits:
    kinds = {
        int(tp): {
            name: LayerFit(**{part: _fit_of(entry[part]) for part in PARTS}, traffic=LaneTraffic(**entry["traffic"]))
            for name, entry in by_name.items()
        }
        for tp, by_name in table["kinds"].items()
    }
    layers = tuple(map(str, table["layers"]))
    if missing := {kind for by_name in kinds.values() for kind in set(layers) - by_name.keys()}:
        raise ValueError(f"layer kind {min(missing)} has no costs")
    beside = {name: _fit_of(table["beside"][name]) for name in BESIDE}
    traffic = {int(tp): LaneTraffic(**entry) for tp, entry in table["traffic"].items()}
    trainable, key_bytes = tuple(map(bool, table["trainable"])), float(table["key_bytes"])
    return ModuleFits(layers, trainable, kinds, **beside, traffic=traffic, key_bytes=key_bytes)


def _fit_of(values: Sequence[float | None]) -> Fit:
    numbers = [math.nan if value is None else float(value) for value in values]
    result = Fit(*numbers)
    if not all(0.0 <= value < math.inf for value in result[:4]):
        raise ValueError(f"{result} has a term that is not a number >= 0")
    return result
