"""The ranks of this process: their weights, their connections, and the execution of a step's lists on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from interlace.comm.channels.base import Channel
from interlace.comm.channels.local import LocalChannel, LocalNetwork
from interlace.comm.transports import Transport
from interlace.comm.transports.local import LocalHub, LocalTransport
from interlace.model import MultimodalModel
from interlace.run.errors import PipelineError, as_pipeline_errors
from interlace.run.execute.device import current, drawn_since, generators
from interlace.run.execute.ranks import make_ranks
from interlace.run.execute.sharding import Sharded
from interlace.run.execute.step import Step
from interlace.run.execute.weights import Pieces
from interlace.run.graph import edges, groups
from interlace.run.lanes import groups_of
from interlace.run.options import StepOptions
from interlace.schedule import Schedule, StageGraph


class Process:
    """One rank of several processes (`own`), or all ranks (own: None; channel: None).

    rows: modules whose rows are cut, see `make_ranks`. device: of weights on meta that the ranks hold.
    """

    def __init__(
        self,
        mllm: MultimodalModel,
        graph: StageGraph,
        numbers: Sequence[int],
        options: StepOptions,
        rows: Collection[str],
        channel: Channel | None,
        device: torch.device,
    ) -> None:
        self._graph, self._timeout, self.channel = graph, options.timeout, channel
        self.pieces = Pieces()
        self.ranks = make_ranks(mllm, graph, numbers, options.checkpointing, rows, self.pieces, device)
        self.own = None if channel is None else self.ranks[numbers[0]]
        self._lanes = groups_of(graph.layout)
        self._through: Callable[[Transport], Transport] | None = None
        if channel is not None:
            with as_pipeline_errors():
                channel.add_groups(groups(graph))
                channel.add_edges(edges(graph))
                self._connect(numbers[0], channel)

    def connect_lanes(self, through: Callable[[Transport], Transport]) -> None:
        """See `ParallelModel.connect_lanes`."""
        self._through = through
        if self.channel is not None:
            self._connect(next(iter(self.ranks)), self.channel)

    def _connect(self, number: int, channel: Channel) -> None:
        """Connect a rank with those of its lanes."""
        transports = channel.connect(self._lanes)
        if self._through is not None:
            transports = {ranks: self._through(transport) for ranks, transport in transports.items()}
        self.ranks[number].connect(transports)

    def item_transports(self) -> dict[int, Transport]:
        """See `ParallelModel.item_transports`."""
        if self.channel is None:
            hub = LocalHub(self._graph.layout.world)
            return {number: LocalTransport(number, hub, timeout=self._timeout) for number in self.ranks}
        with as_pipeline_errors():
            return dict.fromkeys(self.ranks, self.channel.connect_all())

    def refresh(self) -> None:
        """Before a step: update pieces and shards from the model's own parameters, and drop their gradients."""
        self.pieces.refresh()
        for sharded in self._sharded():
            sharded.follow()

    def set_shared_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Remove gradients of earlier steps from shared parameters: they are sums over ranks already."""
        kept = []
        shared = {rank for reduction in self._graph.reductions for rank in reduction.ranks}
        for number in shared & self.ranks.keys():
            for parameter in self.ranks[number].own.values():
                if parameter.grad is not None:
                    kept.append((parameter, parameter.grad))
                    parameter.grad = None
        return kept

    def execute(self, schedule: Schedule, steps: Mapping[int, Step], digest: int, device: torch.device) -> None:
        """Run the list of each rank. digest: of the inputs, see `Channel.begin`."""
        if self.channel is not None:
            (number,) = self.ranks
            with current(device):
                self.ranks[number].executor(self.channel, steps[number]).run(schedule.of_rank(number))
            return
        states = generators(device)
        network = LocalNetwork(self._graph.layout.world, self._timeout)
        channels = {number: LocalChannel(number, network, device=device) for number in self.ranks}

        def play(number: int) -> None:
            channels[number].begin(digest)
            self._connect(number, channels[number])
            executor = self.ranks[number].executor(channels[number], steps[number])
            # Ranks that wait for each other need a backward in this thread: autograd has one thread of its own per GPU.
            own_thread = self._lanes or self._graph.shards
            with current(device), torch.autograd.set_multithreading_enabled(False) if own_thread else nullcontext():
                executor.run(schedule.of_rank(number))

        if len(self.ranks) == 1:
            play(next(iter(self.ranks)))
            return
        try:
            run_threads(list(self.ranks), play, lambda number, reason: channels[number].leave(reason))
        finally:
            for channel in channels.values():
                channel.close()
        if drawn_since(states, device):
            raise PipelineError(
                "the model draws random numbers (dropout?), and ranks that are threads of one process share one "
                "generator: set its dropout to 0, use a layout of world 1, or start a process per rank"
            )

    def recover(self) -> None:
        """After a failed step: leave shards in a valid state."""
        for sharded in self._sharded():
            sharded.recover()

    def _sharded(self) -> list[Sharded]:
        return [sharded for rank in self.ranks.values() for sharded in rank.sharded.values()]


def run_threads(ranks: Sequence[int], play: Callable[[int], None], leave: Callable[[int, str], object]) -> None:
    """Run play(rank) in a thread for each rank. After all have ended, raises the error of the first rank that failed
    by itself, not because of another rank.

    leave(rank, reason): reports the failure of a rank to the ranks that wait for it.
    """
    errors: list[tuple[int, BaseException]] = []
    grad = torch.is_grad_enabled()  # one per thread

    def main(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                play(rank)
        except BaseException as error:
            errors.append((rank, error))
            leave(rank, f"it raised {type(error).__name__}: {str(error)[:300]}")

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # The first failure makes the other ranks fail too: its error is the cause.
        causes = [e for _, e in errors if not (isinstance(e, PipelineError) and "lost rank" in str(e))]
        raise (causes or [errors[0][1]])[0]
