"""Switch of a HuggingFace model's attention to this package's."""

from __future__ import annotations

from typing import Any

from torch import nn

from interlace.attention.hf import FLASH_NAME, NAME

NAMES = (NAME, FLASH_NAME)


def use_bitfield_attention(module: nn.Module, implementation: str = NAME, *, required: bool = True) -> str:
    """Switch a HuggingFace model to `attn_implementation="interlace"` or to another name of it.

    implementation: the name to set.
    required: raise ValueError if the model cannot be switched.
    Returns the implementation that the model then has. Also raises ValueError for layer drop: the hidden state of a
    stage may enter or leave at a dropped layer.
    """
    drop = getattr(module, "layerdrop", 0.0)
    if drop:
        raise ValueError(
            f"{type(module).__name__} has layer drop {drop}, which pipeline stages do not support: set layerdrop "
            "(encoder_layerdrop in Whisper's config) to 0"
        )
    setter = getattr(module, "set_attn_implementation", None)
    if setter is None:
        raise ValueError(f"{type(module).__name__} is not a HuggingFace model: its attention cannot be switched")
    config: Any = module.config
    if config._attn_implementation != implementation:
        setter(implementation)
    if config._attn_implementation != implementation and required:
        raise ValueError(
            f"{type(module).__name__} does not take attn_implementation={implementation!r}: its attention does not go "
            "through HuggingFace's attention interface"
        )
    return str(config._attn_implementation)
