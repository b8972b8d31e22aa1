"""UNSHARD, RESHARD and the REDUCE_GRAD of what is sharded: a rank keeps rows of weights that several ranks hold.

`Layout.shard_groups` says which ranks share the weights of which layers. Each of them owns some rows of every weight,
or of its piece of one where tensor parallelism has cut it, as a Parameter (`Weight.part`): what an optimizer trains,
and what is saved. Stages compute with the whole weight, which is gathered from the parts, and gradients are summed to
where their rows are owned: once per step, or layer by layer (`interlace.run.layers`), as the step's lists say. Once per
step ranks may run different numbers of chunks; in return a rank needs room for its stage's weights for as long as it
computes with them.

shard = "optimizer": whole weights stay, parts are views of their rows; a gather brings the rows that other ranks have
trained. shard = "full": whole weights are there from UNSHARD to RESHARD, or some of them at a time. Before and after
they read as NaN, and nothing can be copied into them: who computes with them then gets no plausible number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from interlace.comm.channel import Channel, Pending
from interlace.layout import Shard
from interlace.parallel.region import Region
from interlace.parallel.sending import sent
from interlace.run.errors import PipelineError
from interlace.run.gradients import buckets, present
from interlace.run.weights import Pieces


class Weight:
    """A weight of one rank that is spread over the owners of a shard.

    whole: what stages compute with, Parameter of the shape of the weight or of the rank's piece of it. rows: owner i
    has rows rows[i] to rows[i + 1] of its dimension 0. part: those at `place`; None if there are none. lies: where in
    the model's weight. source: the model's own, which is trained in place of the parts, where one process plays all.
    """

    def __init__(self, whole: nn.Parameter, rows: Sequence[int], place: int, cut: Region | None) -> None:
        self.whole, self.rows = whole, rows
        self._row = whole.numel() // max(rows[-1], 1)  # elements
        self.part: nn.Parameter | None = None
        self.lies: Region | None = None
        self.source: nn.Parameter | None = None
        start, stop = rows[place], rows[place + 1]
        if start < stop:
            region = Region.whole(whole.shape) if cut is None else cut
            self.lies = region.rows(start, stop) if whole.dim() else region
            self.part = nn.Parameter(self.owned(whole.data, place), requires_grad=whole.requires_grad)
        self._place = place
        self._gone: Tensor | None = None  # what the whole is after `leave`

    def owned(self, whole: Tensor, place: int) -> Tensor:
        """What the owner at `place` has of the weight, or of what has its shape: a view."""
        return whole.narrow(0, self.rows[place], self.count(place)) if whole.dim() else whole

    def count(self, place: int) -> int:
        """Rows of the owner at `place`."""
        return self.rows[place + 1] - self.rows[place]

    def shape(self, place: int) -> tuple[int, ...]:
        """The shape of what the owner at `place` has."""
        return (self.count(place), *self.whole.shape[1:]) if self.whole.dim() else ()

    def numel(self, place: int) -> int:
        """Elements of the owner at `place`."""
        return self.count(place) * self._row

    def leave(self) -> None:
        """Give up the whole."""
        self._gone = self.whole.data = self.gone()

    def gone(self) -> Tensor:
        """What stands for the whole where it is not: NaN at all places, which are one in memory."""
        return self.whole.detach().new_full((), torch.nan).expand(self.whole.shape)

    def appear(self) -> None:
        """Make room for the whole, at the place that it had since it was last given up, if it had one."""
        if self.absent:
            self.whole.data = torch.empty(self.whole.shape, dtype=self.whole.dtype, device=self.whole.device)
        elif self.vanished:
            self.whole.untyped_storage().resize_(self.whole.nbytes)

    def vanish(self) -> None:
        """Free the memory of the whole, which comes back to the same place: views that autograd has saved keep it."""
        self.whole.untyped_storage().resize_(0)

    @property
    def vanished(self) -> bool:
        """Whether the whole has a place, and no memory."""
        return self.whole.untyped_storage().nbytes() == 0

    @property
    def absent(self) -> bool:
        """Whether the whole is given up."""
        return self._gone is not None and self.whole.data_ptr() == self._gone.data_ptr()

    def follow(self) -> None:
        """Before a step: no gradient of one that failed, and what was moved or replaced since is followed."""
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
"""Weights that travel together, with the most elements that one owner has of them."""


class Sharded:
    """What one rank keeps of a shard.

    stages: (module, stage) of those of the rank that compute with its weights. weights: by their names in the model.
    place: among the owners; places: of the ranks, in ascending order. replicas: the ranks that keep the same. gathered:
    all of it, in buckets; summed: what is trained.
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
        """layers: name of a weight -> its layer. alike: names of weights that other ranks have too, in other shards,
        where slices must be the same."""
        self.shard, self.stages = shard, set(stages)
        self.place = shard.owners.index(rank)
        self.places = [shard.owners.index(owner) for owner in shard.ranks]
        self.replicas = shard.replicas(rank)
        self.weights: dict[str, Weight] = {}
        owners, turn = len(shard.owners), dict[int, int]()
        for name, whole in weights.items():
            each, more = divmod(whole.shape[0] if whole.dim() else 1, owners)
            # Rows that are over are dealt out in turn, from layer to layer by another one first: so slices are of one
            # size, and a weight's are the same whatever other layers the shard has.
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
        """What is sharded, in words."""
        return f"{self.shard.module} layers {self.shard.start} to {self.shard.stop}"

    def in_buckets(self, weights: Sequence[Weight]) -> list[Bucket]:
        """The weights in buckets."""
        by_whole = {id(weight.whole): weight for weight in weights}
        found = [[by_whole[id(p)] for p in bucket] for bucket in buckets([weight.whole for weight in weights])]
        return [(bucket, max(sum(weight.numel(i) for weight in bucket) for i in self.places)) for bucket in found]

    def keep_parts(self, pieces: Pieces | None) -> None:
        """From now on the rank has its parts. pieces: in what follows the model's own, where one process plays all."""
        for weight in self.weights.values():
            if pieces is not None:
                weight.source = pieces.spread(weight.whole, weight.part, self.place, weight.lies)
                weight.leave()  # the model's own lie in one place for all ranks, each of which gathers into its own
            elif self.shard.full:
                if weight.part is not None:
                    weight.part.data = weight.part.data.clone()
                weight.leave()

    @torch.no_grad()
    def start_gather(self, channel: Channel, gathered: Sequence[Bucket], key: str) -> Pending:
        """Begin to make weights whole; they are when `wait` returns."""
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
            sections = pending.pop(0).wait()  # and gone with the next: never much more than the weights twice
            for weight in bucket:  # only now: where the wait fails, nothing has memory without values
                weight.appear()
            _copy(
                (weight.owned(weight.whole.data, place), rows)
                for place, section in zip(self.places, sections, strict=True)
                for weight, rows in parts(bucket, place, section)
            )

    def follow(self) -> None:
        """Before a step: see `Weight.follow`. Raises PipelineError for a whole weight that no step would look at."""
        for name, weight in self.weights.items():
            if self.shard.full and weight.source is None and not weight.absent:
                raise PipelineError(
                    f"{name} was replaced in the model, but with shard = 'full' a step takes it from the rows that "
                    "ranks keep: copy new weights into named_parameters()"
                )
            weight.follow()

    def recover(self) -> None:
        """A step has failed: no weight is left without memory, for to read it would end the process."""
        for weight in self.weights.values():
            if weight.vanished:
                weight.leave()

    def leave(self) -> None:
        """RESHARD: give up the whole weights."""
        for weight in self.weights.values():
            weight.leave()

    @torch.no_grad()
    def start_scatter(self, channel: Channel, summed: Sequence[Bucket], key: str) -> list[tuple[list[Weight], Pending]]:
        """Begin to sum the gradients of whole weights over the owners, of each row where it is owned.

        `wait` gives the rows of the bucket's weights that are this rank's, one after the other, then for each weight
        how many ranks had a gradient of it.
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
            flat[:, width:] = sent(flags, flat.device)
            for weight in bucket:
                weight.whole.grad = None
            started.append((bucket, channel.start_reduce_scatter(flat, ranks, f"{key} {number}")))
        return started


class ShardedSum:
    """REDUCE_GRAD: the sums of gradients, of each row where it is owned.

    First over the owners of one set of slices, then over the sets. started: the former, see `Sharded.start_scatter`.
    Flags travel as in `interlace.run.gradients.Sum`.
    """

    def __init__(
        self, sharded: Sharded, channel: Channel, key: str, started: Sequence[tuple[list[Weight], Pending]]
    ) -> None:
        self._sharded, self._channel, self._key, self._started = sharded, channel, key, started

    def wait(self) -> None:
        """The sums are in `.grad` of the parts."""
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
    """The weights of which the owner at `place` has rows, with what of its section is theirs: views."""
    having = [weight for weight in bucket if weight.count(place)]
    starts = [0, *accumulate(weight.numel(place) for weight in having)]
    return [
        (weight, section[start:stop].view(weight.shape(place)))
        for weight, (start, stop) in zip(having, pairwise(starts), strict=True)
    ]


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to each first tensor its second."""
    if pairs := list(pairs):
        to, given = zip(*pairs, strict=True)
        torch._foreach_copy_(to, given)
