"""Switches the attention of a HuggingFace model to this package's."""

from __future__ import annotations

from typing import Any

from torch import nn

from interlace.attention.hf import FLASH_NAME, NAME

NAMES = (NAME, FLASH_NAME)


def use_bitfield_attention(module: nn.Module, implementation: str = NAME, *, required: bool = True) -> str:
    """Switch a HuggingFace model to `attn_implementation="interlace"`, or the other name of it.

    Returns the implementation that it has then. Raises ValueError where it cannot be switched, if that is `required`,
    and for layer drop: a dropped layer may be the one that a stage's hidden state enters or leaves at.
    """
    drop = getattr(module, "layerdrop", 0.0)
    if drop:
        raise ValueError(
            f"{type(module).__name__} has layer drop {drop}, which cannot be cut into stages: set layerdrop "
            "(encoder_layerdrop in Whisper's config) to 0"
        )
    setter = getattr(module, "set_attn_implementation", None)
    if setter is None:
        raise ValueError(f"{type(module).__name__} is no HuggingFace model: its attention cannot be switched")
    config: Any = module.config
    if config._attn_implementation != implementation:
        setter(implementation)
    if config._attn_implementation != implementation and required:
        raise ValueError(
            f"{type(module).__name__} does not take attn_implementation={implementation!r}: its attention does not go "
            "through HuggingFace's attention interface"
        )
    return str(config._attn_implementation)
