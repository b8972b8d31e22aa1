"""[train] of a training config: optimization settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from interlace._hints import nearest
from interlace.train.config.base import Fraction, NotNegative, Positive, Rate, Section

OPTIMIZERS = ("adamw", "adafactor", "muon", "sgd")


class Lora(Section):
    """LoRA: trains adapters of low rank beside frozen layers (arXiv 2106.09685; peft's). Otherwise only
    ``modules_to_save``, projectors (unless frozen) and weights opened by ``train.train`` are trained."""

    rank: Positive = 16
    """Rank (width) of an adapter."""
    alpha: Positive = 32
    """Scale of an adapter's output: alpha / rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Fraction of an adapter's input that is dropped in training. Must be 0 if a module with adapters has tp or cp >
    1."""
    targets: Annotated[list[str], Field(min_length=1)] = ["all-linear"]
    """Layers that get an adapter. "all-linear": all linear layers of the language model except its head. A name such as
    "q_proj": layers of the language model whose name ends with it. "vision", "*.q_proj": patterns as in
    ``train.freeze``, also for encoders."""
    modules_to_save: list[str] = []
    """Modules to train in full beside the adapters, named as in ``targets``; for example "lm_head"."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732), so that a high rank learns as fast as a low one."""


class Group(Section):
    """Learning rate or weight decay of the parameters that match a pattern. Has priority over the keys of modules."""

    pattern: Annotated[str, Field(min_length=1)]
    """Parameters of the group, as in ``train.freeze``. A parameter belongs to the first group that matches it."""
    lr: Rate | None = None
    """Peak learning rate of the group. Default: as without the group. Give ``lr``, ``weight_decay`` or both."""
    weight_decay: Rate | None = None
    """Weight decay of the group. Default: as without the group."""

    @model_validator(mode="after")
    def _says_something(self) -> Group:
        if self.lr is None and self.weight_decay is None:
            raise ValueError(f"the group {self.pattern!r} says neither lr nor weight_decay: give one, or leave it out")
        return self


class EarlyStop(Section):
    """Ends a run whose held-out loss no longer falls. Needs ``train.validate_every`` > 0."""

    patience: Positive
    """Number of consecutive validations without improvement that end the run."""
    min_delta: Rate = 0.0
    """Minimum decrease of the loss that counts as improvement [nats]."""


class Train(Section):
    """Optimization settings."""

    freeze: list[str] = []
    """Weights not to train, in addition to ``freeze`` of modules: patterns of parameter or module names. "vision": an
    encoder without its projector. "vision.projector": its projector. "*.layers.0": first layers. "*norm*": all
    norms."""
    train: list[str] = []
    """Frozen weights to train nevertheless: patterns as in ``freeze``, applied after it."""
    lora: Lora | None = None
    """Trains adapters in place of the weights of the language model (and of encoders, if named)."""
    groups: list[Group] = []
    """Learning rates and weight decay by pattern, with priority over those of modules. The first match counts."""
    steps: Positive | None = None
    """Optimizer steps of the whole run. Give either ``steps`` or ``epochs``."""
    epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Passes over the training data, in place of ``steps``: this many times the batches of one pass. Not with
    ``data.reading`` = "stream", which has no known length."""
    batch_size: Positive
    """Samples per step, over all microbatches of all replicas."""
    microbatches: Positive = 1
    """Microbatches per step of each language-model replica, at most ``batch_size``. More of them fill the pipeline
    better."""
    assign: Literal["tokens", "stratified", "entrain", "as_printed"] = "tokens"
    """Assignment of samples to microbatches. tokens: balances the language model's tokens. The other values use the
    work of encoders and language model, estimated from lengths. stratified: balances both as far as possible. entrain:
    in every step, the fastest in simulation of three: stratified with deferral; even language-model work with a good
    microbatch order; tokens. as_printed: deferral as printed in the Entrain paper. Deferral: a sample is encoded in a
    chunk of its own and read by the next microbatch. Only tokens works with ``data.pack``. entrain and as_printed
    exclude ``parallel.NAME.chunks`` and placement = "shared"."""
    balance: Literal["none", "llm", "per_module"] = "llm"
    """Assignment of samples to the replicas of each module. none: by position in the batch. llm: balances the language
    model's work; encoders follow it. per_module: balances each module by its own samples, so encoder features may be
    read on another rank. Rows of ``data.pack`` are not moved."""
    lr: Rate = 1e-3
    """Peak learning rate of modules without one of their own."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after warm-up. cosine, linear: fall to the minimum over all steps. constant: stays at the peak. wsd
    (warm-up, stable, decay): stays at the peak, then falls linearly over the last ``decay_steps``."""
    decay_steps: Positive | None = None
    """Steps of the decay; only for schedule = "wsd". Default: a tenth of all steps."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""
    warmup_steps: NotNegative | None = None
    """Steps of linear warm-up from 0 to the peak. Default: 20, but at most a tenth of all steps, and at most the steps
    that ``decay_steps`` leaves."""
    schedule_steps: Positive | None = None
    """Steps until the learning rate reaches its minimum, where it stays. Default: ``train.steps``. Required to extend a
    run if that would change its rate: the old number of steps keeps the schedule, the new one starts a new schedule."""
    optimizer: str = "adamw"
    """adamw. adafactor: little state; steps are relative to the size of weights, and lr is the maximum step. muon: Muon
    for the matrices of linear layers except the head, adamw for all other parameters; uses learning rates of adamw.
    sgd: with momentum. "package.module:Class": a subclass of torch.optim.Optimizer, see docs/extending.md. adafactor,
    muon and classes without ``elementwise`` = True need whole matrices: not with tp > 1 or ``shard``."""
    optimizer_options: dict[str, Any] = {}
    """Arguments of an optimizer that is given as a class, such as {betas = [0.9, 0.99]}."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Momentum of muon and sgd."""
    weight_decay: Rate = 0.05
    """Decoupled weight decay (sgd: added to gradients). Never applied to norms, biases and other vectors."""
    betas: Annotated[list[Annotated[float, Field(ge=0.0, lt=1.0)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """Decay rates of AdamW's first and second moment."""
    eps: Annotated[float, Field(gt=0.0, le=1e6)] = 1e-8
    """AdamW's epsilon, added to the denominator."""
    clip_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Maximum global norm of the gradients; larger gradients are scaled down. ``inf``: no clipping."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory and compute the update there. GPUs then hold only weights and gradients. Only
    for GPUs and optimizer = "adamw"; not with ``ema``."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16, fp16: matrix products run under autocast. Weights, gradients and their sums, the loss and optimizer state
    stay fp32. fp16 also scales the loss, and skips steps whose gradients overflow."""
    frozen_dtype: Literal["fp32", "bf16"] = "fp32"
    """Storage type of frozen weights of linear layers and convolutions. bf16 halves their memory (8B parameters: 16 GB)
    and saves casts in forward passes. Needs precision = "bf16", whose products stay the same. Weights of a folder are
    rounded to bf16, also in exports."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay per step of an exponential moving average of the trained weights, such as 0.999. The average is kept in
    fp32. Default: no average. Not with ``offload_optimizer``."""
    ema_evaluate: bool = True
    """Use the averaged weights, if ``ema`` is set, for the held-out loss, answers and exports."""
    compile: bool = False
    """Compile the repeated layers (torch.compile). The first steps take minutes. A CPU needs a C++ compiler. Not with a
    ``parallel.schedule`` that splits backward passes (zb_h1, zb_h2, zb_v, auto)."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recomputation in the backward pass, to save memory. none: nothing is recomputed. full: each layer is recomputed,
    and only its input is kept. selective: only cheap operations are recomputed; the results of matrix products and of
    attention are kept too."""
    validate_every: NotNegative = 100
    """Steps between two measurements of the held-out loss. 0: only at the end."""
    validation_samples: Positive = 64
    """Maximum number of held-out samples per measurement."""
    early_stop: EarlyStop | None = None
    """Ends the run when the held-out loss no longer falls."""

    @property
    def recompute(self) -> bool:
        """True if layers with a backward run another forward. The recomputation of "selective" (norms, activations,
        additions) counts as zero, because its matrix products are kept."""
        return self.activation_checkpointing == "full"

    @property
    def last_step(self) -> int:
        """Optimizer steps of the run. Raises ValueError as long as only ``epochs`` are known."""
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
    def _keys_fit_each_other(self) -> Train:
        if ":" not in self.optimizer:
            if self.optimizer not in OPTIMIZERS:
                raise ValueError(f"there is no optimizer {self.optimizer!r}; {nearest(self.optimizer, OPTIMIZERS)}")
            if self.optimizer_options:
                raise ValueError(
                    f"optimizer_options are for a class of your own, not for {self.optimizer!r}: remove them"
                )
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
