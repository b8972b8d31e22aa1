"""Execution of the language model: token merging and the forward of a stage."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from interlace.attention import AttentionPlan
from interlace.attention.hf import Backend, use_plan
from interlace.attention.hf.limits import Limits
from interlace.attention.hf.plans import narrowed
from interlace.model.inputs.placeholders import Ids, every_id, in_words
from interlace.model.inputs.places import media_in
from interlace.model.rows import ALONE, PACKED, ROWS, Document, check_rows, documents, longest
from interlace.model.sample import Sample
from interlace.model.stages.deepstack import Deepstack, handing, split_features
from interlace.model.stages.shared import per_layer_inputs
from interlace.model.stages.slice import ending_at, first_layer, run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = dict[str, Any]


def merge_tokens(features: Mapping[str, Tensor], inputs: Inputs) -> Inputs:
    """Insert each encoder's features at its placeholder ids (Cornstarch 2025-03 section 5.1, cb_before_llm).

    features: encoder name -> [n, D].
    inputs: input_ids [B, T], inputs_embeds [B, T, D] of the text, and placeholders (encoder name -> id or ids).
    Returns inputs with inputs_embeds merged. Features replace placeholders in order. The embedding of a placeholder
    itself gets no gradient. Raises ValueError if the counts differ.
    """
    embeds = inputs["inputs_embeds"]
    flat = embeds.reshape(-1, embeds.shape[-1])
    for name, token in inputs["placeholders"].items():
        rows = media_in(inputs, name, token)
        encoded = features.get(name)
        count = 0 if encoded is None else len(encoded)
        if len(rows) != count:
            raise ValueError(
                f"{name}: input_ids hold {len(rows)} placeholders ({in_words(token)}) but the encoder gave {count} "
                "features: check that every item has encoder.tokens(shape) placeholders and that its media is in the "
                "batch"
            )
        if encoded is not None:  # also for zero features: gradients then still flow back through the encoder's layers
            if encoded.shape[1] != flat.shape[1]:
                raise ValueError(
                    f"{name}: the projector makes features of size {encoded.shape[1]}, but the language model's "
                    f"embeddings have size {flat.shape[1]}: a custom projector must map to that size"
                )
            flat = flat.index_copy(0, rows, encoded.to(flat.dtype))
    return {**inputs, "inputs_embeds": flat.view_as(embeds)}


class MediaOptions(TypedDict, total=False):
    """Keyword arguments of `MultimodalModel` for the language model's inputs. Its docstring describes them."""

    bidirectional: bool | str
    positions: Callable[[Sample], Tensor] | None
    deepstack: int


@dataclass
class LanguageSettings:
    """Settings for running a language model, besides its weights."""

    layer_path: str
    placeholders: dict[str, Ids]
    max_length: int | None = None  # positions of the model [tokens]; None: no maximum
    merge: Callable[[Mapping[str, Tensor], Inputs], Inputs] = merge_tokens
    preprocess: Callable[[Inputs], Inputs] | None = None
    postprocess: Callable[[Inputs, Any], Any] | None = None
    backend: str | None = None
    packing: str = PACKED  # kind in interlace.model.rows
    limit: int | None = None  # if a batch has a longer sample [tokens], each sample gets its own call: see Packing
    ends_with_head: bool = False  # the logits are exactly the head's output: see Packing
    bidirectional: bool | str = True  # the tokens of a media item attend in both directions (JOINED of collate.py)
    positions: Callable[[Sample], Tensor] | None = None  # sample -> int64 [L, k], for k positions per token
    deepstack: int = 0  # number of first layers that add features
    limits: set[Limits] = field(default_factory=set)  # attention limits that its layers have requested so far


def run_language(
    module: PreTrainedModel,
    settings: LanguageSettings,
    inputs: Inputs,
    hidden: Tensor | None,
    *,
    logit_rows: Tensor | None = None,
    columns: Tensor | None = None,
    head: nn.Module | None = None,
) -> Any:
    """Run one stage of the language model: the module's output, or the hidden state [B, T, D] if a cut ends the stage.

    inputs: as collated, with "features" on the first stage. On a rank that holds only some of the tokens, also
    "attend", which computes its attention (see interlace.attention.hf.Backend).
    hidden: the previous stage's output; None on the first stage.
    logit_rows: bool [B, T], positions whose logits are needed. The logits are then [1, n, V], in order.
    columns: int64 [n], the wanted positions of a one-row batch, if known.
    head: the layer that makes logits. The forward ends before it and returns the head's input [n, K] at the wanted
    positions.
    """
    if settings.preprocess is not None:
        inputs = settings.preprocess(dict(inputs))
    entry = first_layer(module, settings.layer_path)
    device = next(entry.parameters()).device
    plan = plan_of(inputs)
    parts = _parts(settings, plan)
    if hidden is None:
        embedded = embed(module, settings, inputs, parts, device)
        if (changed := plan_after(plan, inputs, embedded)) is not plan:
            plan, parts = changed, _parts(settings, changed)
        inputs = embedded
    given, per_layer, deep = hidden, None, None
    if given is None:
        given, per_layer, deep = inputs["inputs_embeds"], inputs["per_layer_inputs"], inputs["deepstack"]
    positions = inputs["position_ids"].to(device)
    call = partial(_call, module, inputs.get("attend") or settings.backend, entry, head)
    if not parts:
        plan = plan.to(device)
        output, left_early = call(plan, positions, given, per_layer, hidden, logit_rows, columns, deep=deep)
        settings.limits.update(plan.__dict__.get("_narrowed", ()))
    else:
        tensors = (positions, given, per_layer, hidden, logit_rows)
        deeps = [None if deep is None else deep.of(part.row, part.start, part.stop) for part in parts]
        outputs = [
            call(part.plan.to(device), *(part.of(x) for x in tensors), deep=each) for part, each in zip(parts, deeps)
        ]
        left_early = outputs[0][1]
        pieces = [output for output, _ in outputs]
        output = _joined(pieces, parts, given, logit_rows) if head is None else torch.cat(pieces)
    if not left_early and settings.postprocess is not None:
        output = settings.postprocess(inputs, output)
    return output


def look_at(settings: LanguageSettings, plan: AttentionPlan) -> None:
    """Precompute on the host what a forward needs from a plan, so that `run_language` does not wait for a GPU."""
    for limits in tuple(settings.limits):
        narrowed(plan, limits)
    _parts(settings, plan)


def _parts(settings: LanguageSettings, plan: AttentionPlan) -> list[Document]:
    """Samples that each get their own call; empty if one call takes all of them."""
    if settings.packing == ROWS:
        check_rows(plan)
    if settings.packing == ALONE or (settings.limit is not None and longest(plan) > settings.limit):
        return documents(plan)
    return []


def _call(
    module: nn.Module,
    backend: Backend,
    entry: nn.Module,
    head: nn.Module | None,
    plan: AttentionPlan,
    positions: Tensor,
    given: Tensor,
    per_layer: Tensor | None,
    hidden: Tensor | None,
    logit_rows: Tensor | None,
    columns: Tensor | None = None,
    *,
    deep: Deepstack | None,
) -> tuple[Any, bool]:
    """One call of the module: (its output, False) or (hidden state, True), as in `run` of slice.py."""
    kwargs: Inputs = {"inputs_embeds": given, "position_ids": as_model_wants(positions)}
    if per_layer is not None:
        kwargs["per_layer_inputs"] = per_layer
    selects_rows = logit_rows is not None and "logits_to_keep" in inspect.signature(module.forward).parameters
    if logit_rows is not None and selects_rows:
        columns = logit_rows.any(0).nonzero().squeeze(1) if columns is None else columns
        kwargs["logits_to_keep"] = columns.to(given.device)
    with use_plan(plan, backend=backend), handing(module, deep), nullcontext() if head is None else ending_at(head):
        output, left_early = run(module, entry, kwargs, hidden=hidden)
    if logit_rows is None or (left_early and head is None):
        return output, left_early
    made = output if head is not None else output.logits
    if selects_rows and len(logit_rows) == 1:
        selected = made[0]
    elif len(logit_rows) == 1 and columns is not None:
        selected = made[0][columns]
    else:  # synchronizes with a GPU
        selected = made[(logit_rows[:, columns] if selects_rows else logit_rows).to(made.device)]
    if head is not None:
        assert left_early
        return selected, True
    output.logits = selected.unsqueeze(0)
    return output, left_early


def _joined(outputs: list[Any], parts: list[Document], given: Tensor, logit_rows: Tensor | None) -> Any:
    """Join the results of one-sample calls into the result of a single call."""
    left = isinstance(outputs[0], Tensor)
    pieces = outputs if left else [output.logits for output in outputs]
    if not left and logit_rows is not None:
        return CausalLMOutput(logits=torch.cat(pieces, dim=1))
    joined = pieces[0].new_zeros(*given.shape[:2], *pieces[0].shape[2:])
    for part, piece in zip(parts, pieces):
        part.of(joined).copy_(piece)
    return joined if left else CausalLMOutput(logits=joined)


def embed(
    module: nn.Module, settings: LanguageSettings, inputs: Inputs, parts: list[Document], device: torch.device
) -> Inputs:
    """Return `inputs` with inputs_embeds [B, T, D]: text embeddings with the encoders' features merged in.

    Also adds deepstack and, for models that need them, per_layer_inputs (see interlace.model.stages.shared).
    parts: samples whose embeddings are made in separate calls.
    """
    ids = inputs["input_ids"].to(device)
    table: Any = module.get_input_embeddings()  # type: ignore[operator]
    embeds = _joined([table(part.of(ids)) for part in parts], parts, ids, None) if parts else table(ids)
    given = {**inputs, "input_ids": ids, "inputs_embeds": embeds, "placeholders": settings.placeholders}
    given["per_layer_inputs"] = per_layer_inputs(module, ids, every_id(settings.placeholders))
    features, given["deepstack"] = split_features(settings.deepstack, inputs.get("features") or {}, given)
    return {**given, **settings.merge(features, given)}


def as_model_wants(positions: Tensor) -> Tensor:
    """position_ids in HuggingFace's layout: [B, T] unchanged; [B, T, k] becomes [k, B, T] for k positions per token."""
    return positions if positions.dim() == 2 else positions.movedim(-1, 0)


def plan_of(inputs: Inputs) -> AttentionPlan:
    """The collated plan, or one built from the mask."""
    plan = inputs.get("plan")
    return AttentionPlan.build(inputs["mask"]) if plan is None else plan


def plan_after(plan: AttentionPlan, before: Inputs, after: Inputs) -> AttentionPlan:
    """The plan after a merge callback turned `before` into `after`. The callback may replace the mask or plan."""
    if after.get("plan") is not before.get("plan"):
        return plan_of(after)
    return plan if after.get("mask") is before.get("mask") else AttentionPlan.build(after["mask"])
