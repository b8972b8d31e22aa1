"""Collectives of weights: gathers of sharded weights (UNSHARD, UNSHARD_LAYERS), and sums of gradients (REDUCE_GRAD).

Actions only start them. Gathers are awaited by the first forward that uses the weights, or layer by layer. Sums are
awaited at the end of the list; sums of tied weights are made from them then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from interlace.comm.channels.base import Channel, Pending
from interlace.layout import Reduction
from interlace.run.execute.device import Mark, mark
from interlace.run.execute.gradients import Sum
from interlace.run.execute.layers import LayerByLayer, Layers
from interlace.run.execute.sharding import Sharded, ShardedSum
from interlace.run.execute.step import Key


class Collectives:
    """The collectives of one rank's weights in one step.

    reductions: of the graph. parameters: a reduction -> the parameters of this rank that it sums. sharded: place in the
    graph's shards -> this rank's part of the shard; layers: the same key -> the layers of a shard that may be gathered
    layer by layer. by_layer: stages whose weights are gathered so in this step.
    """

    def __init__(
        self,
        channel: Channel,
        reductions: Sequence[Reduction],
        parameters: Callable[[Reduction], Sequence[nn.Parameter]],
        sharded: Mapping[int, Sharded],
        layers: Mapping[int, Layers],
    ) -> None:
        self._channel, self._reductions, self._parameters = channel, reductions, parameters
        self._sharded, self._layers = sharded, layers
        self.by_layer: dict[Key, LayerByLayer] = {}
        self._gathers: dict[int, Pending] = {}
        self._sums: dict[int, Sum | ShardedSum] = {}
        self._tied: list[int] = []  # sums of sums: waiting for those at once could block a rank that they need

    def unshard(self, _module: str, _stage: int, _chunk: int, number: int, *_: int) -> None:
        """UNSHARD: start to gather whole weights."""
        sharded = self._sharded[number]
        self._gathers[number] = sharded.start_gather(self._channel, sharded.gathered, sharded.name)

    def unshard_layers(self, key: Key, number: int, late: Collection[int]) -> None:
        """UNSHARD_LAYERS: gather the weights of stage `key` layer by layer; late: see `LayerByLayer`."""
        self.by_layer[key] = LayerByLayer(self._layers[number], self._channel, late)

    def reshard(self, _module: str, _stage: int, _chunk: int, number: int, *_: int) -> None:
        """RESHARD: free the whole weights."""
        if number in self._gathers:  # no forward of this rank has awaited it
            self._gathers.pop(number).wait()
        self._sharded[number].leave()

    def reduce(self, _module: str, _stage: int, _chunk: int, number: int, *_: int) -> None:
        """REDUCE_GRAD: start a sum."""
        if self._reductions[number].tied >= 0:
            self._tied.append(number)
        else:
            self._sums[number] = self._sum(number)

    def gathered(self, key: Key) -> None:
        """Wait for the weights of stage `key`."""
        for number in [n for n in self._gathers if key in self._sharded[n].stages]:
            self._gathers.pop(number).wait()

    def finish(self, device: torch.device) -> dict[int, Mark]:
        """Wait for all gathers and sums, including those of tied weights; returns when each sum ended."""
        done: dict[int, Mark] = {}
        for gather in self._gathers.values():
            gather.wait()
        self._await_sums(done, device)
        self._sums = {number: self._sum(number) for number in self._tied}
        self._await_sums(done, device)
        self._sums = {}
        return done

    def end(self) -> None:
        """End of the step, also after a failure: drop the sums."""
        for by_layer in self.by_layer.values():
            by_layer.end()
        self.by_layer.clear()
        self._sums.clear()

    def _await_sums(self, done: dict[int, Mark], device: torch.device) -> None:
        for number, pending in self._sums.items():
            pending.wait()
            done[number] = mark(device)

    def _sum(self, number: int) -> Sum | ShardedSum:
        reduction = self._reductions[number]
        key = f"{reduction.module} layers {reduction.start} to {reduction.stop}"
        key += " tied" * (reduction.tied >= 0) + " in part" * reduction.in_part
        for sharded in self._sharded.values() if reduction.tied < 0 and not reduction.in_part else ():
            if (sharded.shard.module, sharded.shard.start) == (reduction.module, reduction.start):
                by_layer = self.by_layer.get(min(sharded.stages))  # by layer: the shard has only this stage
                started = by_layer.sums() if by_layer else sharded.start_scatter(self._channel, sharded.summed, key)
                return ShardedSum(sharded, self._channel, key, started)
        return Sum(self._parameters(reduction), reduction.ranks, self._channel, key)
