"""Untied weights that the config calls tied: the folder holds different values for them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel


def own_parameter(model: nn.Module, name: str) -> None:
    """Replace the tied weight `name` of `model` by its own parameter; both are on meta."""
    place, _, leaf = name.rpartition(".")
    shared = model.get_parameter(name)
    model.get_submodule(place)._parameters[leaf] = nn.Parameter(torch.empty_like(shared), shared.requires_grad)
    for prefix, part in model.named_modules():
        ties: dict[str, str] = getattr(part, "all_tied_weights_keys", None) or {}
        ties.pop(name.removeprefix(f"{prefix}.") if prefix else name, None)


def log_untied(model: nn.Module) -> None:
    """Set tie_word_embeddings = False for the parts of `model` whose weights are not tied although the config says so.

    Otherwise a reader that trusts the config would tie them and lose one of the two weights.
    """
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or not hasattr(part, "get_expanded_tied_weights_keys"):
            continue
        ties = part.get_expanded_tied_weights_keys(all_submodels=False)
        held = (part.get_parameter_or_buffer(one) is part.get_parameter_or_buffer(ties[one]) for one in ties)
        if ties and not any(held):
            for config in (part.config, part.config.get_text_config(decoder=True)):
                config.tie_word_embeddings = False
