"""Tensors other than the hidden state that layers of a language model share: per-layer inputs and keys.

Some models (Gemma-3n, Gemma-4) give every layer a vector per token, looked up by its id. In some (Gemma-4,
Mistral-Large-4), later layers use the keys and values of an earlier one. Stages pass on the hidden state only, so
neither can cross a cut.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def per_layer_inputs(module: nn.Module, ids: Tensor, placeholders: Collection[int]) -> Tensor | None:
    """Per-layer inputs of each token, [..., T, layers, d], for ids int64 [..., T]; None for models without them.

    Models that get embeddings instead of ids would omit them (Gemma-3n), or search each embedding in their table, which
    has no image features (Gemma-4). Placeholders count as padding, as in these models' own merging.
    """
    text = _text_model(module)
    if text is None:
        return None
    config = text.config
    unknown = torch.isin(ids, torch.tensor(sorted(placeholders), dtype=ids.dtype, device=ids.device))
    unknown |= ids >= config.vocab_size_per_layer_input
    given: Tensor = text.get_per_layer_inputs(ids.masked_fill(unknown, config.pad_token_id or 0))
    return given


def _text_model(module: nn.Module) -> PreTrainedModel | None:
    """The part of `module` that looks up per-layer inputs; None if absent."""
    for part in module.modules():
        if hasattr(part, "get_per_layer_inputs") and hasattr(part, "embed_tokens_per_layer"):
            return part if getattr(part, "hidden_size_per_layer_input", 0) else None
    return None


def check_cut(module: nn.Module, layers: int, start: int, stop: int) -> None:
    """Raise ValueError if the stage [start, stop) of a language model of `layers` layers separates shared tensors."""
    boundaries = {start, stop} - {0, layers}
    if not boundaries:
        return
    name = type(module).__name__
    if _text_model(module) is not None:
        raise ValueError(
            f"{name} cannot be cut into stages: each layer takes a vector per token that is computed from the token "
            "ids before the first layer (per-layer embeddings). Keep this module on one stage"
        )
    config: PretrainedConfig = getattr(module, "config", None)
    producers = _producers(config.get_text_config()) if hasattr(config, "get_text_config") else {}
    allowed = [at for at in range(1, layers) if not any(j < at <= i for i, j in producers.items())]
    if refused := sorted(boundaries.difference(allowed)):
        at = refused[0]
        reader, producer = next((i, j) for i, j in producers.items() if j < at <= i)
        may = f"may be cut before layers {', '.join(map(str, allowed))}" if allowed else "must stay on one stage"
        raise ValueError(
            f"{name} cannot be cut before layer {at}: layer {reader} uses the keys and values of layer {producer} "
            f"(shared KV layers), and stages send only the hidden state. It {may}"
        )


def _producers(config: PretrainedConfig) -> dict[int, int]:
    """Layer -> the earlier layer that provides its keys and values."""
    modes = getattr(config, "kv_sharing_modes", None) or []
    sources, kinds = getattr(config, "kv_source_layers", None), getattr(config, "layer_types", None)
    producers = {}
    for i, mode in enumerate(modes):
        if mode is not None and mode.startswith("reuse"):
            alike = [j for j in range(i) if modes[j] == "store" and (kinds is None or kinds[j] == kinds[i])]
            producers[i] = sources[i] if sources is not None else alike[-1]
    return producers
