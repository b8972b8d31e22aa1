"""StepOptions: options of steps, shared by `parallelize`, `ParallelModel` and the ranks' comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from interlace.comm.process.agreement import Fingerprint
from interlace.model import Checkpointing
from interlace.parallel.context import ORDERS
from interlace.run.tables.assign import METHODS, Method
from interlace.run.tables.dispatch import BALANCES, Balance
from interlace.schedule import Options, generator_of


@dataclass(frozen=True)
class StepOptions:
    """Options of steps. All but `timeout` and `crash_folder` are the same on every rank.

    schedule: a name of `interlace.schedule.GENERATORS`, see docs/schedules.md, or "package.module:function", see
        docs/extending.md.
    schedule_options: durations and limits of the schedule, see `interlace.schedule.generate`. Without durations, "auto"
        uses the counted costs of `plan.analytic_costs`.
    checkpointing: activations that layers keep for their backward: "none" (keep all), "full" (only the layer's input)
        or "selective" (also those that are costly to recompute), see `interlace.model.checkpointing`.
    sequence_parallel: cut the rows of lanes with tp > 1 between the products, too. Norms and residuals then take 1 / tp
        of the memory and work. The same number of bytes is sent, overlapped with the products. Any number of rows is
        allowed; modules that mix tokens outside attention (``mllm.packing`` is not "packed") keep them whole.
    context_order: order in which rows of a chunk go to the ranks of a lane with cp > 1: "lpt" balances attention under
        the chunk's own mask, "zigzag" under a causal one, "ring" gives each rank neighbouring rows.
    assign: assignment of samples to microbatches: "tokens" balances the language model's tokens; "stratified",
        "entrain" and "as_printed" balance the costs of encoders and language model, see `interlace.run.tables.assign`.
    balance: assignment of samples to replicas: "none" (by place in the batch), "llm" (balanced for the language model;
        encoders follow it) or "per_module" (balanced for each); see `interlace.run.tables.dispatch`. Lists of samples
        fix it for the language model.
    ranks_per_node: number of consecutive ranks on a node; traffic between nodes is kept low. None: all ranks are on one
        node.
    autocast: forwards run under autocast to this dtype, e.g. torch.bfloat16.
    timeout: most seconds of every wait for a peer.
    crash_folder: folder for the flight recorder of a process whose step fails, for `interlace doctor crash`.

    Raises ValueError for an unknown name, and for durations that ranks cannot compare.
    """

    schedule: str = "1f1b"
    schedule_options: Options | None = None
    checkpointing: Checkpointing = "none"
    sequence_parallel: bool = True
    context_order: str = "lpt"
    assign: Method = "tokens"
    balance: Balance = "llm"
    ranks_per_node: int | None = None
    autocast: torch.dtype | None = None
    timeout: float = 300.0
    crash_folder: Path | str | None = None

    def __post_init__(self) -> None:
        generator_of(self.schedule)  # raises for an unknown one
        for what, known in (
            ("context_order", ORDERS),
            ("assign", METHODS),
            ("balance", BALANCES),
        ):
            if getattr(self, what) not in known:
                names = ", ".join(map(repr, known))
                raise ValueError(f"unknown {what} {getattr(self, what)!r}: use one of {names}")
        if callable((self.schedule_options or {}).get("durations")):
            raise ValueError("schedule_options: durations is a function, which ranks cannot compare: pass a mapping")

    @property
    def recompute(self) -> bool:
        """Whether backwards recompute each layer's forward."""
        return self.checkpointing == "full"

    def compared(self) -> Mapping[str, object]:
        """The options that ranks compare before a step, by name."""
        own = {name: value for name, value in vars(self).items() if name not in ("timeout", "crash_folder")}
        given = own.pop("schedule_options")
        return own | ({"schedule_options": Fingerprint(repr(given), [])} if given else {})
