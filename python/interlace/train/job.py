"""Job: training of one rank, made in named steps.

    device -> model -> data -> folder -> parallel model of a layout -> feed -> trainer

A fixed run (`train.rank`) takes each step once. An elastic run (`train.elastic`) repeats the parallel model and the
trainer in each generation; the other parts live as long as the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from interlace.layout import Layout
from interlace.model import MultimodalModel
from interlace.run.options import StepOptions
from interlace.run.parallel_model import ParallelModel
from interlace.train import device as devices
from interlace.train import offload, runfolder
from interlace.train.checkpoint.base import Stored
from interlace.train.config.load import ConfigError
from interlace.train.config.sections import Config
from interlace.train.data.feed import Feed, datasets
from interlace.train.data.feed_stream import StreamFeed
from interlace.train.data.producers import producers_of
from interlace.train.data.texts import tokenizer_of
from interlace.train.launch import launcher, lock
from interlace.train.models.build import build, stored_weights
from interlace.train.observers.base import Observer, Outputs
from interlace.train.progress import Membership
from interlace.train.report.facts import facts_of
from interlace.train.report.page import Page
from interlace.train.report.trackers import Trackers
from interlace.train.trainer import Trainer

if TYPE_CHECKING:
    from interlace.data import Tokenizer


class Job:
    """Training of one rank. Each step makes the attributes that the later ones use; errors are ConfigErrors.

    config: with the values of open settings, once they are known. source: names the config in messages. membership:
    of the present generation. lock: of the run folder, on rank 0. close_channel: closes the channel of the newest
    parallel model, if it has one. `cleanup` ends what the steps have started.
    """

    kind: str
    device: torch.device
    tokenizer: Tokenizer
    model: MultimodalModel
    stored: Stored
    train_data: Any
    held_out: Any
    folder: Path
    parallel: ParallelModel
    layout: Layout
    feed: Feed
    trackers: Trackers
    trainer: Trainer

    def __init__(self, config: Config, source: str, cleanup: contextlib.ExitStack, membership: Membership) -> None:
        self.config, self.source, self.cleanup, self.membership = config, source, cleanup, membership
        self.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
        self.lock: lock.RunLock | None = None
        self.close_channel: Callable[[], None] = lambda: None

    def choose_device(self) -> None:
        """Kind of device of all ranks of this node."""
        self.kind = devices.choose(self.config.run.device, self.local_world, source=self.source)
        if self.config.train.offload_optimizer:
            offload.check_device(self.kind, source=self.source)

    def take_device(self, local_rank: int) -> None:
        """This rank's device."""
        self.device = devices.take(self.kind, local_rank, deterministic=self.config.run.deterministic)

    def prepare_torch(self) -> None:
        """Number of threads, and seed."""
        torch.set_num_threads(self.config.parallel.threads or launcher.default_threads(self.local_world))
        torch.manual_seed(self.config.run.seed)

    def make_model(self) -> None:
        """The model, without memory for its weights, and the function that finds its stored weights."""
        self.tokenizer = tokenizer_of(self.config, source=self.source)
        self.model = build(self.config, self.tokenizer, source=self.source)
        self.stored = cache(partial(stored_weights, self.config, self.model, source=self.source))

    def make_data(self) -> None:
        """Training and held-out data."""
        self.train_data, self.held_out = datasets(self.config, self.model, self.tokenizer, source=self.source)

    def prints(self) -> str:
        """Fingerprints of the data, which are the same on all ranks."""
        return f"{self.train_data.fingerprint()} {self.held_out.fingerprint()}"

    def find_folder(self, ranks: runfolder.Gathering, resume: str | None, *, take_over: bool = False) -> Path | None:
        """Rank 0 makes the run folder (or finds the one to resume), locks it and sends its path. Collective.

        Returns the checkpoint that `resume` names, if it names one.
        """
        names: list[str] = []
        held = None
        if ranks.rank == 0:
            try:
                config = self.config
                places = (runfolder.create(config), None) if resume is None else runfolder.resolve(config, resume)
                names = [str(place.absolute()) for place in places if place is not None]
                held = lock.take(places[0], take_over=take_over, say=launcher.note)
            except ConfigError as error:
                names = ["", str(error)]
        try:
            folder, *at = ranks.gather("finding the run folder", names)[0]
        except BaseException:
            if held is not None:
                held.release()
            raise
        if not folder:
            raise ConfigError(at[0])
        self.folder = Path(folder)
        if held is not None:
            self.lock = held
        return Path(at[0]) if at else None

    def make_parallel(
        self, model: MultimodalModel, layout: Layout, options: StepOptions, *, coordinated: bool = False
    ) -> None:
        """This rank's share of `model`. coordinated: as in `parallelize`. Collective."""
        from interlace.run import parallelize

        transport = "distributed" if layout.world > 1 else "local"
        self.parallel = parallelize(
            model, layout, transport=transport, device=self.device, coordinated=coordinated, options=options
        )
        self.layout = layout
        if self.parallel.channel is not None:
            self.close_channel = self.parallel.channel.close

    def make_feed(self) -> None:
        """Samples for the newest parallel model, and the steps of ``train.epochs``. Collective for streams."""
        config = self.config
        producers = producers_of(config, self.folder, self.local_world, source=self.source)
        if config.data.reading == "stream":
            self.feed = StreamFeed(config, self.train_data, self.held_out, self.parallel, producers)
        else:
            pinned = self.kind != "cpu"
            self.feed = Feed.of_config(
                config, self.train_data, self.held_out, self._wanted, producers=producers, pinned=pinned
            )
        self.cleanup.callback(self.feed.close)
        if config.data.reading == "random":
            self.config = with_steps(config, self.feed.loader.batches, source=self.source)

    def _wanted(self, batch: list[Any]) -> list[Any]:
        """Media of a batch that this rank reads. Called by the thread that reads ahead."""
        rows, train = len(batch) if self.config.data.pack else 0, self.config.train
        microbatches = self.membership.microbatches(rows, train.microbatches)
        return self.parallel.wanted(batch, microbatches=microbatches, chunks=self.config.chunks())

    def make_trainer(self, outputs: Outputs, further: Sequence[Observer] = ()) -> None:
        """The trainer of the newest parallel model. Collective, unless `membership` has peers."""
        self.trainer = Trainer(
            self.config,
            self.parallel.mllm,
            self.parallel,
            self.feed,
            outputs,
            self.membership,
            stored=self.stored,
            further=further,
        )

    def page(self) -> Page:
        """The page of the run."""
        return Page(self.folder, self.config, facts_of(self.parallel.mllm, self.layout))


def with_steps(config: Config, batches: Callable[[int], int], *, source: str = "config") -> Config:
    """The config with the number of steps of its epochs. batches: number of batches of an epoch.

    Raises ConfigError if the number is 0, or less than the warm-up or log.profile.start.
    """
    train = config.train
    if train.epochs is None:
        return config
    whole = int(train.epochs)
    steps = sum(batches(epoch) for epoch in range(whole))
    if train.epochs > whole:
        steps += round((train.epochs - whole) * batches(whole))
    where = f"{source}: [train] epochs = {train.epochs:g} of this data make steps = {steps}"
    return settled(config, "train", {"steps": steps, "epochs": None}, where)


def settled(config: Config, section: str, values: dict[str, int | None], where: str) -> Config:
    """The config with values of a section that were left open. Validates all of it, since sections refer to each other.

    Raises ConfigError, which begins with `where`.
    """
    try:
        return Config.model_validate(config.model_dump() | {section: getattr(config, section).model_dump() | values})
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise ConfigError(f"{where}: {why}") from None


def say_trained(config: Config, model: MultimodalModel) -> None:
    """Logs the trained parameters and their rates."""
    from interlace.train.models.tuning import rates, summary

    for line in summary(model, rates(config, model)):
        launcher.note(line)
