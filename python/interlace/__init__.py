"""Interlace: bitfield attention, scheduling and a pipeline runtime for training multimodal LLMs.

The names below are loaded on first use, so that `import interlace` is fast and `interlace.balance` never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from interlace import attention, balance, comm, layout, masks, model, parallel, plan, run, schedule, simulate
    from interlace.attention import AttentionPlan, bitfield_attention
    from interlace.layout import Layout, ParallelSpec
    from interlace.masks import BitfieldMask, Segment
    from interlace.model import Media, ModalityModule, MultimodalModel, Sample
    from interlace.run import ParallelModel, PipelineError, parallelize

_NAMES = {
    "attention": ("AttentionPlan", "bitfield_attention"),
    "masks": ("BitfieldMask", "Segment"),
    "model": ("Media", "ModalityModule", "MultimodalModel", "Sample"),
    "layout": ("Layout", "ParallelSpec"),
    "run": ("ParallelModel", "PipelineError", "parallelize"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
"""Name -> its module. All other names of ``__all__`` are modules."""

__all__ = [
    "AttentionPlan",
    "BitfieldMask",
    "Layout",
    "Media",
    "ModalityModule",
    "MultimodalModel",
    "ParallelModel",
    "ParallelSpec",
    "PipelineError",
    "Sample",
    "Segment",
    "attention",
    "balance",
    "bitfield_attention",
    "comm",
    "layout",
    "masks",
    "model",
    "parallel",
    "parallelize",
    "plan",
    "run",
    "schedule",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"interlace.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"interlace.{name}")
    raise AttributeError(f"module 'interlace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
