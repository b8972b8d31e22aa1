"""UNSHARD, RESHARD and REDUCE_GRAD of shards: a rank keeps some rows of weights that several ranks use.

`Layout.shard_groups` gives the ranks that share the weights of each range of layers. Each of them owns some rows of
every weight, or of its piece if tensor parallelism has cut the weight. The rows are a Parameter (`Weight.part`), which
the optimizer trains and checkpoints save. Stages compute with the whole weight, which is gathered from the parts.
Gradients are summed to the owners of their rows. Both happen once per step, or layer by layer
(`interlace.run.execute.layers`), as the step's lists specify. Once per step allows ranks to run different numbers of
chunks, but a rank then needs memory for all weights of a stage while it computes with them.

shard = "optimizer": whole weights stay in memory and parts are views of their rows; a gather fetches the rows that
other ranks have trained. shard = "full": whole weights exist only from UNSHARD to RESHARD, or only some of them at a
time. Outside of that time they read as NaN, and nothing can be copied into them. So a computation with them gives no
plausible number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from interlace.comm.channels.base import Channel, Pending
from interlace.layout import Shard
from interlace.parallel.region import Region
from interlace.parallel.sending import to_device
from interlace.run.errors import PipelineError
from interlace.run.execute.gradients import buckets, present
from interlace.run.execute.weights import Pieces


class Weight:
    """A weight of one rank that is sharded over the owners of a shard.

    whole: used by stages, Parameter of the shape of the weight or of the rank's piece of it. rows: owner i has rows
    rows[i] to rows[i + 1] of its dimension 0. part: the rows at `place`; None if it has none. lies: region of the part
    in the model's weight. source: the model's own parameter, which is trained in place of the parts if one process
    runs all ranks.
    """

    def __init__(self, whole: nn.Parameter, rows: Sequence[int], place: int, cut: Region | None) -> None:
        self.whole, self.rows = whole, rows
        self._row = whole.numel() // max(rows[-1], 1)  # elements
        self.part: nn.Parameter | None = None
        self.region: Region | None = None
        self.source: nn.Parameter | None = None
        start, stop = rows[place], rows[place + 1]
        if start < stop:
            region = Region.full(whole.shape) if cut is None else cut
            self.region = region.rows(start, stop) if whole.dim() else region
            self.part = nn.Parameter(self.owned(whole.data, place), requires_grad=whole.requires_grad)
        self._place = place
        self._placeholder: Tensor | None = None  # placeholder for the whole after `leave`

    def owned(self, whole: Tensor, place: int) -> Tensor:
        """The rows of the owner at `place`, of the weight or of a tensor of its shape: a view."""
        return whole.narrow(0, self.rows[place], self.count(place)) if whole.dim() else whole

    def count(self, place: int) -> int:
        """Rows of the owner at `place`."""
        return self.rows[place + 1] - self.rows[place]

    def shape(self, place: int) -> tuple[int, ...]:
        """Shape of the rows of the owner at `place`."""
        return (self.count(place), *self.whole.shape[1:]) if self.whole.dim() else ()

    def numel(self, place: int) -> int:
        """Elements of the owner at `place`."""
        return self.count(place) * self._row

    def leave(self) -> None:
        """Free the whole and put the placeholder in its place."""
        self._placeholder = self.whole.data = self.placeholder()

    def placeholder(self) -> Tensor:
        """Placeholder for the whole: NaN everywhere, one element in memory."""
        return self.whole.detach().new_full((), torch.nan).expand(self.whole.shape)

    def appear(self) -> None:
        """Allocate the whole; after `vanish` in the same storage object, so that saved views see it again."""
        if self.absent:
            self.whole.data = torch.empty(self.whole.shape, dtype=self.whole.dtype, device=self.whole.device)
        elif self.vanished:
            self.whole.untyped_storage().resize_(self.whole.nbytes)

    def vanish(self) -> None:
        """Free the memory of the whole but keep its storage object: views that autograd has saved refer to it."""
        self.whole.untyped_storage().resize_(0)

    @property
    def vanished(self) -> bool:
        """Whether the whole has a storage object without memory."""
        return self.whole.untyped_storage().nbytes() == 0

    @property
    def absent(self) -> bool:
        """Whether the placeholder stands for the whole."""
        return self._placeholder is not None and self.whole.data_ptr() == self._placeholder.data_ptr()

    def follow(self) -> None:
        """Before a step: drop gradients of a failed step, and follow weights that were moved or replaced."""
        self.whole.grad = None
        source = self.source
        if source is None:
            if self.part is not None and not self.absent:
                rows = self.owned(self.whole.data, self._place)
                if rows.data_ptr() != self.part.data_ptr() or rows.dtype is not self.part.dtype:
                    self.part.data = rows
        elif (source.device, source.dtype) != (self.whole.device, self.whole.dtype):
            self.whole.data = self.whole.data.to(source.device, source.dtype)


Bucket = tuple[list[Weight], int]
"""Weights that are sent together, and the most elements that one owner has of them."""


class Sharded:
    """One rank's part of a shard.

    stages: (module, stage) of the rank's stages that compute with its weights. weights: by their names in the model.
    place: of this rank among the owners; places: of all ranks, in ascending order. replicas: the ranks that keep the
    same rows. gathered: all weights, in buckets; summed: the trained ones.
    """

    def __init__(
        self,
        shard: Shard,
        rank: int,
        stages: Collection[tuple[str, int]],
        weights: Mapping[str, nn.Parameter],
        cut: Mapping[str, Region],
        layers: Mapping[str, int],
        alike: Collection[str],
    ) -> None:
        """layers: name of a weight -> its layer. alike: names of weights that other shards have too, where slices must
        be equal."""
        self.shard, self.stages = shard, set(stages)
        self.place = shard.owners.index(rank)
        self.places = [shard.owners.index(owner) for owner in shard.ranks]
        self.replicas = shard.replicas(rank)
        self.weights: dict[str, Weight] = {}
        owners, turn = len(shard.owners), dict[int, int]()
        for name, whole in weights.items():
            each, more = divmod(whole.shape[0] if whole.dim() else 1, owners)
            # Remaining rows go to the owners in turn, starting with another owner in each layer. So slices have equal
            # size, and those of a weight do not depend on the other layers of the shard.
            layer = layers[name]
            first = 0
            if name not in alike:
                first = turn.get(layer, layer)
                turn[layer] = first + more
            over = {(first + i) % owners for i in range(more)}
            counts = [each + (i in over) for i in range(owners)]
            self.weights[name] = Weight(whole, [0, *accumulate(counts)], self.place, cut.get(name))
        self.gathered = self.in_buckets(list(self.weights.values()))
        self.summed = self.in_buckets([weight for weight in self.weights.values() if weight.whole.requires_grad])

    @property
    def name(self) -> str:
        """Name for messages: the module and its layers."""
        return f"{self.shard.module} layers {self.shard.start} to {self.shard.stop}"

    def in_buckets(self, weights: Sequence[Weight]) -> list[Bucket]:
        """The weights in buckets."""
        by_whole = {id(weight.whole): weight for weight in weights}
        bucketed = [[by_whole[id(p)] for p in bucket] for bucket in buckets([weight.whole for weight in weights])]
        return [(bucket, max(sum(weight.numel(i) for weight in bucket) for i in self.places)) for bucket in bucketed]

    def keep_parts(self, pieces: Pieces | None) -> None:
        """Switch to parts. pieces: if one process runs all ranks, registers the parts to follow the model's own."""
        for weight in self.weights.values():
            if pieces is not None:
                weight.source = pieces.spread(weight.whole, weight.part, self.place, weight.region)
                weight.leave()  # all ranks share the model's own parameters; each gathers into a copy of its own
            elif self.shard.full:
                if weight.part is not None:
                    weight.part.data = weight.part.data.clone()
                weight.leave()

    @torch.no_grad()
    def start_gather(self, channel: Channel, gathered: Sequence[Bucket], key: str) -> Pending:
        """Start to gather whole weights; they are complete when `wait` returns."""
        pending = []
        for number, (bucket, width) in enumerate(gathered):
            mine = bucket[0].whole.new_zeros(width)
            if parts := [weight.part.reshape(-1) for weight in bucket if weight.part is not None]:
                flat = torch.cat(parts)
                mine[: len(flat)] = flat
            pending.append(channel.start_gather(mine, self.shard.ranks, f"{key} weights {number}"))
        return Pending(lambda: self._spread_out(gathered, pending))

    @torch.no_grad()
    def _spread_out(self, gathered: Sequence[Bucket], pending: list[Pending]) -> None:
        for bucket, _ in gathered:
            sections = pending.pop(0).wait()  # freed with the next bucket: bounds memory to about twice the weights
            for weight in bucket:  # only now: if the wait fails, no weight has memory without values
                weight.appear()
            _copy(
                (weight.owned(weight.whole.data, place), rows)
                for place, section in zip(self.places, sections, strict=True)
                for weight, rows in parts(bucket, place, section)
            )

    def follow(self) -> None:
        """Before a step: see `Weight.follow`. Raises PipelineError for a replaced whole weight: steps ignore it."""
        for name, weight in self.weights.items():
            if self.shard.full and weight.source is None and not weight.absent:
                raise PipelineError(
                    f"{name} was replaced in the model, but with shard = 'full' a step gathers it from the rows that "
                    "ranks keep: copy new weights into named_parameters()"
                )
            weight.follow()

    def recover(self) -> None:
        """After a failed step: leave no weight without memory, because reading it would crash the process."""
        for weight in self.weights.values():
            if weight.vanished:
                weight.leave()

    def leave(self) -> None:
        """RESHARD: free the whole weights."""
        for weight in self.weights.values():
            weight.leave()

    @torch.no_grad()
    def start_scatter(self, channel: Channel, summed: Sequence[Bucket], key: str) -> list[tuple[list[Weight], Pending]]:
        """Start to sum the gradients of whole weights: reduce-scatter, each row to its owner.

        `wait` returns this rank's rows of the bucket's weights, one after the other, then for each weight the number of
        ranks that had a gradient of it.
        """
        started = []
        for number, (bucket, width) in enumerate(summed):
            ranks = self.shard.ranks
            flat = bucket[0].whole.new_zeros(len(ranks), width + len(bucket))
            _copy(
                (rows, weight.owned(weight.whole.grad, place))
                for place, section in zip(self.places, flat, strict=True)
                for weight, rows in parts(bucket, place, section)
                if weight.whole.grad is not None
            )
            flags = torch.tensor([float(weight.whole.grad is not None) for weight in bucket], dtype=flat.dtype)
            flat[:, width:] = to_device(flags, flat.device)
            for weight in bucket:
                weight.whole.grad = None
            started.append((bucket, channel.start_reduce_scatter(flat, ranks, f"{key} {number}")))
        return started


class ShardedSum:
    """REDUCE_GRAD: the sums of gradients, each row on its owner.

    First over the owners of one set of slices, then over the sets. started: the former, see `Sharded.start_scatter`.
    Flags are sent as in `interlace.run.execute.gradients.Sum`.
    """

    def __init__(
        self, sharded: Sharded, channel: Channel, key: str, started: Sequence[tuple[list[Weight], Pending]]
    ) -> None:
        self._sharded, self._channel, self._key, self._started = sharded, channel, key, started

    def wait(self) -> None:
        """Wait for the sums and put them in `.grad` of the parts."""
        sharded, channel, ranks = self._sharded, self._channel, self._sharded.replicas
        sums = [(bucket, pending.wait()) for bucket, pending in self._started]
        over_sets = [channel.start_all_reduce(mine, ranks, f"{self._key} sets {i}") for i, (_, mine) in enumerate(sums)]
        for pending in over_sets:
            pending.wait()
        flags = iter(present([mine[-len(bucket) :] for bucket, mine in sums]))
        for bucket, mine in sums:
            given = dict(zip(bucket, flags))
            for weight, rows in parts(bucket, sharded.place, mine):
                assert weight.part is not None
                weight.part.grad = rows if given[weight] else None
        self._started = []


def parts(bucket: Sequence[Weight], place: int, section: Tensor) -> list[tuple[Weight, Tensor]]:
    """The weights of which the owner at `place` has rows, each with its rows in `section`: views."""
    having = [weight for weight in bucket if weight.count(place)]
    starts = [0, *accumulate(weight.numel(place) for weight in having)]
    return [
        (weight, section[start:stop].view(weight.shape(place)))
        for weight, (start, stop) in zip(having, pairwise(starts), strict=True)
    ]


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first."""
    if pairs := list(pairs):
        to, given = zip(*pairs, strict=True)
        torch._foreach_copy_(to, given)
