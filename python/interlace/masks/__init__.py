"""Attention masks as bitfields: the rule, the mask and its constructors, conversions and pictures."""

from interlace.masks.mask import BitfieldMask, FlexMaskMod, Segment
from interlace.masks.rule import ATTENDS_MASK, CAUSAL, MAX_STREAM, NO_WINDOW, OWN_SHIFT, Tokens, visible, word

__all__ = [
    "ATTENDS_MASK",
    "CAUSAL",
    "MAX_STREAM",
    "NO_WINDOW",
    "OWN_SHIFT",
    "BitfieldMask",
    "FlexMaskMod",
    "Segment",
    "Tokens",
    "visible",
    "word",
]
