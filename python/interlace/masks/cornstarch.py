"""Conversion of Cornstarch's bitfield words, in both dialects, to words of BitfieldMask. Public API: from_cornstarch.

A Cornstarch word states only what a token sees; what the token *is* is implied. BitfieldMask separates the two (ATTENDS
and OWN). So each kind of key gets its own stream, and each query attends the streams of the keys that it saw. In both
dialects visibility depends only on the words, and a batch has few distinct words. So the work is done once per distinct
word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interlace.masks.rule import MAX_STREAM, word

MODALITY_BITS = (1 << 62) - 1
DIALECTS = ("causal_bit", "text_bit")


def convert(field: Tensor, dialect: str) -> tuple[Tensor, Tensor | None]:
    """Cornstarch words int64 [B, T] -> (bits int64 [B, T], doc int32 [B, T] or None when nothing is padding)."""
    if dialect not in DIALECTS:
        raise ValueError(f"dialect is {dialect!r}; it must be one of {', '.join(DIALECTS)}")
    if not isinstance(field, Tensor) or field.dtype != torch.int64 or field.dim() != 2:
        got = f"{field.dtype} {list(field.shape)}" if isinstance(field, Tensor) else type(field).__name__
        raise TypeError(f"field must be an int64 tensor of shape [batch, length], got {got}")
    distinct, inverse = torch.unique(field, return_inverse=True)
    translate = _causal_bit if dialect == "causal_bit" else _text_bit
    table = translate(distinct.tolist())
    bits = torch.tensor(table, dtype=torch.int64, device=field.device)[inverse]
    padding = field & MODALITY_BITS == 0
    if not bool(padding.any()):
        return bits, None
    return bits, torch.where(padding, -1, 0).to(torch.int32)


def _causal_bit(words: list[int]) -> list[int]:
    """Dissertation 3.4.2: bit 63 = causal, the others = modalities seen, bit 0 = text."""
    named = [_bits(value) for value in words]
    stream = _assign([(bit,) for bits in named for bit in bits])
    table = []
    for value, bits in zip(words, named, strict=True):
        if len(bits) > 1 and 0 not in bits:
            raise ValueError(
                f"word {value & (2**64 - 1):#x} sees modalities {bits} but not text, so the modality of its token is "
                "ambiguous: build BitfieldMask(bits) with interlace.masks.word(own, attends) instead"
            )
        # Bit 0 marks text. Any other token names just one modality. In both cases the lowest bit is its own.
        table.append(word(stream[(bits[0],)], [stream[(b,)] for b in bits], causal=value < 0) if bits else 0)
    return table


def _text_bit(words: list[int]) -> list[int]:
    """2025 papers and code: bit 0 = text (causal, sees any shared bit); others see words equal to their own."""
    named = [tuple(_bits(value)) for value in words]
    stream = _assign([(0,), *(bits for bits in named if bits and 0 not in bits)])
    table = []
    for bits in named:
        if 0 in bits:
            seen = [number for key, number in stream.items() if set(key) & set(bits)]
            table.append(word(0, seen, causal=True))
        else:
            table.append(word(stream[bits], [stream[bits]]) if bits else 0)
    return table


def _bits(value: int) -> list[int]:
    return [bit for bit in range(62) if value >> bit & 1]


def _assign(keys: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """One stream per key: single bits up to 55 keep their number; all others get the lowest free numbers."""
    distinct = sorted(set(keys))
    numbers: dict[tuple[int, ...], int] = {key: key[0] for key in distinct if len(key) == 1 and key[0] <= MAX_STREAM}
    free = iter(n for n in range(MAX_STREAM + 1) if n not in set(numbers.values()) and n != 0)
    for key in distinct:
        if key not in numbers:
            free_number = next(free, None)
            if free_number is None:
                raise ValueError(f"{len(distinct)} kinds of tokens do not fit in {MAX_STREAM + 1} streams")
            numbers[key] = free_number
    return numbers
