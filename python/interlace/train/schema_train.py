"""The section ``[train]`` of a training config: how the model learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from interlace.train.schema_base import Fraction, NotNegative, Positive, Rate, Section


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
