"""[parallel] of a training config: which rank runs what, module by module."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from interlace.train.schema_base import WEEK, Positive, Section


class ModuleParallel(Section):
    """How one module is spread over ranks: tp * cp for each of the pp stages of each of its dp replicas."""

    tp: Positive = 1
    """Ranks among which the weights of each layer are cut (tensor parallelism)."""
    cp: Positive = 1
    """Ranks among which the tokens of a sequence are cut (context parallelism)."""
    pp: Positive = 1
    """Pipeline stages of the module."""
    dp: Positive | None = None
    """Replicas of the module, by default ``parallel.dp``; each module spreads the samples of a step over its own."""
    shard: Literal["none", "optimizer", "full"] = "none"
    """What ranks with the same weights share out among them instead of each keeping all of it. none: nothing;
    optimizer: summed gradients and the optimizer's state; full: weights too, whole only while a step uses them."""
    shard_ranks: Positive | None = None
    """Among how many ranks each share is; by default all that have the same weights."""

    @model_validator(mode="after")
    def _shares(self) -> ModuleParallel:
        if self.shard_ranks is not None and (self.shard == "none" or self.shard_ranks < 2):
            raise ValueError(
                f"shard_ranks = {self.shard_ranks} with shard = {self.shard!r} shares nothing: give 2 ranks or more "
                "and shard = 'optimizer' or 'full', or leave shard_ranks out"
            )
        return self


class EncoderParallel(ModuleParallel):
    """How an encoder is spread over ranks, and its share of a step over time."""

    chunks: Positive | None = None
    """Forward and backward passes of each replica in a step; by default as many as ``train.microbatches``, and 1 with
    placement 'shared'. Fewer and larger ones fill the device better; what the language model reads waits for them."""


class Parallel(Section):
    """Which rank runs what, and [parallel.NAME] for how the encoder of that name is spread, by default as one stage."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, EncoderParallel] = Field(init=False)
    free: ClassVar[type[Section]] = EncoderParallel

    placement: Literal["parallel", "colocated", "shared", "replicated", "chain"] = "colocated"
    """parallel: each encoder has ranks of its own; colocated: all encoders share the same ranks, stage by stage;
    shared: all modules run on the same ranks, one after the other, each with its own degrees; replicated: every rank
    of the language model runs all encoders; chain: the chain of all layers, encoders first, is cut into ``ranks``
    ranges of equal cost, the cut that ``interlace plan`` calls frozen-aware."""
    language_model: ModuleParallel = Field(default_factory=ModuleParallel)
    """How the language model is spread; by default it is one stage."""
    ranks: Positive | None = None
    """Ranks of one replica, where all modules have one dp; by default one for each stage that the placement makes. With
    fewer, neighbouring stages share a rank; 1 runs a replica in one process. A chain has no default."""
    dp: Positive = 1
    """Replicas of every module that says nothing else; each takes its share of every batch."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of the chunks' forward and backward passes."""
    sequence_parallel: bool = True
    """Inside the blocks of modules with tensor parallelism, each rank works on its part of the rows between the
    products: less memory for the same result. false keeps all rows on every rank."""
    context_order: Literal["lpt", "zigzag", "ring"] = "lpt"
    """Which tokens a context-parallel rank has: lpt balances attention under the batch's own mask, zigzag under a
    causal one, ring gives each rank neighbours."""
    timeout: Annotated[float, Field(ge=0.1, le=WEEK)] = 60.0
    """Seconds after which a rank that waits for a dead or hung one gives up, naming it. It also bounds how far apart
    ranks may start; one that fetches or decodes data is waited for as long as it gives signs of life."""
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Threads per rank; by default the machine's cores divided by the ranks on it."""

    def module(self, name: str) -> ModuleParallel:
        """How the module `name` is spread."""
        return self.language_model if name == "language_model" else self.encoders().get(name, EncoderParallel())

    def encoders(self) -> dict[str, EncoderParallel]:
        """What the config says of encoders, by name."""
        return dict(self.__pydantic_extra__)

    def stages(self, name: str) -> int:
        """Pipeline stages of the module `name`."""
        return self.module(name).pp

    def replicas(self, name: str) -> int:
        """Replicas of the module `name`."""
        dp = self.module(name).dp
        return self.dp if dp is None else dp

    def ranks_of(self, name: str) -> int:
        """Ranks of all stages of all replicas of the module `name`, each on ranks of its own."""
        spec = self.module(name)
        return spec.tp * spec.cp * spec.pp * self.replicas(name)

    def degrees(self, name: str) -> str:
        """The degrees of the module `name` in words."""
        spec = self.module(name)
        lane = "".join(f"{key} = {value}, " for key, value in (("tp", spec.tp), ("cp", spec.cp)) if value > 1)
        return f"{lane}pp = {spec.pp}, dp = {self.replicas(name)}"
