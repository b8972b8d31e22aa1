"""Where a model is cut: what each layer costs, given what is frozen, which layers form a stage, and on which rank.

cost.py (frozen-aware costs) · partitioning.py (the exact cut, in csrc/plan/) · profile.py (times single layers) ·
profile_modules.py (all layers of a model) · module_costs.py (what each layer of a model costs) ·
place.py (ParallelSpec per module -> Layout) ·
oobleck.py (pipeline templates, their combinations, batch shares) ·
reconfiguration.py (new pipelines after failures and joins) ·
orchestration.py (GPUs and degrees for encoder, language model and generator) ·
cost_model.py (seconds from a few measurements) · step_costs.py (of chunks of any size, and their file) ·
links.py (messages and collectives) · stable_batch.py (how many samples a profile needs) ·
search.py (degrees, placement and cuts of a whole model) · memory.py (bytes that each rank of a layout holds).

Torch is loaded only where layers are timed: by `profile_layers` and `profile_model`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from interlace.plan.cost import LayerTimes, backward_needs, frozen_costs, trainable_before
from interlace.plan.cost_model import CostModel, LinkModel, fit_cost_model, fit_link
from interlace.plan.module_costs import ModuleCosts, analytic_costs, layer_costs
from interlace.plan.oobleck import (
    Instantiation,
    PipelineTemplate,
    combinations,
    instantiate,
    node_counts,
    pipeline_template,
    split_batch,
)
from interlace.plan.orchestration import ModuleWork, Orchestration, orchestrate
from interlace.plan.partitioning import partition
from interlace.plan.reconfiguration import Reconfigured, admit, reconfigure, regroup
from interlace.plan.search import Configuration, SearchModule, in_flight, search_configuration
from interlace.plan.stable_batch import StableBatch, bernoulli_trials, proportional_allocation, stable_batch_size

if TYPE_CHECKING:
    from interlace.plan.profile import profile_layers
    from interlace.plan.profile_modules import profile_model

_HOMES = {"profile_layers": "profile", "profile_model": "profile_modules"}

__all__ = [
    "Configuration",
    "CostModel",
    "Instantiation",
    "LayerTimes",
    "LinkModel",
    "ModuleCosts",
    "ModuleWork",
    "Orchestration",
    "PipelineTemplate",
    "Reconfigured",
    "SearchModule",
    "StableBatch",
    "admit",
    "analytic_costs",
    "backward_needs",
    "bernoulli_trials",
    "combinations",
    "fit_cost_model",
    "fit_link",
    "frozen_costs",
    "in_flight",
    "instantiate",
    "layer_costs",
    "node_counts",
    "orchestrate",
    "partition",
    "pipeline_template",
    "profile_layers",
    "profile_model",
    "proportional_allocation",
    "reconfigure",
    "regroup",
    "search_configuration",
    "split_batch",
    "stable_batch_size",
    "trainable_before",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"interlace.plan.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'interlace.plan' has no attribute {name!r}")
