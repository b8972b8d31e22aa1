"""A layer of whose parameters each rank has a piece, and where that lies in the whole."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interlace.parallel.mappings import Ranks
from interlace.parallel.region import Box, Region


class ParallelLayer(nn.Module):
    """A piece of the parameters of a whole layer, whose weight has two dimensions.

    cut: parameter -> dimension along which ranks share it; others are whole everywhere. parts: layers of one size that
    are one layer, each of which is cut. ranks: among whom. sizes: of the weight of the whole.
    """

    cut: ClassVar[dict[str, int]]
    parts = 1
    ranks: Ranks
    sizes: tuple[int, int]

    def region(self, key: str) -> Region:
        """Where this rank's part of a parameter lies in the whole. Parts that cannot be equal differ by one."""
        shape = self.sizes if key == "weight" else self.sizes[:1]
        if key not in self.cut:
            return Region.whole(shape)
        dim = self.cut[key]
        size = shape[dim] // self.parts
        counts = self.ranks.counts(size)
        boxes = []
        for part in range(self.parts):
            first = part * size + sum(counts[: self.ranks.rank])
            offsets = tuple(first if i == dim else 0 for i in range(len(shape)))
            lengths = tuple(counts[self.ranks.rank] if i == dim else length for i, length in enumerate(shape))
            boxes.append(Box(offsets, lengths))
        return Region(shape, tuple(boxes), dim)

    def piece(self, key: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter (or of its gradient, or of an optimizer's state of its shape).

        A view, but for layers of several parts.
        """
        return self.region(key).piece(whole)

    def put(self, key: str, whole: Tensor, piece: Tensor) -> None:
        """Write this rank's part into the whole, as `piece` takes it out; other ranks' parts stay as they are."""
        self.region(key).put(whole, piece)

    def whole(self, key: str, piece: Tensor) -> Tensor:
        """The inverse of `piece`. Collective."""
        if key not in self.cut:
            return piece.detach()
        dim = self.cut[key]
        size = self.sizes[dim] // self.parts
        parts = [self.ranks.gather(part, dim, size) for part in piece.chunk(self.parts, dim)]
        return parts[0] if self.parts == 1 else torch.cat(parts, dim)

    def take(self, whole: nn.Module) -> None:
        """Have copies of this rank's pieces of the parameters of `whole`; frozen where they are, in its mode."""
        for key, parameter in whole.named_parameters():
            piece = self.piece(key, parameter.detach()).clone(memory_format=torch.contiguous_format)
            self.register_parameter(key, nn.Parameter(piece, parameter.requires_grad))
        self.train(whole.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key, parameter in self.named_parameters():
            given = state_dict.get(prefix + key)
            if given is not None and key in self.cut and given.shape != parameter.shape:
                if tuple(given.shape) == self.region(key).shape:  # else nn.Module says what does not fit
                    # A copy, since load_state_dict(assign=True) would keep the whole alive behind a view.
                    state_dict[prefix + key] = self.piece(key, given).clone()
        super()._load_from_state_dict(state_dict, prefix, *args)
