"""Linear layers with a low-rank adapter (LoRA, arXiv 2106.09685), as peft builds them.

    layer.base_layer          nn.Linear, frozen
    layer.lora_A[name]        nn.Linear [rank, in]
    layer.lora_B[name]        nn.Linear [out, rank]; the layer returns base(x) + scale * B(A(x))

    the layer is cut         A                                  B
    by outputs ("column")    whole, applied to the input        by outputs, too
    by inputs ("row")        by inputs, too: a sum over ranks   whole, applied to the output: all rows, or a rank's

An adapter adds only rows [..., rank] to the communication: in the forward pass of a layer cut by its inputs, in the
backward pass of a layer cut by its outputs. A whole part (A or B) is applied to all rows, and its gradient is the whole
gradient on every rank. With sequence parallelism it is applied to a rank's own rows, and its gradient is a sum over
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

APART = "_apart"
"""Suffix of the style of a layer that is cut by its outputs and has its own input, equal on every rank."""


def linear_of(layer: object) -> nn.Linear | None:
    """The nn.Linear of `layer`: the layer itself or the base layer of an adapter. None if it is neither."""
    base = getattr(layer, "base_layer", None) if is_adapted(layer) else layer
    return base if isinstance(base, nn.Linear) else None


def is_adapted(layer: object) -> bool:
    """True if `layer` is a layer of peft with an adapter."""
    return isinstance(layer, nn.Module) and hasattr(layer, "base_layer") and hasattr(layer, "lora_A")


def adapter_styles(layer: Any, path: str, style: str, outer: Mapping[str, str]) -> dict[str, str]:
    """Path -> style of the parts inside the adapted `layer` at `path`, if the layer is cut by `style`.

    outer: styles of the modules around the layer. Raises ValueError for an adapter other than plain LoRA.
    """
    if linear_of(layer) is None or getattr(layer, "lora_variant", None):
        raise ValueError(
            f"{path} has an adapter other than plain LoRA of a linear layer (for example DoRA), which cannot be "
            "sharded: use plain LoRA on linear layers, or leave the layer out of the plan"
        )
    gathers = [outer_style for outer_style in outer.values() if outer_style.startswith("gather")]
    if "gather_narrow" in gathers:
        raise ValueError(f"{path} has an adapter, but gets only a part of the features: leave the adapter out")
    if style == "row":
        of_a, of_b = "row", "sequence"
    elif style in ("column_gathered", "vocabulary"):  # the layer itself sums the gradient of its input
        of_a, of_b = "replicate", style
    elif gathers:
        of_a, of_b = "replicate", style + APART
    else:
        of_a, of_b = "sequence", style
    styles = {f"{path}.base_layer": style}
    for name in layer.lora_A:
        styles |= {f"{path}.lora_A.{name}": of_a, f"{path}.lora_B.{name}": of_b}
    return styles
