"""Attention masks as bitfields: the rule, the mask and its constructors, conversions and pictures."""

from interlace.masks.mask import BitfieldMask, Segment
from interlace.masks.rule import (
    ATTENDS_MASK,
    CAUSAL,
    KEY_FIELDS,
    NEUTRAL,
    NO_WINDOW,
    OWN_SHIFT,
    QUERY_FIELDS,
    Tokens,
    filled,
    visible,
    word,
)

__all__ = [
    "ATTENDS_MASK",
    "CAUSAL",
    "KEY_FIELDS",
    "NEUTRAL",
    "NO_WINDOW",
    "OWN_SHIFT",
    "QUERY_FIELDS",
    "BitfieldMask",
    "Segment",
    "Tokens",
    "filled",
    "visible",
    "word",
]
