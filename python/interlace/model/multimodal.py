"""MultimodalModel: encoders, projectors and a language model, assembled from unmodified HuggingFace modules."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interlace.attention import AttentionPlan
from interlace.attention.hf import register
from interlace.masks import BitfieldMask
from interlace.model.collate import pack
from interlace.model.describe import LayerInfo, describe
from interlace.model.modality import ModalityModule
from interlace.model.sample import IGNORE, Sample
from interlace.model.slice import find_layers
from interlace.model.stage import EncoderStage, LanguageModelStage, StageModule

register()

LANGUAGE_MODEL = "language_model"


@dataclass
class MultimodalOutput:
    """loss: mean cross entropy over valid targets in nats (None without labels). logits: [1, T, vocabulary]."""

    loss: Tensor | None
    logits: Tensor


def merge_tokens(
    embeddings: Tensor, input_ids: Tensor, features: Mapping[str, Tensor], placeholders: Mapping[str, int]
) -> Tensor:
    """Put each encoder's features, in order, where its placeholder stands (the default ``preprocess``).

    embeddings [B, T, D], input_ids [B, T], features[name] [tokens, D] -> [B, T, D]. Raises ValueError when the
    number of placeholders of a modality is not the number of its features.
    """
    for name, token in placeholders.items():
        where = input_ids == token
        count = int(where.sum())
        found = len(features[name]) if name in features else 0
        if count != found:
            raise ValueError(
                f"{count} placeholder tokens (id {token}) for {name!r} but its encoder made {found} features: check "
                "that the tokenizer's placeholder id is the model's, and that every item has Media.tokens "
                f"placeholders (encoders[{name!r}].tokens(shape))"
            )
        if found:
            embeddings = embeddings.masked_scatter(where[..., None], features[name].to(embeddings.dtype))
    return embeddings


class MultimodalModel(nn.Module):
    """Encoders that feed a language model (cornstarch-2025-03 sections 3.2 and 5.1).

    encoders: name -> ModalityModule. Its features replace the placeholder tokens ``placeholders[name]``.
    language_model: a HuggingFace causal language model with ``attn_implementation="interlace"``.
    generators: modules after the language model; none in this version.
    preprocess: ``(embeddings, input_ids, features, placeholders) -> embeddings`` before the language model.
    """

    def __init__(
        self,
        encoders: Mapping[str, ModalityModule],
        language_model: nn.Module,
        generators: Mapping[str, nn.Module] | None = None,
        preprocess: Callable[..., Tensor] = merge_tokens,
        *,
        placeholders: Mapping[str, int] | None = None,
        layers: str | None = None,
    ):
        super().__init__()
        if generators:
            raise ValueError(f"generators are not supported in this version; got {', '.join(generators)}")
        if LANGUAGE_MODEL in encoders:
            raise ValueError(f"an encoder cannot be named {LANGUAGE_MODEL!r}: that is the language model's name")
        if isinstance(language_model, ModalityModule):
            language_model = language_model.module
        config: Any = language_model.config
        self.placeholders = dict(placeholders or {})
        if set(self.placeholders) != set(encoders):
            raise ValueError(
                f"placeholders are given for {sorted(self.placeholders)}, encoders are {sorted(encoders)}: "
                "each encoder needs the id of its placeholder token"
            )
        for name, token in self.placeholders.items():
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"placeholder {token} of {name!r} is outside the language model's vocabulary of "
                    f"{config.vocab_size}: raise vocab_size, or use the tokenizer that the model was made for"
                )
        if len(set(self.placeholders.values())) < len(self.placeholders):
            raise ValueError(f"two encoders share a placeholder token: {self.placeholders}")
        for name, module in [*((n, e.module) for n, e in encoders.items()), (LANGUAGE_MODEL, language_model)]:
            found = getattr(module.config, "_attn_implementation", None)
            if found != "interlace":
                raise ValueError(
                    f"{name} was built with attn_implementation={found!r}: give its config "
                    "attn_implementation='interlace', packed inputs need masks that only it applies"
                )
        self.encoders = nn.ModuleDict(dict(encoders))
        for encoder in encoders.values():
            encoder.connect(config.hidden_size)
        self.language_model = language_model
        self.layers_path = layers or find_layers(language_model)
        self.preprocess = preprocess

    # -- structure -------------------------------------------------------------------------------------------

    def modules_order(self) -> list[str]:
        """Encoders in order, then the language model."""
        return [*self.encoders, LANGUAGE_MODEL]

    def edges(self) -> list[tuple[str, str]]:
        """(producer, consumer) of the module graph."""
        return [(name, LANGUAGE_MODEL) for name in self.encoders]

    def layers(self, name: str) -> list[LayerInfo]:
        """The layers that stages of module ``name`` are cut to, with what each costs and whether it trains."""
        self._check_name(name)
        if name == LANGUAGE_MODEL:
            return describe(self.language_model, self.layers_path, LANGUAGE_MODEL)
        encoder = self.encoders[name]
        return describe(
            encoder.module,
            encoder.layers_path,
            f"encoders.{name}.module",
            ("projector", encoder.projector, 1.0 / encoder.downsample),
        )

    def slice(self, name: str, start: int, stop: int, *, checkpointing: bool = False) -> StageModule:
        """Layers ``[start, stop)`` of module ``name`` as a stage that shares this model's parameters.

        The first stage includes what comes before the layers (embeddings), the last what comes after (norm, head,
        projector). ``checkpointing`` recomputes each layer's activations in backward.
        """
        self._check_name(name)
        if name == LANGUAGE_MODEL:
            return LanguageModelStage(
                self.language_model, self.layers_path, start, stop, checkpointing, self._merge
            ).train(self.training)
        return EncoderStage(name, self.encoders[name], start, stop, checkpointing).train(self.training)

    def tied_parameters(self) -> list[tuple[str, ...]]:
        """Groups of names that are one weight, such as the embedding and the head of a tied language model."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return [tuple(group) for group in names.values() if len(group) > 1]

    def _merge(self, embeddings: Tensor, input_ids: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        return self.preprocess(embeddings, input_ids, features, self.placeholders)

    def _check_name(self, name: str) -> None:
        if name not in self.modules_order():
            raise ValueError(f"unknown module {name!r}: the model has {', '.join(self.modules_order())}{_near(name, self.modules_order())}")

    # -- freezing --------------------------------------------------------------------------------------------

    def freeze(self, path: str) -> None:
        """Stop training a part: "vision" (the encoder without its projector), "vision.projector", "language_model"."""
        self._part(path).requires_grad_(False)
        self.train(self.training)

    def unfreeze(self, path: str) -> None:
        """Undo `freeze`. Parameters that the module itself never trains stay fixed only if they are frozen again."""
        self._part(path).requires_grad_(True)
        self.train(self.training)

    def _part(self, path: str) -> nn.Module:
        parts: dict[str, nn.Module] = {LANGUAGE_MODEL: self.language_model}
        for name, encoder in self.encoders.items():
            parts[name] = encoder.module
            parts[f"{name}.projector"] = encoder.projector
        if path not in parts:
            raise ValueError(f"cannot freeze {path!r}: the parts are {', '.join(parts)}{_near(path, parts)}")
        return parts[path]

    def train(self, mode: bool = True) -> MultimodalModel:
        """A part without anything trainable stays in evaluation."""
        super().train(mode)
        for part in [self.language_model, *(p for e in self.encoders.values() for p in (e.module, e.projector))]:
            part.train(mode and any(p.requires_grad for p in part.parameters()))
        return self

    # -- running ---------------------------------------------------------------------------------------------

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """One batch for ``mllm(**batch)``: text packed into one row, inputs of each encoder that has items."""
        batch = self.collate_module(LANGUAGE_MODEL, samples)
        batch.pop("plan")
        for name in self.encoders:
            if any(sample.media.get(name) for sample in samples):
                batch[name] = self.collate_module(name, samples)
        return batch

    def collate_module(self, name: str, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the stages of module ``name`` read of a microbatch. Media without data become meta tensors."""
        self._check_name(name)
        for sample in samples:
            for modality in sample.media:
                if modality not in self.encoders:
                    raise ValueError(
                        f"sample {sample.name!r} has {modality!r} media, the model's encoders are "
                        f"{', '.join(self.encoders)}{_near(modality, self.encoders)}"
                    )
        if name == LANGUAGE_MODEL:
            device = next(self.language_model.parameters()).device
            inputs = pack(samples, self.placeholders, device)
            return {**inputs, "plan": AttentionPlan.build(inputs["mask"]).to(device)}
        return self.encoders[name].collate([item for sample in samples for item in sample.media.get(name, [])])

    def encode(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Features of every encoder that has inputs in ``batch``, [tokens, language model width]."""
        features = {}
        for name, encoder in self.encoders.items():
            if batch.get(name):
                features[name] = self.slice(name, 0, encoder.num_layers)(batch[name], None)
        return features

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        mask: BitfieldMask | None = None,
        **encoder_inputs: Any,
    ) -> MultimodalOutput:
        """The whole model in this process.

        input_ids, labels [1, T] int64 (labels already shifted, -100 without target); position_ids [1, T] restart at
        each document; mask: BitfieldMask [1, T], by default causal; encoder inputs by encoder name.
        """
        unknown = [name for name in encoder_inputs if name not in self.encoders]
        if unknown:
            raise ValueError(f"unknown inputs {', '.join(unknown)}: encoders are {', '.join(self.encoders)}")
        if mask is None:
            mask = BitfieldMask.causal(*input_ids.shape).to(input_ids.device)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand_as(input_ids)
        inputs = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "plan": AttentionPlan.build(mask).to(input_ids.device),
            "features": self.encode(encoder_inputs),
        }
        count = len(self.language_model.get_submodule(self.layers_path))  # type: ignore[arg-type]
        stage = self.slice(LANGUAGE_MODEL, 0, count)
        logits = stage.run(inputs, None).logits  # type: ignore[operator]
        loss = None
        if labels is not None:
            valid = int((labels != IGNORE).sum())
            total = nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            loss = total / max(valid, 1)
        return MultimodalOutput(loss, logits)


def _near(word: str, words: Any) -> str:
    found = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
