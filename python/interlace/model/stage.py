"""StageModule: layers [start, stop) of one module of a multimodal model, ready for a pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from interlace.attention.hf import mask_carrier, use_plan
from interlace.model.modality import ModalityModule
from interlace.model.sample import IGNORE
from interlace.model.slice import SlicedModule, clone, present_parameters


class StageModule(nn.Module):
    """Base of both kinds of stage. ``forward(inputs, hidden)`` maps a microbatch's inputs and the hidden state of the
    stage before (None on the first) to the next hidden state, or on the last stage to the module's result.

    Parameters have the names that they have in the whole model, and are the same objects.
    """

    name: str
    start: int
    stop: int
    is_first: bool
    is_last: bool

    def __init__(self, name: str, start: int, stop: int, sliced: SlicedModule, prefix: str):
        super().__init__()
        self.name, self.start, self.stop = name, start, stop
        self.is_first, self.is_last = sliced.is_first, sliced.is_last
        self._sliced = sliced
        self._prefix = prefix
        self.module = sliced.module

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters present on this stage, by their name in the whole model."""
        yield from present_parameters(self.module, self._prefix, remove_duplicate=remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters present on this stage."""
        for _, parameter in self.named_parameters():
            yield parameter

    def train(self, mode: bool = True) -> StageModule:
        """A module without anything trainable stays in evaluation."""
        super().train(mode)
        self.module.train(mode and any(p.requires_grad for p in self.module.parameters()))
        return self


class EncoderStage(StageModule):
    """Layers of an encoder; the last one ends with the projector and returns [tokens, language model width]."""

    def __init__(self, name: str, modality: ModalityModule, start: int, stop: int, checkpointing: bool):
        sliced = SlicedModule(modality.module, modality.layers_path, start, stop, checkpointing=checkpointing)
        super().__init__(name, start, stop, sliced, f"encoders.{name}.module")
        self._modality = [modality]  # in a list: not a submodule, it holds the whole encoder
        self.projector = clone(modality.projector) if self.is_last and modality.projector is not None else None

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(remove_duplicate=remove_duplicate)
        if self.projector is not None:
            yield from self.projector.named_parameters(f"encoders.{self.name}.projector")

    def train(self, mode: bool = True) -> StageModule:
        super().train(mode)
        if self.projector is not None:
            self.projector.train(mode and any(p.requires_grad for p in self.projector.parameters()))
        return self

    def forward(self, inputs: dict[str, Any], hidden: Tensor | None) -> Tensor:
        """Hidden state [1, tokens, width] (packed images) or [clips, positions, width]; on the last stage features."""
        (modality,) = self._modality
        inputs = modality.complete(inputs)
        with use_plan(inputs["plan"]):
            if modality.main_input == "pixel_values":
                images = inputs["pixel_values"]
                if hidden is None:
                    output = self._packed(modality, images)
                else:
                    meta = torch.empty((1, *images[-1].shape), device="meta", dtype=hidden.dtype)
                    output = self._sliced.run_hidden(hidden, {}, modality.image_inputs(meta))
            elif hidden is None:
                output = self._sliced.run({"input_features": inputs["input_features"]})
            else:
                meta = inputs["input_features"].to("meta", hidden.dtype)
                output = self._sliced.run_hidden(hidden, {}, {"input_features": meta})
        if not self.is_last:
            assert isinstance(output, Tensor)
            return output
        return modality.project(inputs, output)

    def _packed(self, modality: ModalityModule, images: list[Tensor]) -> Any:
        """Embed each image at its own size, then run the layers once over all of them side by side."""
        *first, last = images
        embedded = [self._sliced.capture(modality.image_inputs(image[None])) for image in first]
        return self._sliced.run(
            modality.image_inputs(last[None]), lambda hidden: torch.cat([*embedded, hidden], dim=1)
        )


class LanguageModelStage(StageModule):
    """Layers of the language model; the first merges the encoders' features, the last returns the summed loss."""

    def __init__(
        self,
        language_model: nn.Module,
        path: str,
        start: int,
        stop: int,
        checkpointing: bool,
        merge: Callable[..., Tensor],
    ):
        sliced = SlicedModule(language_model, path, start, stop, checkpointing=checkpointing)
        super().__init__("language_model", start, stop, sliced, "language_model")
        self._merge = merge

    def forward(self, inputs: dict[str, Any], hidden: Tensor | None) -> Tensor:
        """[1, T, width], or on the last stage the cross entropy summed over valid targets (a scalar)."""
        if not self.is_last:
            output = self.run(inputs, hidden)
            assert isinstance(output, Tensor)
            return output
        labels = inputs["labels"].reshape(-1)
        valid = (labels != IGNORE).nonzero().squeeze(1)
        # Logits only where there is a target: the head is the widest product of a small model.
        logits = self.run(inputs, hidden, logits_to_keep=valid).logits[0]
        return nn.functional.cross_entropy(logits.float(), labels[valid], reduction="sum")

    def logits_of(self, inputs: dict[str, Any], hidden: Tensor | None, keep: Tensor | None = None) -> Tensor:
        """Logits [T or len(keep), vocabulary] of the last stage, at positions ``keep`` (int64) or all."""
        extra = {} if keep is None else {"logits_to_keep": keep}
        logits: Tensor = self.run(inputs, hidden, **extra).logits[0]
        return logits

    def run(self, inputs: dict[str, Any], hidden: Tensor | None, **extra: Any) -> Any:
        """The module's forward between its cuts."""
        plan = inputs["plan"]
        if hidden is None:
            embeddings = self.module.get_input_embeddings()(inputs["input_ids"])  # type: ignore[operator]
            hidden = self._merge(embeddings, inputs["input_ids"], inputs.get("features") or {})
        with use_plan(plan):
            return self._sliced.run_hidden(
                hidden,
                {
                    "attention_mask": mask_carrier(plan),
                    "position_ids": inputs["position_ids"],
                    "use_cache": False,
                    **extra,
                },
                {},
            )
