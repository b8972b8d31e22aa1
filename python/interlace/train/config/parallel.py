"""[parallel] of a training config: placement of the modules on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from interlace.train.config.base import WEEK, Positive, Section

if TYPE_CHECKING:
    from interlace.layout import ParallelSpec


class ModuleParallel(Section):
    """Distribution of one module over ranks: tp * cp ranks for each of the pp stages of each of its dp replicas."""

    tp: Positive = 1
    """Tensor parallelism: number of ranks that split the weights of each layer."""
    cp: Positive = 1
    """Context parallelism: number of ranks that split the tokens of a sequence."""
    pp: Positive = 1
    """Pipeline parallelism: number of stages of the module (see also ``virtual``)."""
    virtual: Positive = 1
    """Stages per pipeline rank: the module is split into pp * virtual stages, assigned to its pp ranks in turn."""
    order: Literal["loop", "v"] = "loop"
    """Assignment of virtual stages to ranks. loop: from the first rank to the last, repeatedly. v: to the last rank and
    back to the first; needs virtual = 2."""
    dp: Positive | None = None
    """Data parallelism: number of replicas of the module. Each module distributes the samples of a step over its own
    replicas. Default: ``parallel.dp``."""
    shard: Literal["none", "optimizer", "full"] = "none"
    """State sharded over the ranks that hold the same weights. none: every rank keeps all of it. optimizer: summed
    gradients and optimizer state are sharded. full: weights too; they are whole only while a step uses them."""
    shard_ranks: Positive | None = None
    """Number of ranks per sharding group, 2 or more; must divide the number of ranks with the same weights. Default:
    all of these. Needs ``shard`` = "optimizer" or "full"."""

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> ModuleParallel:
        self.spec(1)
        return self

    def spec(self, dp: int) -> ParallelSpec:
        """These degrees, with `dp` replicas. Raises ValueError for keys that do not fit each other."""
        from interlace.layout import ParallelSpec

        return ParallelSpec(**self.model_dump(exclude={"chunks"}) | {"dp": dp})


class EncoderParallel(ModuleParallel):
    """Distribution of an encoder over ranks, and its chunks per step."""

    chunks: Positive | None = None
    """Forward and backward passes of each replica per step. Default: ``train.microbatches``, or 1 with placement =
    "shared". Fewer, larger chunks use the device better, but the language model waits longer for features."""


class LinkSpeed(Section):
    """Latency and bandwidth between two ranks, or within a group of ranks."""

    microseconds: Annotated[float, Field(ge=0.0, le=1e9)]
    """Latency: time until the first byte of a message has arrived [microseconds]."""
    gb_per_second: Annotated[float, Field(gt=0.0, le=1e6)]
    """Bandwidth of each rank [GB/s, 10^9 bytes per second]."""


class LinkSpeeds(Section):
    """Link speeds of a cluster: ``host`` between ranks on one host, ``network`` between hosts (default: as ``host``).
    Used by `interlace plan` and `interlace simulate` away from the cluster, and in place of measured speeds in a
    run."""

    host: LinkSpeed
    """Between ranks on one host."""
    network: LinkSpeed | None = None
    """Between hosts. Default: as ``host``."""
    ranks_per_host: Positive | None = None
    """Ranks on each host. Default: all ranks are on one host."""


class Parallel(Section):
    """Placement of the modules on ranks. [parallel.NAME] distributes the encoder NAME, by default as one stage."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, EncoderParallel] = Field(init=False)
    free: ClassVar[type[Section]] = EncoderParallel

    layout: Literal["auto"] | None = None
    """auto: measure, simulate and choose all keys that this section leaves out (placement, degrees, shards, schedule),
    and the keys of [train] in ``choose``. Keys given here are kept. ``parallel = "auto"`` in place of the section
    leaves all of them open. The choice and its reasons are in ``layout.toml`` of the run folder."""
    choose: list[Literal["batch_size", "microbatches", "activation_checkpointing"]] | None = None
    """Keys of [train] that layout = "auto" also chooses. Default: those of them that [train] does not give. Needs
    layout = "auto"."""
    max_ranks: Positive | None = None
    """Maximum ranks that layout = "auto" may use. Default: one per GPU of the machine; on CPUs one per core, at most 4.
    Under torchrun all processes are used. Needs layout = "auto"."""
    memory: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Memory that layout = "auto" may fill on each rank [GB, 10^9 bytes]. Default: 90 % of the GPU's memory, or of the
    rank's share of host memory. Needs layout = "auto"."""
    placement: Literal["parallel", "colocated", "shared", "replicated", "chain"] | None = None
    """Ranks of the modules. parallel: each encoder has its own ranks. colocated: all encoders share the same ranks,
    stage by stage, and need equal degrees. shared: all modules run on the same ranks, one after the other, each with
    its own degrees; tp * cp * pp * dp must be equal. replicated: every rank of the language model runs all encoders
    whole; needs tp = cp = 1 and one dp for all. chain: the sequence of all layers, encoders first, is split into
    ``ranks`` ranges of equal cost ("frozen-aware" in ``interlace plan``); modules have no degrees or shards of their
    own. Default: one process per replica, or colocated if a module sets tp, cp, pp or dp."""
    language_model: ModuleParallel = Field(default_factory=ModuleParallel)
    """Distribution of the language model. Default: one stage."""
    ranks: Positive | None = None
    """Ranks per replica of the whole model. Default: one per stage of the placement. With fewer, neighbouring stages
    share a rank; 1 runs a replica in one process. Required for placement = "chain", not allowed for "shared". Needs tp
    = cp = 1 and the same dp for all modules."""
    dp: Positive | None = None
    """Replicas of every module without its own ``dp``; each takes its share of every batch. Default: as many as
    torchrun's processes allow, 1 without torchrun."""
    schedule: str = "1f1b"
    """Order of the chunks' forward and backward passes. gpipe: all forwards, then all backwards. interleaved: 1F1B for
    modules with ``virtual`` >= 2. zb_h1, zb_h2, zb_v: backward passes in two halves, the second of which fills idle
    time. Their activation memory: zb_h1 as 1F1B, zb_h2 about twice that, zb_v as 1F1B; zb_v needs ``virtual`` = 2 and
    ``order`` = "v" in a module. auto: the fastest schedule that a search finds, by the counted cost of each
    stage. "package.module:function": a generator of your own, see docs/extending.md."""
    activation_memory: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Memory per rank for the activations of forward passes whose backward pass is still pending [GiB]. As many forward
    passes run ahead as fit. Default: the schedule's own limit."""
    sequence_parallel: bool = True
    """Sequence parallelism: in modules with tp > 1, each rank of a block computes only its part of the rows between the
    matrix products. Less memory, same result. false: every rank keeps all rows."""
    context_order: Literal["lpt", "zigzag", "ring"] = "lpt"
    """Assignment of tokens to context-parallel ranks. lpt: balances attention under the batch's own mask. zigzag:
    balances it under a causal mask. ring: each rank gets neighbouring tokens."""
    ranks_per_node: Positive | None = None
    """Number of consecutive ranks that form a node. ``train.balance`` = "per_module" then sends little between nodes.
    Default: as torchrun starts them, or ``links.ranks_per_host``."""
    links: LinkSpeeds | None = None
    """Link speeds. If given, simulations include communication between ranks."""
    timeout: Annotated[float, Field(ge=0.1, le=WEEK)] = 60.0
    """Seconds until a rank that waits for a dead or hung peer aborts and names it. Also the maximum difference between
    the start times of ranks. A peer that fetches or decodes data may take longer while it shows signs of life."""
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Threads per rank. Default: the machine's cores divided by the ranks on it. layout = "auto" also evaluates one
    process with one thread."""

    @property
    def auto(self) -> bool:
        """True if the layout is still to be chosen."""
        return self.layout == "auto"

    def module(self, name: str) -> ModuleParallel:
        """Distribution of the module `name`."""
        return self.language_model if name == "language_model" else self.encoders().get(name, EncoderParallel())

    def encoders(self) -> dict[str, EncoderParallel]:
        """Configured distributions of encoders, by name."""
        return dict(self.__pydantic_extra__)

    @property
    def placed(self) -> str:
        """The placement, with the default filled in."""
        return self.placement or "colocated"

    @property
    def replica_ranks(self) -> int | None:
        """``ranks``; 1 if no distribution of a replica is configured; None: one rank per stage."""
        specs = [self.language_model, *self.encoders().values()]
        spread = self.placement is not None or any(
            spec.tp * spec.cp * spec.pp > 1 or spec.dp is not None for spec in specs
        )
        return self.ranks if spread or self.ranks is not None else 1

    def replicas(self, name: str) -> int:
        """Number of replicas of the module `name`."""
        dp = self.module(name).dp
        return self.dp or 1 if dp is None else dp

    def ranks_of(self, name: str) -> int:
        """Number of ranks of all stages of all replicas of the module `name`, without sharing."""
        return self.spec(name).ranks

    def spec(self, name: str) -> ParallelSpec:
        """Degrees of the module `name`."""
        return self.module(name).spec(self.replicas(name))

    @model_validator(mode="after")
    def _schedule_exists_and_limits_have_a_use(self) -> Parallel:
        from interlace.schedule.generators import generator_of

        if ":" not in self.schedule:  # a user's module is imported when the run starts
            generator_of(self.schedule)
        given = [key for key in ("choose", "max_ranks", "memory") if getattr(self, key) is not None]
        if given and not self.auto:
            raise ValueError(f"{given[0]} is for layout = 'auto': give that too, or leave {given[0]} out")
        return self

    def degrees(self, name: str) -> str:
        """Degrees of the module `name` as text."""
        spec = self.module(name)
        lane = "".join(f"{key} = {value}, " for key, value in (("tp", spec.tp), ("cp", spec.cp)) if value > 1)
        lane += f"virtual = {spec.virtual}, " if spec.virtual > 1 else ""
        return f"{lane}pp = {spec.pp}, dp = {self.replicas(name)}"
