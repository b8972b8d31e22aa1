"""A layer of whose parameters each rank has a piece, and where that lies in the whole."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interlace.parallel.mappings import Ranks


class ParallelLayer(nn.Module):
    """A piece of the parameters of a whole layer, whose weight has two dimensions.

    cut: parameter -> dimension along which ranks share it; others are whole everywhere. parts: layers of one size that
    are one layer, each of which is cut. ranks: among whom. sizes: of the weight of the whole.
    """

    cut: ClassVar[dict[str, int]]
    parts = 1
    ranks: Ranks
    sizes: tuple[int, int]

    def spans(self, key: str) -> list[tuple[int, int]]:
        """Where this rank's piece of a cut parameter lies in the whole, along the dimension `cut[key]`.

        (start, stop) in each of the layer's parts, in their order; the piece has these one after the other. Pieces
        that cannot be equal differ by one, the larger ones first.
        """
        size = self.sizes[self.cut[key]] // self.parts
        counts = self.ranks.counts(size)
        start = sum(counts[: self.ranks.rank])
        return [(part * size + start, part * size + start + counts[self.ranks.rank]) for part in range(self.parts)]

    def piece(self, key: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter (or of its gradient, or of an optimizer's state of its shape).

        A view, but for layers of several parts.
        """
        if key not in self.cut:
            return whole
        pieces = self._pieces(key, whole)
        return pieces[0] if self.parts == 1 else torch.cat(pieces, self.cut[key])

    def put(self, key: str, whole: Tensor, piece: Tensor) -> None:
        """Write this rank's part into the whole, as `piece` takes it out; other ranks' parts stay as they are."""
        if key not in self.cut:
            whole.copy_(piece)
            return
        for to, part in zip(self._pieces(key, whole), piece.chunk(self.parts, self.cut[key]), strict=True):
            to.copy_(part)

    def _pieces(self, key: str, whole: Tensor) -> list[Tensor]:
        """Views of this rank's piece of each part of the whole."""
        return [whole.narrow(self.cut[key], start, stop - start) for start, stop in self.spans(key)]

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
                expected = list(parameter.shape)
                expected[self.cut[key]] = self.sizes[self.cut[key]]
                if list(given.shape) == expected:  # else nn.Module says what does not fit
                    # A copy, since load_state_dict(assign=True) would keep the whole alive behind a view.
                    state_dict[prefix + key] = self.piece(key, given).clone()
        super()._load_from_state_dict(state_dict, prefix, *args)
