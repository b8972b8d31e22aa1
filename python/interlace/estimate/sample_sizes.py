"""Sizes of chunks and of their messages from arrays of lengths, for steps over samples that are not loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from interlace.costs.step import Size
from interlace.estimate.predict import Traffic
from interlace.estimate.traced import weights_of
from interlace.layout import Layout
from interlace.model.naming import LANGUAGE_MODEL
from interlace.plan.memory import WeightSize
from interlace.schedule import StepTable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from interlace.model import MultimodalModel

HEADS = ("num_attention_heads", "num_heads", "encoder_attention_heads")
"""Config names of the number of heads."""
Numbers = NDArray[np.int64] | NDArray[np.float64]


def sizes_of_samples(
    table: StepTable, rows: Mapping[str, Numbers], pairs: Mapping[str, Numbers], targets: Numbers
) -> list[Size]:
    """The size of each chunk of `table`; like `chunk_sizes`, but without loaded samples.

    rows, pairs: module -> [n], for each sample, those in the layers of the module. targets: [n].
    """
    members = np.concatenate([chunk.samples for chunk in table.chunks])
    counts = np.array([len(chunk.samples) for chunk in table.chunks])
    chunk_of = np.repeat(np.arange(len(counts)), counts)
    totals = np.zeros((3, len(counts)))
    module_of = np.array([chunk.module for chunk in table.chunks])
    for name in rows:
        own = module_of == name
        weights = [rows[name], pairs[name], *([targets] if name == LANGUAGE_MODEL else [])]
        for place, each in enumerate(weights):
            total = np.bincount(chunk_of, np.asarray(each, np.float64)[members], len(counts))
            totals[place, own] = total[own]
    return [Size(*each) for each in totals.T.tolist()]


def causal_pairs(tokens: Numbers) -> NDArray[np.float64]:
    """[n], pairs of a query and a key under a causal mask, in samples with these numbers of tokens."""
    return np.asarray(tokens, np.float64) * (np.asarray(tokens, np.float64) + 1) / 2


def counted_traffic(
    mllm: MultimodalModel,
    layout: Layout,
    *,
    sequence_parallel: bool = True,
    weights: Sequence[WeightSize] | None = None,
) -> Traffic:
    """Sizes of messages from the widths of the modules: faster than running a large model on shapes (`Traffic.of`).

    Hidden states have 16 bits per element. weights: result of `weights_of`, if already known.

    Raises ValueError for a module that its tp cannot cut.
    """
    if weights is None:
        weights = weights_of(mllm, layout, sequence_parallel=sequence_parallel)
    each = row_bytes_of(mllm)
    row_bytes = {name: [each[name]] * (len(mllm.layer_list(name)) + 1) for name in each}
    return Traffic(row_bytes, each[LANGUAGE_MODEL], weights)


def row_bytes_of(mllm: MultimodalModel, *, itemsize: int = 2) -> dict[str, float]:
    """Module -> bytes of a row between its layers, from their width. itemsize: bytes of an element."""
    widths = {name: mllm.encoders[name].hidden_size for name in mllm.encoders}
    widths[LANGUAGE_MODEL] = int(_text_config(mllm).hidden_size)
    return {name: float(itemsize * widths[name]) for name in mllm.modules_order()}


class Heads(NamedTuple):
    """Attention heads of a module's layers: of queries, of keys and values, and the dimensions of a head of each."""

    queries: int
    keys: int
    dim: int
    value_dim: int


def key_bytes_of(mllm: MultimodalModel, *, itemsize: int = 2) -> dict[str, float]:
    """Module -> bytes of a row's keys and values in one layer, over all heads, from its config. itemsize: as above."""
    return {
        name: float(itemsize * heads.keys * (heads.dim + heads.value_dim)) for name, heads in heads_of(mllm).items()
    }


def heads_of(mllm: MultimodalModel) -> dict[str, Heads]:
    """Module -> its heads, from its config."""
    widths = row_bytes_of(mllm, itemsize=1)
    return {name: _heads(config, int(widths[name])) for name, config in configs_of(mllm).items()}


def configs_of(mllm: MultimodalModel) -> dict[str, PretrainedConfig | None]:
    """Module -> the config of its layers, in the order of `modules_order`; None if it has no config."""
    configs = {name: getattr(encoder.module, "config", None) for name, encoder in mllm.encoders.items()}
    configs[LANGUAGE_MODEL] = _text_config(mllm)
    return {name: configs[name] for name in mllm.modules_order()}


def _text_config(mllm: MultimodalModel) -> PretrainedConfig:
    config: Any = mllm.language_model.config
    text: PretrainedConfig = config.get_text_config()
    return text


def _heads(config: PretrainedConfig | None, width: int) -> Heads:
    """width: of a hidden state; used as the total width of all heads if the config has no head_dim."""
    heads = next((n for key in HEADS if (n := getattr(config, key, None))), 1)
    if config is not None and getattr(config, "kv_lora_rank", None):  # latent attention: keys for all heads
        return Heads(heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    each = getattr(config, "head_dim", None) or width // heads
    return Heads(heads, getattr(config, "num_key_value_heads", None) or heads, each, each)
