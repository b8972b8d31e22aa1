"""Compares a FlexAttention mask_mod with a BitfieldMask, pair by pair, without a T x T array."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

if TYPE_CHECKING:
    from interlace.masks.mask import BitfieldMask, FlexMaskMod

CHUNK = 1 << 16  # pairs evaluated at a time


class FlexDifference(NamedTuple):
    """A pair on which a mask_mod and a BitfieldMask differ. bitfield, flex: True if that one shows the key."""

    batch: int
    head: int
    query: int
    key: int
    bitfield: bool
    flex: bool

    def __str__(self) -> str:
        sees, hides = ("the bitfield", "mask_mod") if self.bitfield else ("mask_mod", "the bitfield")
        return (
            f"query {self.query} sees key {self.key} in {sees} but not in {hides} (row {self.batch}, head {self.head})"
        )


def first_difference(
    mask: BitfieldMask, keys: BitfieldMask, mask_mod: FlexMaskMod, heads: int, samples: int | None, seed: int
) -> FlexDifference | None:
    """See BitfieldMask.differs_from_flex."""
    if heads < 1:
        raise ValueError(f"heads is {heads}; it must be at least 1")
    if samples is not None and samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1, or None for every pair")
    total = mask.batch * mask.length * keys.length
    count = total if samples is None else min(samples, total)
    bitfield = mask.to_flex(keys)
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        if count == total:
            pair = torch.arange(start, stop, device=mask.device)
        else:
            generator = torch.Generator().manual_seed(seed + start)
            pair = torch.randint(total, (stop - start,), generator=generator).to(mask.device)
        b, q, k = pair // (mask.length * keys.length), pair // keys.length % mask.length, pair % keys.length
        ours = bitfield(b, torch.zeros_like(b), q, k)
        theirs = _evaluate(mask_mod, heads, b, q, k)
        wrong = (theirs != ours.unsqueeze(1)).nonzero()
        if len(wrong):
            at, head = wrong[0].tolist()
            return FlexDifference(int(b[at]), head, int(q[at]), int(k[at]), bool(ours[at]), bool(theirs[at, head]))
    return None


def _evaluate(mask_mod: FlexMaskMod, heads: int, b: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """bool [n, heads]. A mask_mod takes scalars; FlexAttention's create_mask applies it to many pairs."""

    def listed(_: Tensor, head: Tensor, index: Tensor, __: Tensor) -> Tensor:
        return mask_mod(b[index], head, q[index], k[index])

    return create_mask(listed, 1, heads, b.numel(), 1, device=str(b.device))[0, :, :, 0].T
