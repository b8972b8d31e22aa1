"""Planners: parallel degrees, placement and partitioning of a model, its memory, and pipelines of elastic runs.

- `search`: degrees, placement and cuts of a whole model. `orchestration`: GPUs for encoder, language model, generator.
- `memory`: bytes that each rank of a layout holds.
- `oobleck`: pipeline templates, their combinations, batch shares. `reconfiguration`: pipelines after failures, joins.
- `stable_batch`: number of samples for a profile.

Costs (`interlace.costs`) and exact partitioning (`interlace.balance.partition`) are exported here, too. Torch is loaded
only by `profile_layers` and `profile_model`, which time layers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from interlace.balance.partition import partition
from interlace.costs.fitted import CostModel, LinkModel, fit_cost_model, fit_link
from interlace.costs.layer import LayerTimes, backward_needs, frozen_costs, trainable_before
from interlace.costs.modules import ModuleCosts, analytic_costs, layer_costs
from interlace.plan.oobleck import (
    Instantiation,
    PipelineTemplate,
    instantiate,
    node_counts,
    pipeline_template,
    split_batch,
)
from interlace.plan.orchestration import ModuleWork, Orchestration, orchestrate
from interlace.plan.reconfiguration import Reconfigured, admit, reconfigure, regroup
from interlace.plan.search import Configuration, SearchModule, search_configuration
from interlace.plan.stable_batch import StableBatch, bernoulli_trials, proportional_allocation, stable_batch_size

if TYPE_CHECKING:
    from interlace.costs.profile import profile_layers
    from interlace.costs.profile_modules import profile_model

_HOMES = {"profile_layers": "profile", "profile_model": "profile_modules"}  # of interlace.costs

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
    "fit_cost_model",
    "fit_link",
    "frozen_costs",
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
        return getattr(import_module(f"interlace.costs.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'interlace.plan' has no attribute {name!r}")
