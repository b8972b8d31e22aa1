"""Messages between lanes: activations and their gradients, each rank's part of them.

All ranks of a lane share a message. Each sends or receives a part of it. The forward or backward that uses the message
joins the parts (`Messages.joined`): the checker has proved that all ranks of the lane run it together, which is not
true of a RECV.

With context parallelism a rank has a share of the rows between the stages of a module. It sends this share to the rank
at its place in the next lane. The output of an encoder is whole on all ranks of its lane. Each rank that reads it
receives only its own rows, a region of the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from interlace.comm.channels.base import Channel, Part, Tag
from interlace.parallel import Ranks
from interlace.parallel.route import pairs, parts_of_regions, rows_per_receiver
from interlace.run.errors import PipelineError
from interlace.run.execute.step import Arrived, Key, Message, StageRuntime, Step
from interlace.run.lanes import Place
from interlace.schedule import StageGraph
from interlace.schedule.actions import CODES, Op

RECV = CODES[Op.RECV]


class Messages:
    """The messages of one rank in one step. stages: those of the rank."""

    def __init__(
        self, rank: int, stages: Mapping[Key, StageRuntime], graph: StageGraph, channel: Channel, step: Step
    ) -> None:
        self._rank, self._stages, self._channel, self._step = rank, stages, channel, step
        self._modules, self._lanes = graph.modules, [lane.ranks for lane in graph.layout.lanes()]
        self._arrived: dict[Message, Arrived] = {}
        self._kept: dict[Tag, Part] = {}  # sent by this rank in one lane to itself in another
        self._crossing: dict[int, set[Tag]] = {}  # rank -> messages that it sends here over several pairs of lanes

    def expect(self, actions: Sequence[Sequence[int]]) -> None:
        """Find the ranks that send here over several pairs of lanes: order is kept within a pair, not between pairs."""
        if all(len(ranks) == 1 for ranks in self._lanes):
            return
        expected: dict[int, dict[tuple[int, Ranks], set[Tag]]] = {}
        for op, number, stage, chunk, other, peer, grad in actions:
            if op == RECV:
                tag = Tag(self._modules[number], stage, chunk, other, bool(grad))
                lane = self._place(tag, receives=True).lane
                for sender in self._senders(lane, peer):
                    expected.setdefault(sender, {}).setdefault((peer, lane), set()).add(tag)
        self._crossing = {
            rank: set().union(*by_lane.values()) for rank, by_lane in expected.items() if len(by_lane) > 1
        }

    def send(self, tag: Tag, tensor: Tensor, peer: int) -> None:
        """Start to send this rank's parts of a message to lane `peer`. tensor: its rows of the message."""
        place, others = self._place(tag, receives=False), self._lanes[peer]
        lane, cp = place.lane, place.cp
        regions = self._regions(tag, tensor.shape[-2] * cp.world, cp.world)
        rows, first = sum(regions), sum(regions[: cp.rank]) if tag.grad or tag.other == tag.chunk else 0
        for part in parts_of_regions(regions, lane.world, len(others), receives=not tag.grad):
            if part.sender == lane.rank:
                piece, rank = tensor.narrow(-2, part.start - first, part.stop - part.start), others[part.receiver]
                if rank == self._rank:
                    self._kept[tag] = Part(piece, rows)
                else:
                    self._channel.send(piece, rank, tag, rows)

    def receive(self, tag: Tag, peer: int) -> None:
        """Wait for this rank's part of a message from lane `peer`."""
        place, others = self._place(tag, receives=True), self._lanes[peer]
        lane = place.lane
        received = [
            self._kept.pop(tag)
            if rank == self._rank
            else self._channel.receive_part(rank, tag, self._crossing.get(rank, ()))
            for rank in self._senders(lane, peer)
        ]
        mine = received[0].tensor if len(received) == 1 else torch.cat([part.tensor for part in received], -2)
        rows = received[0].rows
        regions = self._regions(tag, rows, place.cp.world)
        due = rows_per_receiver(parts_of_regions(regions, len(others), lane.world, receives=not tag.grad), lane.world)
        if (mine.shape[-2], rows) != (due[lane.rank], sum(regions)):
            raise PipelineError(
                f"received {mine.shape[-2]} rows of {rows}, expected {due[lane.rank]} of {sum(regions)}: install the "
                "same version of Interlace on all ranks"
            )
        self._arrive(tag, mine, place, due)

    def keep_shared(self, tag: Tag, gradient: Tensor) -> None:
        """Keep this rank's part of a gradient whose producer and reader are on its own lane.

        gradient: of the rows that this context-parallel rank reads; the ranks of the lane join their parts.
        """
        regions = self._step.routes.between(tag.chunk, tag.other).regions
        place, reader = self._place(tag, receives=True), self._place(tag, receives=False)
        parts = parts_of_regions(regions, place.lane.world, place.lane.world, receives=False)
        mine, first = parts[place.lane.rank], sum(regions[: reader.cp.rank])
        piece = gradient.narrow(0, mine.start - first, mine.stop - mine.start)
        self._arrive(tag, piece, place, rows_per_receiver(parts, place.lane.world))

    def __contains__(self, message: Message) -> bool:
        return message in self._arrived

    def joined(self, message: Message) -> Tensor:
        """A message that has arrived, gathered from the ranks that share it. Collective among them."""
        mine, among, counts = self._arrived.pop(message)
        return among.gather_rows(mine, counts) if among.world > 1 else mine

    def _arrive(self, tag: Tag, mine: Tensor, place: Place, counts: Sequence[int]) -> None:
        """Keep the received part of a message until it is used; counts: rows that each rank of the lane has of it."""
        among = place.lane
        if tag.other == tag.chunk or not tag.grad:  # each context-parallel rank needs only its own region
            among, first = place.tp, place.cp.rank * place.tp.world
            counts = counts[first : first + place.tp.world]
        self._arrived[(*tag[:4], int(tag.grad))] = Arrived(mine, among, counts)

    def _place(self, tag: Tag, *, receives: bool) -> Place:
        """The place at which this rank sends or receives the message of `tag`."""
        if receives == tag.grad:  # at the stage that made the activation
            return self._stages[tag[:2]].place
        between_stages = tag.other == tag.chunk
        reader = (tag.module, tag.stage + 1) if between_stages else (self._step.ends[tag.other][0], 0)
        return self._stages[reader].place

    def _regions(self, tag: Tag, rows: int, cp: int) -> tuple[int, ...]:
        """The rows that each context-parallel rank has of a message of `rows`; cp: ranks between stages of a module."""
        if tag.other != tag.chunk:
            return self._step.routes.between(tag.chunk, tag.other).regions
        return (rows // cp,) * cp

    def _senders(self, lane: Ranks, peer: int) -> list[int]:
        """The ranks of lane `peer` that send to this place in `lane`, in the order of their rows."""
        others = self._lanes[peer]
        return [others[sender] for sender, receiver in pairs(len(others), lane.world) if receiver == lane.rank]
