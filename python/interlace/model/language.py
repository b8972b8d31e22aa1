"""The language model's side: token merging, the forward of a stage, and the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interlace.attention import AttentionPlan
from interlace.attention.hf import carrier, use_plan
from interlace.model.sample import IGNORE
from interlace.model.slice import run

Inputs = dict[str, Any]


def merge_tokens(features: Mapping[str, Tensor], inputs: Inputs) -> Inputs:
    """Put each encoder's features where its placeholder id stands (Cornstarch 2025-03 section 5.1, cb_before_llm).

    features: encoder name -> [n, D]; inputs: input_ids [B, T], inputs_embeds [B, T, D] of the text and placeholders
    (encoder name -> id). Returns inputs with inputs_embeds merged. Features replace placeholders in order; a
    placeholder's own embedding gets no gradient. Raises ValueError if the counts differ.
    """
    ids, embeds = inputs["input_ids"].reshape(-1), inputs["inputs_embeds"]
    flat = embeds.reshape(-1, embeds.shape[-1])
    for name, token in inputs["placeholders"].items():
        rows = (ids == token).nonzero().squeeze(1)
        given = features.get(name)
        count = 0 if given is None else len(given)
        if len(rows) != count:
            raise ValueError(
                f"{name}: input_ids hold {len(rows)} placeholders (id {token}) but the encoder gave {count} features: "
                f"check that every item has encoder.tokens(shape) placeholders and that its media is in the batch"
            )
        if given is not None and count:
            if given.shape[1] != flat.shape[1]:
                raise ValueError(
                    f"{name}: the projector gives features of size {given.shape[1]}, the language model's embeddings "
                    f"have {flat.shape[1]}: a projector of your own must map to the latter"
                )
            flat = flat.index_copy(0, rows, given.to(flat.dtype))
    return {**inputs, "inputs_embeds": flat.view_as(embeds)}


@dataclass
class LanguageSettings:
    """What running a language model takes besides its weights."""

    layer_path: str
    placeholders: dict[str, int]
    merge: Callable[[Mapping[str, Tensor], Inputs], Inputs] = merge_tokens
    preprocess: Callable[[Inputs], Inputs] | None = None
    postprocess: Callable[[Inputs, Any], Any] | None = None
    backend: str | None = None


def run_language(
    module: nn.Module,
    settings: LanguageSettings,
    first_layer: nn.Module,
    inputs: Inputs,
    hidden: Tensor | None,
    *,
    keep: Tensor | None = None,
) -> Any:
    """One stage of the language model: the module's output, or the hidden state [1, T, D] where a cut ends it.

    inputs: as collated, with "features" on the first stage. hidden: the previous stage's output, None on the first.
    keep: positions int64 [n] whose logits are wanted, where the model can leave the others out.
    """
    if settings.preprocess is not None:
        inputs = settings.preprocess(dict(inputs))
    like = next(first_layer.parameters())
    if hidden is None:
        inputs = embed(module, settings, inputs, like.device)
    plan = plan_of(inputs, like.device)
    kwargs: Inputs = {
        "inputs_embeds": inputs["inputs_embeds"] if hidden is None else hidden,
        "position_ids": inputs["position_ids"].to(like.device),
        "attention_mask": carrier(plan, backend=settings.backend),
    }
    accepted = inspect.signature(module.forward).parameters
    if "use_cache" in accepted:
        kwargs["use_cache"] = False
    if keep is not None and "logits_to_keep" in accepted:
        kwargs["logits_to_keep"] = keep
    with use_plan(plan, backend=settings.backend):
        output, left = run(module, first_layer, kwargs, hidden=hidden)
    if not left and settings.postprocess is not None:
        output = settings.postprocess(inputs, output)
    return output


def embed(module: nn.Module, settings: LanguageSettings, inputs: Inputs, device: torch.device) -> Inputs:
    """`inputs` with inputs_embeds [B, T, D]: the text's embeddings with the encoders' features merged in."""
    ids = inputs["input_ids"].to(device)
    embeds = module.get_input_embeddings()(ids)  # type: ignore[operator]
    given = {**inputs, "input_ids": ids, "inputs_embeds": embeds, "placeholders": settings.placeholders}
    return settings.merge(inputs.get("features") or {}, given)


def plan_of(inputs: Inputs, device: torch.device) -> AttentionPlan:
    """The collated plan, or one built from the mask."""
    plan = inputs.get("plan")
    if plan is None:
        plan = AttentionPlan.build(inputs["mask"])
    return plan.to(device)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropy over valid targets, fp32 scalar in nats; 0 (with a graph) when there are none.

    logits [1, T, V] or [1, n, V] for the n valid targets alone; labels [1, T], already shifted.
    """
    flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).to(logits.device)
    valid = wanted != IGNORE
    if len(flat) == len(wanted):
        flat = flat[valid]
    return nn.functional.cross_entropy(flat.float(), wanted[valid], reduction="sum")
