"""Costs from a few measurements: seconds per layer over tokens, TP and CP, and seconds per transfer over bytes.

Entrain profiles each layer at a few sizes for every (TP, CP) and fits a x^2 + b x + c to each (dissertation 4.4.1).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from interlace.balance.assignment import require

Degrees = tuple[int, int]
"""(tensor-parallel size, context-parallel size)."""


@dataclass(frozen=True)
class CostModel:
    """coefficients[tp, cp]: float64 [layers, 3], none negative: seconds = a x^2 + b x + c for x tokens."""

    coefficients: Mapping[Degrees, NDArray[np.float64]]

    def layers(self, tokens: ArrayLike, tp: int = 1, cp: int = 1) -> NDArray[np.float64]:
        """Seconds of each layer, float64 [..., layers] for tokens [...]. ValueError for degrees not measured."""
        if (tp, cp) not in self.coefficients:
            known = ", ".join(map(str, sorted(self.coefficients)))
            raise ValueError(f"no measurements for (tp, cp) = {(tp, cp)}: measured are {known}")
        x = np.asarray(tokens, dtype=np.float64)[..., None]
        a, b, c = self.coefficients[tp, cp].T
        return np.asarray(a * x * x + b * x + c)

    def seconds(self, tokens: ArrayLike, tp: int = 1, cp: int = 1) -> NDArray[np.float64]:
        """Seconds of all layers together, float64 [...]: the workload of samples of these lengths."""
        return np.asarray(self.layers(tokens, tp, cp).sum(axis=-1))


def fit_cost_model(tokens: ArrayLike, seconds: Mapping[Degrees, ArrayLike]) -> CostModel:
    """Fits one quadratic per layer and (TP, CP) by least squares of the relative error (dissertation 4.4.1).

    Errors are relative, since a plain fit over 64 to 16k tokens would hardly weigh short samples. Coefficients are not
    negative. This is solved exactly: the best of at most 8 sets of non-zero coefficients. So no estimate is negative,
    and none decreases with tokens. O(layers * sizes) per configuration.

    Args:
        tokens: positive numbers [sizes], the measured input sizes.
        seconds: (tp, cp) -> positive numbers [sizes, layers].

    Raises:
        ValueError: no measurements, different shapes, or a value that is not positive and finite (with its index).
    """
    x = np.asarray(tokens, dtype=np.float64)
    if x.ndim != 1 or not len(x):
        raise ValueError(f"tokens must have one dimension and at least one entry, got shape {x.shape}")
    _check_positive("tokens", x)
    if not seconds:
        raise ValueError("no measurements: give seconds for at least one (tp, cp)")
    coefficients = {}
    powers = np.stack([x * x, x, np.ones_like(x)], axis=-1)
    for degrees, measured in seconds.items():
        y = np.asarray(measured, dtype=np.float64)
        if y.ndim != 2 or len(y) != len(x) or not y.size:
            raise ValueError(f"seconds{list(degrees)} must have shape ({len(x)}, layers), got {y.shape}")
        _check_positive(f"seconds{list(degrees)}", y)
        coefficients[degrees] = np.stack([non_negative_fit(powers / y[:, [k]]) for k in range(y.shape[1])])
    return CostModel(coefficients)


def non_negative_fit(rows: NDArray[np.float64], target: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """The w >= 0 [columns] that minimises |rows w - target|, exactly, by enumeration of all sets of columns. target:
    [n] (default: ones)."""
    target = np.ones(len(rows)) if target is None else target
    scale = np.abs(rows).max(axis=0)
    scaled = rows / scale
    columns = rows.shape[1]
    best, error = np.zeros(columns), float((target**2).sum())
    for size in range(1, columns + 1):
        for subset in itertools.combinations(range(columns), size):
            if size > len(rows):
                continue
            picked = list(subset)
            weights, _, rank, _ = np.linalg.lstsq(scaled[:, picked], target, rcond=None)
            if rank < size or (weights < 0).any():
                continue
            squared_error = float(((scaled[:, picked] @ weights - target) ** 2).sum())
            if squared_error < error * (1 - 1e-12):
                best, error = np.zeros(columns), squared_error
                best[picked] = weights
    return np.asarray(best / scale)


def _check_positive(name: str, values: NDArray[np.float64]) -> None:
    require(name, values, np.isfinite(values) & (values > 0), "values must be finite and positive")


@dataclass(frozen=True)
class LinkModel:
    """A link: seconds = latency + bytes * per_byte."""

    latency: float = 0.0
    per_byte: float = 0.0

    def transfer(self, size: float) -> float:
        """Seconds of sending `size` bytes; 0 bytes take no time."""
        return self.latency + size * self.per_byte if size > 0 else 0.0

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of a ring all-reduce of `size` bytes: 2 (n - 1) steps of size / n."""
        return 2 * (ranks - 1) * self.transfer(size / ranks)


FREE = LinkModel()
"""A link whose transfers take no time."""


def fit_link(sizes: ArrayLike, seconds: ArrayLike) -> LinkModel:
    """The LinkModel with the least relative error for measured transfers; both coefficients are non-negative.

    Args: positive numbers [n] each, bytes and seconds. Raises ValueError as `fit_cost_model`.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or not len(x):
        raise ValueError(f"sizes and seconds must have one equal dimension, got shapes {x.shape} and {y.shape}")
    _check_positive("sizes", x)
    _check_positive("seconds", y)
    latency, per_byte = non_negative_fit(np.stack([1.0 / y, x / y], axis=-1))
    return LinkModel(float(latency), float(per_byte))
