"""The sections and keys of a training config, typed.

One pydantic model per TOML section; the text under a field is its documentation and pydantic's ``description`` of it.
Values are checked strictly (``"100"`` is not a number) and unknown keys are refused (`config.load` names the nearest
valid one). What needs the model library to check, the keys of a HuggingFace ``config`` table, is checked in `build`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST = 2**31 - 1  # of anything that is counted
WEEK = 7 * 86_400.0
Positive = Annotated[int, Field(gt=0, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, le=1e6)]


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, field docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True)


class Run(Section):
    """Where a run lives and what makes it repeatable."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the experiment; its runs are folders under ``<folder>/<name>/``."""
    folder: str = "runs"
    """Folder that holds all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the random weights, the data order and every generator; one seed, one loss curve (on one machine)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the ranks compute on. cuda: each on a GPU of its own; cpu: on the cores; auto: cuda where there is a GPU for
    every rank of the machine, else cpu."""
    deterministic: bool = True
    """Ask torch for deterministic algorithms only, so that runs repeat and resume bit for bit. On a GPU, where torch
    lacks one, such as for interpolated position embeddings, it warns and goes on."""


class Encoder(Section):
    """One modality's encoder and the projector that maps its features to the language model's width."""

    family: Literal["siglip", "clip", "whisper"]
    """HuggingFace architecture: siglip and clip for vision, whisper (its encoder half) for audio. With a ``path`` it is
    read there."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of the family's HuggingFace config class that differ from its defaults."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Folder that HuggingFace's ``save_pretrained`` wrote: the weights to start from (by default random ones), and
    family and config where no family is given. Each rank reads what it holds; the projector starts at random."""
    projector: Literal["linear", "mlp"] = "mlp"
    """What maps encoder features to the language model's hidden size."""
    downsample: Positive = 1
    """So many encoder tokens per side (vision) or in time (audio) become one language model token."""
    freeze: bool = False
    """Keep the encoder's weights as they are (its projector still trains)."""
    freeze_projector: bool = False
    """Keep the projector's weights as they are."""
    lr: Rate | None = None
    """Peak learning rate of the encoder; by default ``train.lr``."""
    projector_lr: Rate | None = None
    """Peak learning rate of the projector; by default the encoder's."""
    weight_decay: Rate | None = None
    """Decoupled weight decay of encoder and projector; by default ``train.weight_decay``."""


class LanguageModel(Section):
    """The language model that reads text and the encoders' features."""

    family: Literal["llama", "qwen2"]
    """HuggingFace architecture of the causal language model. With a ``path`` it is read there."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of the family's HuggingFace config class that differ from its defaults; ``vocab_size`` follows the
    tokenizer unless given."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Folder that HuggingFace's ``save_pretrained`` wrote: the weights to start from (by default random ones), and
    family and config where no family is given. Each rank reads what it holds."""
    freeze: bool = False
    """Keep the language model's weights as they are."""
    lr: Rate | None = None
    """Peak learning rate; by default ``train.lr``."""
    weight_decay: Rate | None = None
    """Decoupled weight decay; by default ``train.weight_decay``."""


class Model(Section):
    """The multimodal model: any of the encoders, and a language model."""

    vision: Encoder | None = None
    """The image encoder; without this table the model sees no images."""
    audio: Encoder | None = None
    """The speech encoder; without this table the model hears nothing."""
    language_model: LanguageModel
    """The language model; the only module that must exist."""

    def encoders(self) -> dict[str, Encoder]:
        """The configured encoders by module name, in the order of their streams."""
        return {name: spec for name in ("vision", "audio") if (spec := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _families(self) -> Model:
        if self.vision is not None and self.vision.family == "whisper":
            raise ValueError("vision.family is 'whisper', which hears; use 'siglip' or 'clip'")
        if self.audio is not None and self.audio.family != "whisper":
            raise ValueError(f"audio.family is {self.audio.family!r}, which sees; use 'whisper'")
        return self


class Mixture(Section):
    """Relative weights of the kinds of samples drawn from the stamps; 0 leaves a kind out."""

    image: Rate = 0.25
    """One picture, answer its caption."""
    speech: Rate = 0.15
    """A spoken description, answer it in writing, in the language of the speech."""
    image_speech: Rate = 0.15
    """A picture and the speech about it, answer the caption."""
    images: Rate = 0.1
    """Several pictures, answer all their captions."""
    text: Rate = 0.1
    """A caption, answer it in another language."""
    category: Rate = 0.15
    """One picture, answer the folder that it lies in, such as "animals"."""
    language: Rate = 0.1
    """A spoken description, answer the code of its language."""


class Data(Section):
    """What the model learns from."""

    dataset: Literal["stamps", "digits"]
    """stamps: Debian's Tux Paint stamps (images, speech, captions in many languages), fetched on first use, or the
    digits when they cannot be had; digits: scikit-learn's handwritten digits, image -> "seven"."""
    cache: str | None = None
    """Folder for fetched files and decoded items; by default ``$INTERLACE_CACHE``, else ``~/.cache/interlace``."""
    mixture: Mixture = Field(default_factory=Mixture)
    """Weights of the kinds of samples (stamps); kinds whose encoder the model lacks are left out."""
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    """Language codes of captions and speech to use, such as ``["en", "fr"]``; by default the ten with most speech."""
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Fraction of the stamps (with all their languages), or of the digits, that is never trained on."""
    max_image_tokens: Positive = 64
    """Most patches of one image, before the encoder's ``downsample`` divides them."""
    on_too_large: Literal["downscale", "error"] = "downscale"
    """What happens to an image over its budget: scaled down keeping its aspect, or an error that names it."""
    max_images: Annotated[int, Field(ge=2, le=MOST)] = 3
    """Most pictures in a sample with several."""
    max_audio_seconds: Annotated[float, Field(gt=0.0, le=WEEK)] = 6.0
    """Longer clips are skipped and counted."""
    max_caption_bytes: Positive = 160
    """Longer captions are skipped and counted."""
    digit_size: Positive | None = None
    """Side in pixels to which the 8 x 8 digits are enlarged; by default the patch size, at least 8 (digits)."""
    digit_jitter: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """Strength of random distortions of the training digits, new in every epoch; 1 moves them by up to half a pixel,
    turns them by up to 8 degrees and stretches them by up to 10 % (digits)."""


class Train(Section):
    """The optimisation."""

    steps: Positive
    """Optimizer steps of the whole run."""
    batch_size: Positive
    """Samples per step, over all microbatches of all replicas."""
    microbatches: Positive = 1
    """Into how many microbatches each replica of the language model cuts a step; the pipeline fills with them."""
    lr: Rate = 1e-3
    """Peak learning rate of modules that name none of their own."""
    min_lr_ratio: Fraction = 0.1
    """The cosine ends at this fraction of the peak."""
    warmup_steps: NotNegative = 20
    """Steps of linear warm-up from 0 to the peak."""
    schedule_steps: Positive | None = None
    """Steps after which the learning rate has come down to its minimum, where it stays; by default ``train.steps``. A
    run that goes on for more steps than it was begun with has to say whether its rate keeps to the old plan."""
    weight_decay: Rate = 0.05
    """Decoupled weight decay; never applied to norms, biases and other vectors."""
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0.0, le=1e6)] = 1e-8
    """AdamW's denominator offset."""
    clip_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradients are scaled down to this global norm; ``inf`` leaves them as they are."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory and compute the update there: GPUs then hold weights and gradients alone. For
    ranks on GPUs."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs matrix products under autocast; weights, gradients and their sums, the loss and optimizer state stay
    fp32."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """What backward computes again instead of keeping it. none: nothing; full: each layer, of which its input is kept;
    selective: only what is cheap, as the results of matrix products and of attention are kept, too."""
    validate_every: NotNegative = 100
    """Steps between two measurements of the held-out loss; 0 measures it only at the end."""
    validation_samples: Positive = 64
    """How many held-out samples a measurement takes."""

    @property
    def recompute(self) -> bool:
        """Whether layers with a backward take another forward. What "selective" repeats (norms, activations, additions)
        is counted as nothing: its matrix products are kept."""
        return self.activation_checkpointing == "full"

    @model_validator(mode="after")
    def _fits(self) -> Train:
        if self.microbatches > self.batch_size:
            raise ValueError(
                f"microbatches = {self.microbatches} is more than batch_size = {self.batch_size}; "
                "a microbatch needs at least one sample"
            )
        name = "steps" if self.schedule_steps is None else "schedule_steps"
        if self.warmup_steps > getattr(self, name):
            raise ValueError(f"warmup_steps = {self.warmup_steps} is more than {name} = {getattr(self, name)}")
        return self


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
    """Which rank runs what."""

    placement: Literal["parallel", "colocated", "shared", "replicated", "chain"] = "colocated"
    """parallel: each encoder has ranks of its own; colocated: all encoders share the same ranks, stage by stage;
    shared: all modules run on the same ranks, one after the other, each with its own degrees; replicated: every rank
    of the language model runs all encoders; chain: the chain of all layers, encoders first, is cut into ``ranks``
    ranges of equal cost, the cut that ``interlace plan`` calls frozen-aware."""
    vision: EncoderParallel | None = None
    """How the vision encoder is spread; by default it is one stage."""
    audio: EncoderParallel | None = None
    """How the audio encoder is spread; by default it is one stage."""
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
        spec: ModuleParallel | None = getattr(self, name)
        return ModuleParallel() if spec is None else spec

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


class Checkpoint(Section):
    """Saved state of a run."""

    every: NotNegative = 100
    """Steps between two checkpoints; 0 saves only at the end and on SIGTERM."""
    keep: Positive = 2
    """How many checkpoints stay; older ones are removed after a newer one is complete."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in host memory. false: training waits, and no copy is made."""


class Log(Section):
    """What a run tells."""

    every: Positive = 10
    """Steps between two lines of metrics."""
    tensorboard: bool = True
    """Write TensorBoard event files next to metrics.jsonl."""
    trace_step: NotNegative = 20
    """The step whose measured actions become trace.json and timeline.png; 0 measures none."""
    samples: NotNegative = 16
    """How many held-out samples the page samples.html shows."""
    max_new_tokens: Positive = 48
    """Longest generated answer on the page and in the accuracy, in tokens."""
    accuracy_samples: NotNegative = 512
    """At most so many held-out questions of each kind with one right answer (digits, category, language) are answered
    at the end, with their media and with those of another sample, to count the right answers; 0 counts none."""


class Config(Section):
    """A whole training config: one TOML file."""

    run: Run
    """Where the run lives."""
    model: Model
    """What is trained."""
    data: Data
    """What it learns from."""
    train: Train
    """How it learns."""
    parallel: Parallel = Field(default_factory=Parallel)
    """Which rank runs what."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Saved state."""
    log: Log = Field(default_factory=Log)
    """What the run tells."""

    def modules(self) -> tuple[str, ...]:
        """The configured modules in the order in which data takes them."""
        return (*self.model.encoders(), "language_model")

    def chunks(self) -> dict[str, int]:
        """Chunks per replica and step of the encoders that say how many."""
        specs = {name: getattr(self.parallel, name) for name in self.model.encoders()}
        return {name: spec.chunks for name, spec in specs.items() if spec is not None and spec.chunks is not None}

    def uniform(self) -> bool:
        """Whether all modules have equally many replicas, so that the run is made of replicas of the whole model."""
        return len({self.parallel.replicas(name) for name in self.modules()}) == 1

    def world_size(self) -> int:
        """Processes of the whole run: the ranks of all replicas of all modules."""
        parallel = self.parallel
        ranks = {name: parallel.ranks_of(name) for name in self.modules()}
        if parallel.ranks is not None and self.uniform():
            return parallel.ranks * parallel.replicas("language_model")
        encoders = [ranks[name] for name in self.model.encoders()]
        if parallel.placement in ("shared", "replicated") or not encoders:
            return ranks["language_model"]
        return ranks["language_model"] + (max(encoders) if parallel.placement == "colocated" else sum(encoders))

    def _stage_groups(self) -> int:
        """Stages of one replica of the whole model that can each have a rank."""
        parallel = self.parallel
        encoders = [parallel.stages(name) for name in self.model.encoders()]
        language_model = parallel.stages("language_model")
        if parallel.placement == "replicated" or not encoders:
            return language_model
        return language_model + (sum(encoders) if parallel.placement == "parallel" else max(encoders))

    @model_validator(mode="after")
    def _modules_fit_the_placement(self) -> Config:
        parallel, encoders = self.parallel, self.model.encoders()
        for name in ("vision", "audio"):
            if name not in encoders and getattr(parallel, name) is not None:
                raise ValueError(f"[parallel.{name}] speaks of an encoder that [model] does not have")
        stages = {name: parallel.stages(name) for name in self.modules()}
        replicas = {name: parallel.replicas(name) for name in self.modules()}
        lanes = {degree: {n: getattr(parallel.module(n), degree) for n in self.modules()} for degree in ("tp", "cp")}
        if parallel.placement == "chain":
            if parallel.ranks is None:
                raise ValueError("placement 'chain' needs parallel.ranks, the number of ranges to cut the layers into")
            keys = {"tp", "cp", "pp", "shard", "shard_ranks"}
            given = {n: parallel.module(n).model_dump(include=keys, exclude_defaults=True) for n in self.modules()}
            cut = [f"parallel.{name}.{key}" for name, own in given.items() for key in own]
            cut += [f"parallel.{name}.dp" for name, dp in replicas.items() if dp != parallel.dp]
            if cut:
                raise ValueError(
                    f"placement 'chain' cuts all layers into parallel.ranks = {parallel.ranks} ranges of equal cost, "
                    f"one to a rank, so no module has degrees or shards of its own; remove {', '.join(cut)}"
                )
        if parallel.placement == "colocated":
            for degree, values in (("pp", stages), ("dp", replicas), *lanes.items()):
                theirs = {name: values[name] for name in encoders}
                if len(set(theirs.values())) > 1:
                    raise ValueError(
                        f"colocated encoders share their ranks stage by stage, so all need the same {degree}, not "
                        f"{theirs}; make them equal or set parallel.placement = 'parallel'"
                    )
        if parallel.placement == "replicated":
            for degree, values in lanes.items():
                if any(value != 1 for value in values.values()):
                    raise ValueError(
                        f"replicated encoders run on every single rank of the language model, so {degree} must be 1 "
                        f"everywhere, not {values}; set parallel.placement = 'parallel'"
                    )
            if any(stages[name] != 1 for name in encoders):
                theirs = {name: stages[name] for name in encoders}
                raise ValueError(f"replicated encoders run whole on every rank, so their pp must be 1, not {theirs}")
            if not self.uniform():
                raise ValueError(
                    f"replicated encoders run wherever the language model does, so all need the same dp, not "
                    f"{replicas}; set parallel.dp alone"
                )
        if parallel.placement == "shared":
            ranks = {name: parallel.ranks_of(name) for name in self.modules()}
            if len(set(ranks.values())) > 1:
                raise ValueError(
                    "placement 'shared' runs all modules on the same ranks, so tp * cp * pp * dp must be one number, "
                    f"not {ranks}; raise a degree of the smaller ones or set parallel.placement = 'parallel'"
                )
            if parallel.ranks is not None:
                raise ValueError("placement 'shared' takes its ranks from the degrees; remove parallel.ranks")
        return self

    @model_validator(mode="after")
    def _work_fits_the_ranks(self) -> Config:
        parallel, train = self.parallel, self.train
        stages = {name: parallel.stages(name) for name in self.modules()}
        replicas = {name: parallel.replicas(name) for name in self.modules()}
        if parallel.ranks is not None and not self.uniform():
            raise ValueError(
                f"parallel.ranks = {parallel.ranks} counts the ranks of a replica of the whole model, which needs one "
                f"dp for all modules, not {replicas}; remove parallel.ranks"
            )
        lanes = {name: parallel.module(name).tp * parallel.module(name).cp for name in self.modules()}
        if parallel.ranks is not None and any(size > 1 for size in lanes.values()):
            raise ValueError(
                f"parallel.ranks = {parallel.ranks} lets stages of a replica share ranks, which needs tp = cp = 1 for "
                f"all modules, not tp * cp = {lanes}; remove parallel.ranks"
            )
        most = self._stage_groups()
        if parallel.ranks is not None and parallel.placement != "chain" and parallel.ranks > most:
            raise ValueError(
                f"parallel.ranks = {parallel.ranks}, but placement {parallel.placement!r} with pp = {stages} has work "
                f"for {most}; use 1 to {most}, or raise a pp"
            )
        counts = {"language_model": train.microbatches} | dict.fromkeys(self.model.encoders(), 1) | self.chunks()
        named = {"language_model": "train.microbatches"} | {name: f"parallel.{name}.chunks" for name in self.chunks()}
        for name, count in counts.items():
            if train.batch_size < count * replicas[name]:
                what = f"{named[name]} = {count}" if name in named else "a chunk"
                raise ValueError(
                    f"train.batch_size = {train.batch_size} is too small for {what} on each of {replicas[name]} "
                    f"replicas of {name}: each needs at least one sample"
                )
        return self

    @model_validator(mode="after")
    def _state_has_a_place(self) -> Config:
        if self.train.offload_optimizer and self.run.device == "cpu":
            raise ValueError(
                "train.offload_optimizer = true moves the optimizer's state from a GPU to host memory, but with "
                "run.device = 'cpu' it is there already: leave the key out, or set run.device = 'cuda'"
            )
        for name in self.modules():
            spec = self.parallel.module(name)
            alike = spec.cp * self.parallel.replicas(name)
            if self.parallel.placement == "replicated" and name != "language_model":
                alike *= self.parallel.ranks or self.parallel.stages("language_model")  # a copy on every rank
            if spec.shard_ranks is not None and alike % spec.shard_ranks:
                raise ValueError(
                    f"parallel.{name}.shard_ranks = {spec.shard_ranks}, but {alike} ranks hold the same weights of "
                    f"{name}: give a number that divides theirs, or leave it out for all"
                )
        return self
