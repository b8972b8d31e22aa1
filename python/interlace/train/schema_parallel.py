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
    virtual: Positive = 1
    """Pipeline stages per rank: the module is cut into pp * virtual stages, which its pp ranks take in turn."""
    order: Literal["loop", "v"] = "loop"
    """How virtual stages follow each other. loop: from the first rank to the last, again and again; v: to the last rank
    and back to the first (virtual = 2)."""
    dp: Positive | None = None
    """Replicas of the module, by default ``parallel.dp``; each module spreads the samples of a step over its own."""
    shard: Literal["none", "optimizer", "full"] = "none"
    """What ranks with the same weights share out among them instead of each keeping all of it. none: nothing;
    optimizer: summed gradients and the optimizer's state; full: weights too, whole only while a step uses them."""
    shard_ranks: Positive | None = None
    """Among how many ranks each share is; by default all that have the same weights."""

    @model_validator(mode="after")
    def _turns(self) -> ModuleParallel:
        if self.order == "v" and self.virtual != 2:
            raise ValueError(f"order = 'v' goes down the ranks and up again: set virtual = 2, not {self.virtual}")
        return self

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


class LinkSpeed(Section):
    """How fast two ranks, or the ranks of a group, reach each other."""

    microseconds: Annotated[float, Field(ge=0.0, le=1e9)]
    """Until the first byte of a message has arrived."""
    gb_per_second: Annotated[float, Field(gt=0.0, le=1e6)]
    """10^9 bytes per second, of each rank."""


class LinkSpeeds(Section):
    """The links of a cluster, for `interlace plan` and `interlace simulate` where it is not at hand, and in place of
    what a run measures."""

    host: LinkSpeed
    """Between the ranks of a host."""
    network: LinkSpeed | None = None
    """Between hosts; by default as inside one."""
    ranks_per_host: Positive | None = None
    """Ranks on each host; by default all are on one."""


class Parallel(Section):
    """Which rank runs what, and [parallel.NAME] for how the encoder of that name is spread, by default as one stage."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, EncoderParallel] = Field(init=False)
    free: ClassVar[type[Section]] = EncoderParallel

    plan: Literal["auto"] | None = None
    """auto: measure, simulate and choose what this section leaves out (placement, degrees, shards, schedule), and of
    [train] what ``choose`` says; what is written here stays as it is. ``parallel = "auto"`` in the place of the
    section leaves all of it open. The choice and its reasons are in ``plan.lock`` of the run folder."""
    choose: list[Literal["batch_size", "microbatches", "activation_checkpointing"]] | None = None
    """Keys of [train] that plan = "auto" chooses, too; by default those of them that [train] does not give."""
    max_ranks: Positive | None = None
    """The most ranks that plan = "auto" may use; by default one for each GPU of the machine, or on CPUs one for each
    core, but at most 4. torchrun's processes are all used."""
    memory: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Memory that plan = "auto" may fill on each rank [GB, 10^9 bytes]; by default nine tenths of the GPU's, or of the
    rank's share of the host's."""
    placement: Literal["parallel", "colocated", "shared", "replicated", "chain"] | None = None
    """parallel: each encoder has ranks of its own; colocated: all encoders share the same ranks, stage by stage;
    shared: all modules run on the same ranks, one after the other, each with its own degrees; replicated: every rank
    of the language model runs all encoders; chain: the chain of all layers, encoders first, is cut into ``ranks``
    ranges of equal cost, the cut that ``interlace plan`` calls frozen-aware. By default each replica is one process,
    and colocated where a module has tp, cp, pp or dp of its own."""
    language_model: ModuleParallel = Field(default_factory=ModuleParallel)
    """How the language model is spread; by default it is one stage."""
    ranks: Positive | None = None
    """Ranks of one replica, where all modules have one dp; by default one for each stage that the placement makes. With
    fewer, neighbouring stages share a rank; 1 runs a replica in one process. A chain has no default."""
    dp: Positive | None = None
    """Replicas of every module that says nothing else; each takes its share of every batch. By default as many as
    torchrun's processes make; without torchrun 1."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zb_h1", "zb_h2", "zb_v", "auto"] = "1f1b"
    """Order of the chunks' forward and backward passes. interleaved: 1F1B for modules with ``virtual`` stages; zb_h1,
    zb_h2, zb_v: backwards in two halves, of which the second fills what would be idle, with the activations of 1F1B,
    about twice as many, and as many as 1F1B for ``order`` = 'v'; auto: the fastest that a search finds, by the counted
    cost of each stage."""
    activation_memory: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Memory for the activations of forwards whose backward is still to come, on each rank [GiB]: as many forwards run
    ahead as fit it. By default as many as the schedule has by itself."""
    sequence_parallel: bool = True
    """Inside the blocks of modules with tensor parallelism, each rank works on its part of the rows between the
    products: less memory for the same result. false keeps all rows on every rank."""
    context_order: Literal["lpt", "zigzag", "ring"] = "lpt"
    """Which tokens a context-parallel rank has: lpt balances attention under the batch's own mask, zigzag under a
    causal one, ring gives each rank neighbours."""
    ranks_per_node: Positive | None = None
    """So many ranks that follow each other are a node, and ``train.balance`` = "per_module" lets little travel between
    nodes; by default as torchrun starts them, or as ``links.ranks_per_host`` says."""
    links: LinkSpeeds | None = None
    """How fast ranks reach each other. With it, what they tell each other has a part in what is simulated."""
    timeout: Annotated[float, Field(ge=0.1, le=WEEK)] = 60.0
    """Seconds after which a rank that waits for a dead or hung one gives up, naming it. It also bounds how far apart
    ranks may start; one that fetches or decodes data is waited for as long as it gives signs of life."""
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Threads per rank; by default the machine's cores divided by the ranks on it. plan = "auto" also tries one process
    with one thread."""

    @property
    def auto(self) -> bool:
        """Whether the layout is yet to be chosen."""
        return self.plan == "auto"

    def module(self, name: str) -> ModuleParallel:
        """How the module `name` is spread."""
        return self.language_model if name == "language_model" else self.encoders().get(name, EncoderParallel())

    def encoders(self) -> dict[str, EncoderParallel]:
        """What the config says of encoders, by name."""
        return dict(self.__pydantic_extra__)

    def stages(self, name: str) -> int:
        """Pipeline stages of the module `name` that can each have a rank; see ``virtual``."""
        return self.module(name).pp

    @property
    def placed(self) -> str:
        """The placement, also where it is the default."""
        return self.placement or "colocated"

    @property
    def replica_ranks(self) -> int | None:
        """``ranks``, and 1 where nothing is said of how a replica is spread; None: one for each stage."""
        specs = [self.language_model, *self.encoders().values()]
        spread = self.placement is not None or any(
            spec.tp * spec.cp * spec.pp > 1 or spec.dp is not None for spec in specs
        )
        return self.ranks if spread or self.ranks is not None else 1

    def replicas(self, name: str) -> int:
        """Replicas of the module `name`."""
        dp = self.module(name).dp
        return self.dp or 1 if dp is None else dp

    def ranks_of(self, name: str) -> int:
        """Ranks of all stages of all replicas of the module `name`, each on ranks of its own."""
        spec = self.module(name)
        return spec.tp * spec.cp * spec.pp * self.replicas(name)

    @model_validator(mode="after")
    def _speaks_of_a_plan(self) -> Parallel:
        given = [key for key in ("choose", "max_ranks", "memory") if getattr(self, key) is not None]
        if given and not self.auto:
            raise ValueError(f"{given[0]} is for plan = 'auto': give that too, or leave {given[0]} out")
        return self

    def degrees(self, name: str) -> str:
        """The degrees of the module `name` in words."""
        spec = self.module(name)
        lane = "".join(f"{key} = {value}, " for key, value in (("tp", spec.tp), ("cp", spec.cp)) if value > 1)
        lane += f"virtual = {spec.virtual}, " if spec.virtual > 1 else ""
        return f"{lane}pp = {spec.pp}, dp = {self.replicas(name)}"
