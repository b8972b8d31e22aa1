"""The section ``[train]`` of a training config: how the model learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from interlace.train.schema_base import Fraction, NotNegative, Positive, Rate, Section


class Lora(Section):
    """Adapters of low rank beside frozen layers, trained in their place (LoRA, arXiv 2106.09685; peft's)."""

    rank: Positive = 16
    """Rank of an adapter: its width."""
    alpha: Positive = 32
    """An adapter's part of its layer's result is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """What fraction of an adapter's input is dropped in training. Not where ranks share a layer (tp, cp)."""
    targets: Annotated[list[str], Field(min_length=1)] = ["all-linear"]
    """Layers that get an adapter. "all-linear": all linear ones of the language model but its head; a name such as
    "q_proj": those of the language model that end with it; "vision", "*.q_proj": patterns as in ``train.freeze``, of
    encoders too."""
    modules_to_save: list[str] = []
    """Modules that are trained whole beside the adapters, named in the same way, such as "lm_head"."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732), so that a high rank learns as fast as a low one."""


class Group(Section):
    """Parameters with a learning rate or weight decay of their own."""

    pattern: Annotated[str, Field(min_length=1)]
    """Which, as in ``train.freeze``; a parameter belongs to the first group that matches it."""
    lr: Rate | None = None
    """Their peak learning rate; by default as if they were in no group."""
    weight_decay: Rate | None = None
    """Their weight decay; by default as if they were in no group."""

    @model_validator(mode="after")
    def _says_something(self) -> Group:
        if self.lr is None and self.weight_decay is None:
            raise ValueError(f"the group {self.pattern!r} says neither lr nor weight_decay: give one, or leave it out")
        return self


class EarlyStop(Section):
    """When to end a run whose held-out loss no longer falls."""

    patience: Positive
    """So many validations in a row without a better one end the run."""
    min_delta: Rate = 0.0
    """How much less a loss must be to count as better [nats]."""


class Train(Section):
    """The optimisation."""

    freeze: list[str] = []
    """What is not trained, beside what modules freeze: patterns of names of parameters or modules. "vision" is an
    encoder without its projector, "vision.projector" that, "*.layers.0" the first layers, "*norm*" all norms."""
    train: list[str] = []
    """What is trained all the same: patterns as in ``freeze``, of which each opens again what was frozen."""
    lora: Lora | None = None
    """Train adapters in place of the weights of the language model (and of encoders, if they are named); what else is
    trained are projectors, unless they are frozen, and what ``train`` opens."""
    groups: list[Group] = []
    """Learning rates and weight decay by pattern, before those of modules; the first that matches counts."""
    steps: Positive | None = None
    """Optimizer steps of the whole run; or give ``epochs``."""
    epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Passes over the training data, in place of ``steps``: so many times the batches that it makes."""
    batch_size: Positive
    """Samples per step, over all microbatches of all replicas."""
    microbatches: Positive = 1
    """Into how many microbatches each replica of the language model cuts a step; the pipeline fills with them."""
    assign: Literal["tokens", "stratified", "entrain", "as_printed"] = "tokens"
    """How samples are spread over microbatches. tokens: so that the language model's tokens are even. The others go by
    what encoders and language model take, estimated from lengths. stratified: both even, as far as that goes. entrain:
    in every step what is simulated to be fastest, of stratified with deferral, of the language model's work even and
    microbatches in a good order, and of tokens. as_printed: deferral as the Entrain paper prints it. A deferred sample
    is encoded in a chunk of its own, and the next microbatch reads it."""
    balance: Literal["none", "llm", "per_module"] = "llm"
    """Which replica of each module takes which sample. none: samples stay where their place in the batch puts them;
    llm: the language model's work is even, and encoders follow it; per_module: that of each module is even, by its own
    samples, so what an encoder makes may be read on another rank. Rows of ``data.pack`` stay where they are."""
    lr: Rate = 1e-3
    """Peak learning rate of modules that name none of their own."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """The learning rate after warm-up. cosine and linear come down to the minimum over all steps; constant stays at the
    peak; wsd (warm-up, stable, decay) stays there and comes down linearly over the last ``decay_steps``."""
    decay_steps: Positive | None = None
    """Steps of the decay of "wsd"; by default a tenth of all."""
    min_lr_ratio: Fraction = 0.1
    """The learning rate ends at this fraction of the peak."""
    warmup_steps: NotNegative | None = None
    """Steps of linear warm-up from 0 to the peak; by default 20, but at most a tenth of all and what
    ``decay_steps`` leave."""
    schedule_steps: Positive | None = None
    """Steps after which the learning rate has come down to its minimum, where it stays; by default ``train.steps``. A
    run that goes on for more steps than it was begun with has to say whether its rate keeps to the old plan."""
    optimizer: Literal["adamw", "adafactor", "muon", "sgd"] = "adamw"
    """adamw; adafactor: little state, steps relative to the size of weights, lr the most of a step; muon: for the
    matrices of linear layers, adamw for all else, with the learning rates of adamw; sgd, with momentum. adafactor and
    muon need whole matrices: not with tp or shard."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Momentum of muon and sgd."""
    weight_decay: Rate = 0.05
    """Decoupled weight decay (of sgd: added to gradients); never applied to norms, biases and other vectors."""
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0.0, le=1e6)] = 1e-8
    """AdamW's denominator offset."""
    clip_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradients are scaled down to this global norm; ``inf`` leaves them as they are."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory and compute the update there: GPUs then hold weights and gradients alone. For
    ranks on GPUs."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 run matrix products under autocast; weights, gradients and their sums, the loss and optimizer state
    stay fp32. fp16 scales the loss, and leaves out steps whose gradients overflow."""
    frozen_dtype: Literal["fp32", "bf16"] = "fp32"
    """How frozen weights of linear layers and convolutions are kept. bf16 halves them (8B parameters: 16 GB), and
    forwards need not cast them; with precision = "bf16" alone, whose products are the same then. Weights of a folder
    are rounded to it, also in what is exported."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Keep an exponential moving average of the trained weights, in fp32, with this decay per step, such as 0.999."""
    ema_evaluate: bool = True
    """Measure the held-out loss with the averaged weights, where they are kept, and answer with and export them."""
    compile: bool = False
    """Compile the repeated layers (torch.compile). The first steps take minutes; a CPU needs a C++ compiler. Not with a
    ``parallel.schedule`` that splits backwards (zb_h1, zb_h2, zb_v, auto)."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """What backward computes again instead of keeping it. none: nothing; full: each layer, of which its input is kept;
    selective: only what is cheap, as the results of matrix products and of attention are kept, too."""
    validate_every: NotNegative = 100
    """Steps between two measurements of the held-out loss; 0 measures it only at the end."""
    validation_samples: Positive = 64
    """How many held-out samples a measurement takes."""
    early_stop: EarlyStop | None = None
    """End the run when the held-out loss no longer falls."""

    @property
    def recompute(self) -> bool:
        """Whether layers with a backward take another forward. What "selective" repeats (norms, activations, additions)
        is counted as nothing: its matrix products are kept."""
        return self.activation_checkpointing == "full"

    @property
    def last_step(self) -> int:
        """The optimizer steps of the run. Raises ValueError as long as only ``epochs`` are known."""
        if self.steps is None:
            raise ValueError("train.epochs become steps when the length of the data is known")
        return self.steps

    def decay_of(self, length: int) -> int:
        """Steps of the decay of "wsd" in a schedule of `length` steps."""
        return self.decay_steps or max(1, length // 10)

    def warmup_of(self, length: int) -> int:
        """Steps of the warm-up in a schedule of `length` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return max(0, min(20, length // 10, length - (self.decay_steps or 0)))

    @model_validator(mode="after")
    def _fits(self) -> Train:
        if (self.steps is None) == (self.epochs is None):
            given = "neither" if self.steps is None else "both"
            raise ValueError(f"give steps or epochs, one of the two: there are {given}")
        if self.early_stop is not None and not self.validate_every:
            raise ValueError("early_stop goes by validations: set validate_every to the steps between two")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ValueError(f"decay_steps = {self.decay_steps} is of schedule = 'wsd', not of {self.schedule!r}")
        if self.offload_optimizer and self.optimizer != "adamw":
            raise ValueError(
                f"offload_optimizer = true is there for adamw alone, not for {self.optimizer!r}: leave it out"
            )
        if self.offload_optimizer and self.ema is not None:
            raise ValueError("ema keeps averages beside the weights, in the memory that offload_optimizer is to free")
        if self.frozen_dtype == "bf16" and self.precision != "bf16":
            raise ValueError(
                f"frozen_dtype = 'bf16' is for precision = 'bf16', but precision is {self.precision!r}, whose products "
                "would be of rounded weights: set that, or leave frozen_dtype out"
            )
        if self.microbatches > self.batch_size:
            raise ValueError(
                f"microbatches = {self.microbatches} is more than batch_size = {self.batch_size}; "
                "a microbatch needs at least one sample"
            )
        name = "steps" if self.schedule_steps is None else "schedule_steps"
        length = getattr(self, name)
        if length is None:
            return self
        warmup = self.warmup_of(length)
        if warmup > length:
            raise ValueError(f"warmup_steps = {warmup} is more than {name} = {length}")
        if warmup + (self.decay_steps or 0) > length:
            raise ValueError(
                f"warmup_steps = {warmup} and decay_steps = {self.decay_steps} are more than {name} = {length}"
            )
        return self
