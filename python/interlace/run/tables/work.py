"""FLOPs of samples and chunks, estimated from lengths, for assignments to microbatches.

All values are whole numbers, so that every rank gets the same result. The estimate is the one used for pipeline cuts
(`plan.analytic_costs`): products of linear layers per token, attention per pair of a token and a visible key, backward
depending on what is frozen. Tokens of a sample are computed from its rows. So items of one sample count as equally
large, and attention in windows or tiles of an item counts as attention in all of it. `interlace.estimate.step_flops`
counts exactly, but has to run items, and does not support all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from interlace.layout import Layout
from interlace.model import ModalityModule, MultimodalModel
from interlace.plan import analytic_costs, layer_costs
from interlace.schedule import Op

if TYPE_CHECKING:
    from interlace.run.tables.table import Lengths

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ModuleWork:
    """FLOPs of a module's layers. forward, backward: int64 [layers, 2], per token inside the module, and per token and
    key. per_row: tokens inside the module for each row that it outputs. causal: a token attends to all earlier keys of
    its sample and its own; else to all keys of its item. trainable: bool [layers]."""

    forward: Ints
    backward: Ints
    per_row: float
    causal: bool
    trainable: NDArray[np.bool_]

    def sizes(self, rows: Ints, items: Ints) -> Ints:
        """int64 [n, 2]: tokens of each sample, and pairs of a token and a key. rows, items: of each sample."""
        tokens = np.rint(rows * self.per_row).astype(np.int64)
        pairs = tokens * (tokens + 1) // 2 if self.causal else tokens * tokens // np.maximum(items, 1)
        return np.stack([tokens, pairs], axis=1)


@dataclass(frozen=True, eq=False)
class Work:
    """Costs of a model's modules by name, the language model last."""

    modules: Mapping[str, ModuleWork]

    @classmethod
    def of(cls, mllm: MultimodalModel, *, recompute: bool = False) -> Work:
        """The work of a model with its current frozen flags. recompute: backward recomputes each layer's forward."""
        order = mllm.modules_order()
        once = dict.fromkeys(order, 1.0)
        runs = []
        for keys in (0.0, 1.0):
            costs = analytic_costs(mllm, once, context=dict.fromkeys(order, keys))
            forward = {
                name: np.bincount(cost.layer, weights=cost.times.forward, minlength=cost.num_layers)
                for name, cost in costs.items()
            }
            runs.append((forward, layer_costs(costs, order, recompute=recompute)))
        modules = {}
        for name in order:
            rates = [np.stack([runs[0][i][name], runs[1][i][name] - runs[0][i][name]], axis=1) for i in (0, 1)]
            encoder = mllm.encoders[name] if name in mllm.encoders else None
            per_row = 1.0 if encoder is None else _tokens_per_row(encoder)
            trainable = np.array([layer.trainable for layer in mllm.layers(name)])
            modules[name] = ModuleWork(
                np.rint(rates[0]).astype(np.int64),
                np.maximum(np.rint(rates[1] - rates[0]), 0).astype(np.int64),
                per_row,
                encoder is None,
                trainable,
            )
        return cls(modules)

    def of_samples(self, lengths: Lengths) -> dict[str, Ints]:
        """Module -> int64 [n], the FLOPs of each sample, forward and backward."""
        flops = {}
        for name, module in self.modules.items():
            flops[name] = module.sizes(*lengths.of_module(name)) @ (module.forward + module.backward).sum(0)
        return flops

    def shares(self, layout: Layout, context: int = 1024) -> dict[tuple[Op, str, int, int], float]:
        """(FORWARD or BACKWARD, module, replica, stage) -> its share of the FLOPs of `of_samples`, per rank of its
        lane. Multiplied by a chunk's work, it is a duration for generators. context: keys that a token attends to; the
        shares depend little on it."""
        shares_of = {}
        for name, module in self.modules.items():
            both = zip(OPS, (module.forward, module.backward), strict=True)
            per_layer = {op: each @ np.array([1, context]) for op, each in both}
            whole = max(1, int(sum(each.sum() for each in per_layer.values())))
            for pipeline in layout.pipelines(name):  # replicas may have different cuts
                for stage, (op, each) in product(pipeline.stages, per_layer.items()):
                    part = int(each[stage.start : stage.stop].sum())
                    shares_of[op, name, pipeline.replica, stage.index] = part / whole / layout.spec(name).lane_size
        return shares_of


OPS = (Op.FORWARD, Op.BACKWARD)


def _tokens_per_row(encoder: ModalityModule) -> float:
    """Tokens inside the encoder per output row, for an item of its configured size."""
    item = encoder.default
    return float(encoder.nominal_length / max(1, encoder.tokens(item.shape, item.about)))
