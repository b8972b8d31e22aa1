"""ParallelLayer: base class of layers whose parameters are sharded among ranks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from interlace.parallel.mappings import Ranks
from interlace.parallel.region import Box, Region


class ParallelLayer(nn.Module):
    """A shard of a whole layer's parameters. The weight has two dimensions.

    cut: parameter -> dimension along which it is sharded; other parameters are replicated.
    parts: number of equally large layers fused into this one. Each of them is sharded.
    ranks: the ranks that share the layer.
    sizes: of the weight of the whole layer.
    """

    cut: ClassVar[dict[str, int]]
    parts = 1
    ranks: Ranks
    sizes: tuple[int, int]

    def region(self, key: str) -> Region:
        """Position of this rank's shard of a parameter in the whole. Sizes differ by one if they cannot be equal."""
        shape = self.sizes if key == "weight" else self.sizes[:1]
        if key not in self.cut:
            return Region.full(shape)
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

    def piece(self, key: str, full: Tensor) -> Tensor:
        """This rank's shard of a parameter, of its gradient, or of optimizer state of its shape.

        A view, except for layers of several parts.
        """
        return self.region(key).piece(full)

    def gather(self, key: str, piece: Tensor) -> Tensor:
        """The whole parameter from all ranks' shards; the inverse of `piece`. Collective."""
        if key not in self.cut:
            return piece.detach()
        dim = self.cut[key]
        size = self.sizes[dim] // self.parts
        parts = [self.ranks.gather(part, dim, size) for part in piece.chunk(self.parts, dim)]
        return parts[0] if self.parts == 1 else torch.cat(parts, dim)

    def take(self, layer: nn.Module) -> None:
        """Copy this rank's shards of the parameters of `layer`. Keeps requires_grad and the training mode."""
        for key, parameter in layer.named_parameters():
            piece = self.piece(key, parameter.detach()).clone(memory_format=torch.contiguous_format)
            self.register_parameter(key, nn.Parameter(piece, parameter.requires_grad))
        self.train(layer.training)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key, parameter in self.named_parameters():
            value = state_dict.get(prefix + key)
            if value is not None and key in self.cut and value.shape != parameter.shape:
                if tuple(value.shape) == self.region(key).shape:  # otherwise nn.Module reports the mismatch
                    # A copy: with load_state_dict(assign=True) a view would keep the whole tensor alive.
                    state_dict[prefix + key] = self.piece(key, value).clone()
        super()._load_from_state_dict(state_dict, prefix, *args)
