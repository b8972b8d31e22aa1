"""Linear layers with an adapter of low rank beside them (LoRA, arXiv 2106.09685), as peft builds them.

    layer.base_layer          nn.Linear: what is frozen
    layer.lora_A[name]        nn.Linear [rank, in]
    layer.lora_B[name]        nn.Linear [out, rank]; the layer gives base(x) + scale * B(A(x))

    the layer is cut         A                                  B
    by outputs ("column")    whole, on what the layer is given  by outputs, too
    by inputs ("row")        by inputs, too: a sum over ranks   whole, on what the layer gives: all rows, or a rank's

So an adapter adds to what ranks tell each other no more than rows [..., rank]: in the forward pass where a layer is cut
by its inputs, in the backward pass where it is cut by its outputs. What is whole is used on all rows, and its gradient
is the whole's on every rank; or, with sequence parallelism, on a rank's own rows, and its gradient is a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

APART = "_apart"
"""Ends the style of a layer that is cut by its outputs and has an input of its own, the same on every rank."""


def linear_of(layer: Any) -> nn.Linear | None:
    """The nn.Linear that `layer` is, or that it has with an adapter beside it; None if it is neither."""
    found = layer.base_layer if is_adapted(layer) else layer
    return found if isinstance(found, nn.Linear) else None


def is_adapted(layer: Any) -> bool:
    """Whether `layer` is peft's: a layer with an adapter beside it."""
    return isinstance(layer, nn.Module) and hasattr(layer, "base_layer") and hasattr(layer, "lora_A")


def adapter_styles(layer: Any, path: str, style: str, around: Mapping[str, str]) -> dict[str, str]:
    """Path -> style of what is inside the adapted `layer` at `path` that is to be cut as `style` says.

    around: of the modules that it lies in. Raises ValueError for an adapter that is not the plain one.
    """
    if linear_of(layer) is None or getattr(layer, "lora_variant", None):
        raise ValueError(
            f"{path} has an adapter that is not the plain one of a linear layer (DoRA, or of an embedding), which "
            "cannot be cut: use LoRA on linear layers, or leave it whole"
        )
    gathers = [each for each in around.values() if each.startswith("gather")]
    if "gather_narrow" in gathers:
        raise ValueError(f"{path} has an adapter and is given a part of the features only: leave it out")
    if style == "row":
        of_a, of_b = "row", "sequence"
    elif style in ("column_gathered", "vocabulary"):  # the layer itself sums the gradient of what it is given
        of_a, of_b = "replicate", style
    elif gathers:
        of_a, of_b = "replicate", style + APART
    else:
        of_a, of_b = "sequence", style
    found = {f"{path}.base_layer": style}
    for name in layer.lora_A:
        found |= {f"{path}.lora_A.{name}": of_a, f"{path}.lora_B.{name}": of_b}
    return found
