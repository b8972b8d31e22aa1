"""Sections and keys of a training config, typed.

There is one pydantic model per TOML section. The text under a field is its documentation and its pydantic
``description``. Values are checked strictly (``"100"`` is not a number) and unknown keys are rejected (`config.load`
names the nearest valid one). Checks that need the model library (architectures and the keys of their ``config``) are in
`build`.
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from interlace.train.config.base import LocalPath, NotNegative, Positive, Section
from interlace.train.config.data import Data
from interlace.train.config.log import Log
from interlace.train.config.model import Model
from interlace.train.config.parallel import EncoderParallel, Parallel
from interlace.train.config.resilience import Resilience
from interlace.train.config.train import Train

OPEN_REPLICAS = {"open_replicas": True}
"""Validation context if ``parallel.dp`` is not yet known: checks that depend on it are skipped."""


class Run(Section):
    """Name, folder, seed and device of a run."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the experiment; its runs are folders under ``<folder>/<name>/``. Letters, digits and ``._-``, first a
    letter or digit."""
    folder: LocalPath = "runs"
    """Folder that holds all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the random weights, the data order and all generators. On one machine, equal seeds give equal loss
    curves."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks. cuda: one GPU per rank. cpu: CPU cores. auto: cuda if the machine has a GPU for each of its
    ranks, else cpu."""
    deterministic: bool = True
    """Use only deterministic torch algorithms, so that runs repeat and resume bit for bit. On a GPU, torch lacks some
    of them, such as for interpolated position embeddings; it then warns and continues."""


class Checkpoint(Section):
    """Checkpoints: saved state of a run."""

    every: NotNegative = 100
    """Steps between two checkpoints. 0: only at the end and on SIGTERM."""
    keep: Positive = 2
    """Number of checkpoints to keep. Older ones are removed after a newer one is complete."""
    best: Literal["loss"] | None = None
    """loss: also keep the checkpoint with the lowest held-out loss, saved when the loss is measured. Answers and
    exports then use it. Needs ``train.validate_every`` > 0."""
    asynchronous: bool = True
    """Write in the background, from a copy in host memory. false: training waits, and no copy is made."""


class Config(Section):
    """A whole training config: one TOML file."""

    run: Run
    """Name, folder, seed and device."""
    model: Model
    """Model and its modules."""
    data: Data
    """Training and held-out data."""
    train: Train
    """Optimization."""
    parallel: Parallel = Field(default_factory=Parallel)
    """Placement on ranks."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Saved state."""
    log: Log = Field(default_factory=Log)
    """Metrics, traces and reports."""
    resilience: Resilience = Field(default_factory=Resilience)
    """Elastic training."""

    def modules(self) -> tuple[str, ...]:
        """Names of the configured modules, in the order that data uses."""
        return (*self.model.encoders(), "language_model")

    def chunks(self) -> dict[str, int]:
        """Encoder -> chunks per replica and step, if configured."""
        specs = {name: self.parallel.module(name) for name in self.model.encoders()}
        return {n: s.chunks for n, s in specs.items() if isinstance(s, EncoderParallel) and s.chunks is not None}

    def uniform(self) -> bool:
        """True if all modules have equally many replicas. The run then consists of replicas of the whole model."""
        return len({self.parallel.replicas(name) for name in self.modules()}) == 1

    def open_replicas(self) -> bool:
        """True if the number of torchrun's processes determines the number of replicas: ``parallel.dp`` is not given,
        and would apply to all modules."""
        return not self.parallel.auto and self.parallel.dp is None and self.uniform()

    def _counts_replicas(self, info: ValidationInfo) -> bool:
        """True if the number of replicas is known in this validation."""
        return not self.parallel.auto and (info.context != OPEN_REPLICAS or not self.open_replicas())

    def world_size(self) -> int:
        """Number of processes of the run: the ranks of all replicas of all modules."""
        parallel = self.parallel
        if parallel.replica_ranks is not None and self.uniform():
            return parallel.replica_ranks * parallel.replicas("language_model")
        encoders = [parallel.ranks_of(name) for name in self.model.encoders()]
        if parallel.placed in ("shared", "replicated"):
            encoders = []
        own = max(encoders, default=0) if parallel.placed == "colocated" else sum(encoders)
        return parallel.ranks_of("language_model") + own

    @model_validator(mode="after")
    def _modules_fit_the_placement(self) -> Config:
        from interlace.layout import ParallelSpec
        from interlace.layout.place import check_placement
        from interlace.schedule.generate import KINDS

        parallel, encoders = self.parallel, self.model.encoders()
        for name in parallel.encoders():
            if name not in encoders:
                near = difflib.get_close_matches(name, self.modules(), n=1)
                hint = f"; did you mean [parallel.{near[0]}]?" if near else ""
                raise ValueError(f"[parallel.{name}] speaks of an encoder that [model] does not have{hint}")
        if taken := [name for name in encoders if name in Parallel.model_fields]:
            raise ValueError(
                f"an encoder cannot be called {taken[0]!r}, which is a key of [parallel]: rename [model.*]"
            )
        if parallel.auto:  # the chosen layout is checked later
            return self
        specs = {name: parallel.spec(name) for name in self.modules()}
        if parallel.placed == "chain":
            if parallel.ranks is None:
                raise ValueError("placement 'chain' needs parallel.ranks, the number of ranges to cut the layers into")
            plain = ParallelSpec(dp=parallel.dp or 1)
            keys = [field.name for field in fields(ParallelSpec)]
            cut = [
                f"parallel.{name}.{key}"
                for name, spec in specs.items()
                for key in keys
                if getattr(spec, key) != getattr(plain, key)
            ]
            if cut:
                raise ValueError(
                    f"placement 'chain' cuts all layers into parallel.ranks = {parallel.ranks} ranges of equal cost, "
                    f"one to a rank, so no module has degrees or shards of its own; remove {', '.join(cut)}"
                )
        elif parallel.placed == "shared" and parallel.ranks is not None:
            raise ValueError("placement 'shared' takes its ranks from the degrees; remove parallel.ranks")
        else:
            try:
                check_placement(specs, parallel.placed, parallel.ranks)
            except ValueError as error:
                raise ValueError(f"[parallel]: {error}") from None
        order = KINDS[parallel.schedule].order if parallel.schedule in KINDS else ""
        has = {
            "loop": any(spec.virtual > 1 for spec in specs.values()),
            "v": any(spec.order == "v" for spec in specs.values()),
        }
        needs = {"loop": "virtual = 2 or more", "v": "virtual = 2 and order = 'v'"}
        if order and not has[order]:
            raise ValueError(
                f"parallel.schedule = {parallel.schedule!r} is for a module with {needs[order]}: give "
                "[parallel.language_model] these, or choose another schedule"
            )
        return self

    @model_validator(mode="after")
    def _work_fits_the_ranks(self, info: ValidationInfo) -> Config:
        parallel, train = self.parallel, self.train
        if parallel.auto:
            return self
        replicas = {name: parallel.replicas(name) for name in self.modules()}
        counts = {"language_model": train.microbatches} | dict.fromkeys(self.model.encoders(), 1) | self.chunks()
        named = {"language_model": "train.microbatches"} | {name: f"parallel.{name}.chunks" for name in self.chunks()}
        for name, count in counts.items():
            if self._counts_replicas(info) and train.batch_size < count * replicas[name]:
                what = f"{named[name]} = {count}" if name in named else "a chunk"
                raise ValueError(
                    f"train.batch_size = {train.batch_size} is too small for {what} on each of {replicas[name]} "
                    f"replicas of {name} (parallel.dp): each needs at least one sample"
                )
        rows = train.microbatches * replicas["language_model"]
        if self._counts_replicas(info) and self.data.pack and train.batch_size != rows:
            raise ValueError(
                f"with data.pack a batch is counted in rows, one per microbatch: train.batch_size = "
                f"{train.batch_size} must be train.microbatches * replicas of the language model (parallel.dp) "
                f"= {rows}"
            )
        return self

    @model_validator(mode="after")
    def _training_fits_schedule_and_data(self) -> Config:
        from interlace.schedule.generators import GENERATORS, splits_backward

        schedule = self.parallel.schedule
        if self.train.compile and splits_backward(schedule):
            whole = " or ".join(repr(name) for name in GENERATORS if not splits_backward(name))
            raise ValueError(
                f"parallel.schedule = {schedule!r} puts the gradients of weights off to the second half of a backward, "
                "which layers that are compiled (train.compile) cannot do, so that their second halves would be "
                f"empty: set parallel.schedule to {whole}, or train.compile to false"
            )
        if self.data.reading == "stream" and self.train.epochs is not None:
            raise ValueError(
                "train.epochs counts passes over the data, but how long a stream is nobody knows: set train.steps"
            )
        return self

    @model_validator(mode="after")
    def _samples_can_be_assigned(self) -> Config:
        assign = self.train.assign
        if assign == "tokens":
            return self
        if self.data.pack:
            raise ValueError(
                f"train.assign = {assign!r} spreads samples over microbatches, but with data.pack they are the rows of "
                "these: leave out data.pack, or set train.assign = 'tokens'"
            )
        if assign != "stratified" and self.chunks():
            name = next(iter(self.chunks()))
            raise ValueError(
                f"train.assign = {assign!r} says itself what the encoders' chunks are: leave out "
                f"parallel.{name}.chunks, or set train.assign = 'stratified'"
            )
        if assign != "stratified" and self.parallel.placed == "shared":
            raise ValueError(
                f"train.assign = {assign!r} defers samples from one encoder microbatch to the next, but with "
                "parallel.placement = 'shared' encoders run all samples first: set 'tokens' or 'stratified'"
            )
        return self

    @model_validator(mode="after")
    def _state_has_a_place(self, info: ValidationInfo) -> Config:
        if self.checkpoint.best is not None and not self.train.validate_every:
            raise ValueError(
                f"checkpoint.best = {self.checkpoint.best!r} goes by validations: set train.validate_every to the "
                "steps between two"
            )
        if self.train.offload_optimizer and self.run.device == "cpu":
            raise ValueError(
                "train.offload_optimizer = true moves the optimizer's state from a GPU to host memory, but with "
                "run.device = 'cpu' it is there already: leave the key out, or set run.device = 'cuda'"
            )
        profile, world, counts = self.log.profile, self.world_size(), self._counts_replicas(info)
        if counts and profile is not None and max(profile.ranks, default=0) >= world:
            raise ValueError(f"log.profile.ranks = {profile.ranks}, but the run has {world} ranks, from 0 on")
        if profile is not None and self.train.steps is not None and profile.start > self.train.steps:
            raise ValueError(f"log.profile.start = {profile.start}, but the run has {self.train.steps} steps")
        for name in self.modules():
            spec = self.parallel.module(name)
            alike = spec.cp * self.parallel.replicas(name)
            if self.parallel.placed == "replicated" and name != "language_model":
                alike *= self.parallel.ranks or self.parallel.language_model.pp  # a copy on every rank
            if counts and spec.shard_ranks is not None and alike % spec.shard_ranks:
                raise ValueError(
                    f"parallel.{name}.shard_ranks = {spec.shard_ranks}, but {alike} ranks hold the same weights of "
                    f"{name}: give a number that divides theirs, or leave it out for all"
                )
        return self
