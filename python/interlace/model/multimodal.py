"""MultimodalModel: encoders and a language model glued into one trainable module, and cut into pipeline stages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from interlace.masks import BitfieldMask
from interlace.model.checkpointing import Checkpointing, check_checkpointing, set_checkpointing
from interlace.model.collate import check_bidirectional, collate_language, collate_media
from interlace.model.deepstack import check_deepstack
from interlace.model.describe import LayerInfo, describe_layers
from interlace.model.generate import generate
from interlace.model.language import LanguageSettings, merge_tokens, run_language
from interlace.model.loss import cross_entropy_sum
from interlace.model.modality import ModalityModule
from interlace.model.module_folder import FACTS, load_projectors, read_modules, save_modules
from interlace.model.naming import LANGUAGE_MODEL, resolve
from interlace.model.placeholders import Ids, check_placeholders, configured
from interlace.model.projector import unit_of
from interlace.model.rows import ROWS
from interlace.model.sample import IGNORE, Sample, check_samples, refuse_copies
from interlace.model.shared import check_cut
from interlace.model.slice import carve, find_layers
from interlace.model.stage import StageModule, frozen_modules, keep_frozen
from interlace.model.switch import use_bitfield_attention
from interlace.model.trial_encoder import encoder_cuts
from interlace.model.trial_language import allowed_cuts, caches_right, language_packing
from interlace.model.whole import new_folder, put_together, read_whole, save_whole, take_apart
from interlace.model.whole_parts import decoder_layers
from interlace.model.whole_tower import WholeEncoder


@dataclass
class MultimodalOutput:
    """loss: mean cross entropy over valid targets [nats], None without labels; logits [B, T, V]; targets: how many."""

    loss: Tensor | None
    logits: Tensor
    targets: int


class Encoders(nn.ModuleDict):
    """Encoder name -> ModalityModule."""

    def __getitem__(self, name: str) -> ModalityModule:
        encoder = super().__getitem__(name)
        assert isinstance(encoder, ModalityModule)
        return encoder


class MultimodalModel(nn.Module):
    """Encoders feeding one language model (Cornstarch 2025-03 section 3): a plain single-device module.

    encoders: name -> ModalityModule. language_model: a HuggingFace causal LM, or a ModalityModule(llm, projector=None)
    with callbacks. placeholders: encoder name -> the token id that stands for one of its features, or several (image
    and video); by default what the language model's config says (image_token_id or image_token_index, likewise for
    audio). preprocess(features, inputs) -> inputs merges features into inputs["inputs_embeds"]; see merge_tokens.
    backend: attention backend, None = the fastest. bidirectional: whether the tokens of a media item see each other
    both ways or are causal as text is (LLaVA, Qwen-VL); JOINED of collate.py: both ways also in items that touch (Gemma
    3). positions: sample -> int64 [L, k], for a model whose tokens have k positions each. deepstack: how many of its
    first layers add features (deepstack.py). generators must be empty: this version trains models that produce text.

    Parameters are named "encoders.<name>.module...", "encoders.<name>.projector..." and "language_model...".
    `packing` says how samples share a batch of each module. Raises ValueError for parts that do not fit each other and
    for a language model that is not itself in here (see trial_language.py).
    """

    def __init__(
        self,
        encoders: Mapping[str, ModalityModule] | None = None,
        language_model: nn.Module | None = None,
        generators: Mapping[str, nn.Module] | None = None,
        preprocess: Callable[[Mapping[str, Tensor], dict[str, Any]], dict[str, Any]] = merge_tokens,
        placeholders: Mapping[str, Ids] | None = None,
        backend: str | None = None,
        bidirectional: bool | str = True,
        positions: Callable[[Sample], Tensor] | None = None,
        deepstack: int = 0,
    ):
        super().__init__()
        if language_model is None:
            raise ValueError("a MultimodalModel needs a language_model")
        if generators:
            raise ValueError(f"generators ({', '.join(generators)}) are not part of this version: pass none")
        encoders, placeholders = dict(encoders or {}), dict(placeholders or {})
        before = after = None
        path = None
        if isinstance(language_model, ModalityModule):
            before, after = language_model.preprocess, language_model.postprocess
            path, language_model = language_model.layer_path, language_model.module
        use_bitfield_attention(language_model)
        self.encoders = Encoders(encoders)
        self.language_model = language_model
        whole: Any = language_model.config
        config: Any = whole.get_text_config()
        self.vocab_size = int(config.vocab_size)
        if getattr(config, "output_router_logits", False):
            raise ValueError(
                f"{type(language_model).__name__} has output_router_logits=True, for an auxiliary loss of its routers "
                "that a MultimodalModel does not have: set config.output_router_logits to False to train without it"
            )
        for name, encoder in encoders.items():
            token = configured(getattr(encoder, "kind", ""), whole, config)
            if name not in placeholders and token is not None:
                placeholders[name] = token
        check_placeholders(encoders, placeholders, self.vocab_size)
        for name, encoder in encoders.items():
            if not isinstance(encoder, ModalityModule) or name == LANGUAGE_MODEL or "." in name:
                raise ValueError(
                    f"encoder {name!r} must be a ModalityModule, under a name without '.' other than {LANGUAGE_MODEL!r}"
                )
            encoder.connect(int(config.hidden_size))
            encoder.backend = backend
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.language_settings = LanguageSettings(
            layer_path=find_layers(language_model, path or decoder_layers(language_model)),
            placeholders={name: placeholders[name] for name in encoders},
            merge=preprocess,
            preprocess=before,
            postprocess=after,
            backend=backend,
            bidirectional=check_bidirectional(bidirectional),
            positions=positions,
            deepstack=deepstack,
        )
        self._packing = language_packing(language_model, self.language_settings, self.max_length)
        self.language_settings.packing, self.language_settings.limit = self._packing.name, self._packing.limit
        self.language_settings.ends_with_head = self._packing.ends_with_head
        self._cuts: dict[str, list[bool]] = {}  # see slice
        self._caches: bool | None = None
        self._frozen: dict[str, bool] = {}  # see keep_frozen
        # Some weights are constants by design (Whisper's sinusoids): unfreezing must not make them trainable.
        self._constant = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}

    # ------------------------------------------------------------------ checkpoints

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> MultimodalModel:
        """A whole HuggingFace checkpoint, cut into an encoder ("vision" or "audio") and "language_model".

        Or a model of modules that `save_pretrained` wrote. dtype: of the weights, by default that of the checkpoint.
        Raises ValueError for a folder that holds no such model, or not all of it, and for a model whose modules would
        not compute what HuggingFace's class does.
        """
        folder = Path(folder)
        if (folder / FACTS).exists():
            made = cls(**read_modules(folder, dtype), backend=backend)
            load_projectors({name: made.encoders[name] for name in made.encoders}, folder)
        else:
            made = cls.of_whole(read_whole(folder, dtype), backend=backend)
        made.source = folder
        return made.to(device)

    @classmethod
    def of_whole(cls, whole: Any, *, backend: str | None = None) -> MultimodalModel:
        """The modules of HuggingFace's model, whose weights they share. Raises ValueError as `from_pretrained`."""
        return cls(**take_apart(whole)._asdict(), backend=backend)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what HuggingFace's from_pretrained loads again, with the tokenizer and processor that came with it.

        A model that was put together from modules becomes a folder per module: see module_folder.py. Raises ValueError
        for a folder that is there and not empty, and for what cannot be written.
        """
        encoders = {name: self.encoders[name] for name in self.encoders}
        with new_folder(Path(folder)) as made:
            if any(isinstance(encoder, WholeEncoder) for encoder in encoders.values()):
                save_whole(self.whole(), made, self.source)
            else:
                save_modules(encoders, self.language_model, self.language_settings, made, self.source)

    def whole(self) -> Any:
        """HuggingFace's whole model again, which shares the weights. Raises ValueError if this is none."""
        encoder = next((self.encoders[name] for name in self.encoders), None)
        if not isinstance(encoder, WholeEncoder):
            raise ValueError("this model was put together from modules: HuggingFace has no class of it")
        return put_together(encoder, self.language_model)

    def name_in_whole(self, name: str) -> str:
        """What HuggingFace's whole model calls a parameter of this one."""
        path = name.split(".")
        return ".".join(path[1:] if path[0] == LANGUAGE_MODEL else path[3:])

    source: Path | None = None
    """The folder of `from_pretrained`."""

    # ------------------------------------------------------------------ structure

    def modules_order(self) -> list[str]:
        """Names of the modules in the order that data takes: encoders, then "language_model"."""
        return [*self.encoders, LANGUAGE_MODEL]

    def edges(self) -> list[tuple[str, str]]:
        """(producer, consumer) of each tensor that passes between modules."""
        return [(name, LANGUAGE_MODEL) for name in self.encoders]

    @property
    def placeholders(self) -> dict[str, Ids]:
        """Encoder name -> the token id, or ids, that stand for one of its features."""
        return dict(self.language_settings.placeholders)

    @property
    def packing(self) -> dict[str, str]:
        """Module -> how samples share its batch: "packed", "rows" or "alone"; see interlace.model.rows."""
        return {**{name: self.encoders[name].packing for name in self.encoders}, LANGUAGE_MODEL: self._packing.name}

    def layer_list(self, name: str) -> nn.ModuleList:
        """The repeated layers of module `name`, which stages are cut from."""
        self._check_module(name)
        if name != LANGUAGE_MODEL:
            return self.encoders[name].layers
        layers = self.language_model.get_submodule(self.language_settings.layer_path)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def nominal_length(self, name: str) -> int:
        """Tokens of an item of the size that an encoder was configured for, or of a row of the language model's
        positions up to 1,024: for estimates where the lengths of the data are not known."""
        self._check_module(name)
        if name == LANGUAGE_MODEL:
            return min(self.max_length or 1024, 1024)
        return self.encoders[name].nominal_length

    def layers(self, name: str, *, context: float | None = None) -> list[LayerInfo]:
        """The layers of module `name` with parameters and estimated forward FLOPs per token of that module.

        context: keys that a query sees on average (default: all of an item of `nominal_length`, and half for the
        language model, whose queries see what is before them).
        """
        self._check_module(name)
        if name == LANGUAGE_MODEL:
            keys = context if context is not None else self.nominal_length(name) / 2
            return describe_layers(self.language_model, LANGUAGE_MODEL, self.language_settings.layer_path, keys)
        encoder = self.encoders[name]
        keys = context if context is not None else self.nominal_length(name)
        path = f"module.{encoder.layer_path}"
        return describe_layers(
            encoder, f"encoders.{name}", path, keys, encoder.downsample * unit_of(encoder.projector) ** 2
        )

    def tied_parameters(self) -> list[tuple[str, ...]]:
        """Groups of names that are one weight (tied embeddings), each with two names or more."""
        groups: dict[int, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        return [tuple(names) for names in groups.values() if len(names) > 1]

    def slice(
        self,
        name: str,
        start: int,
        stop: int,
        *,
        copy: bool | Literal["modules"] = False,
        checkpointing: Checkpointing | None = None,
    ) -> StageModule:
        """Layers [start, stop) of module `name` as a pipeline stage.

        The stage shares this model's parameters, and modules inside its layers, unless copy=True; with "modules" only
        the parameters, for who puts others into their places. checkpointing: what its layers keep for backward, as in
        `set_checkpointing` (None: as this model's). Raises ValueError for an unknown module, a range that its layers do
        not have, and a cut where later layers need more of earlier ones than the hidden state.
        """
        total = len(self.layer_list(name))
        if not 0 <= start < stop <= total:
            raise ValueError(
                f"{name}: layers {start} to {stop} are no stage of its {total} layers; need 0 <= start < stop <= "
                f"{total} (more stages than layers cannot be)"
            )
        if name == LANGUAGE_MODEL:
            check_cut(self.language_model, total, start, stop)
            check_deepstack(type(self.language_model).__name__, self.language_settings.deepstack, start, stop, total)
        self._check_cuts(name, {start, stop} - {0, total})
        root: nn.Module = self.language_model
        path, returned, zeros = self.language_settings.layer_path, self._packing.returned, False
        if name != LANGUAGE_MODEL:
            returned, zeros = self.encoders[name].returned, self.encoders[name].in_one_row
            root, path = self.encoders[name], f"module.{self.encoders[name].layer_path}"
        recompute = self._checkpointing if checkpointing is None else checkpointing
        part = carve(
            root, path, start, stop, share=not copy, checkpointing=recompute, returned=returned, zeros=zeros,
            shared=root.parameters() if copy == "modules" else (),
        )  # fmt: skip
        if isinstance(part, ModalityModule):
            part.start, part.stop = start, stop
        stage = StageModule(name, part, start, stop, total, self.language_settings, self._frozen)
        return stage.train(self.training)

    # ------------------------------------------------------------------ freezing and modes

    def freeze(self, path: str) -> None:
        """Stop training part of the model and keep it in evaluation mode.

        path: "vision" (an encoder without its projector), "vision.projector", "language_model", or the full name of
        any module inside. Raises ValueError with the nearest valid name.
        """
        for name in resolve(self, path):
            for key, parameter in self.named_parameters(remove_duplicate=False):
                if key == name or key.startswith(f"{name}."):
                    parameter.requires_grad_(False)
            self._forget(name)
            self._frozen[name] = True
        keep_frozen(self, self._frozen)

    def unfreeze(self, path: str) -> None:
        """Train it (again), also inside something frozen. Weights that are constants by design stay so."""
        for name in resolve(self, path):
            self._forget(name)
            self._frozen[name] = False
            for key, parameter in self.named_parameters(remove_duplicate=False):
                if (key == name or key.startswith(f"{name}.")) and key not in self._constant:
                    parameter.requires_grad_(True)
        self.train(self.training)

    def train_only(self, names: Collection[str]) -> None:
        """Train the parameters `names` (of tied ones their first name) and no others.

        A module all of whose parameters are frozen stays in evaluation mode, as by `freeze`. One that has both kinds is
        in training, and drops at random there. Weights that are constants by design stay so.
        """
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in names and name not in self._constant)
        self._frozen.clear()
        self._frozen.update(dict.fromkeys(frozen_modules(self), True))
        self.train(self.training)

    def _forget(self, name: str) -> None:
        """What was said about `name` and its inside; in place, as stages share the dictionary."""
        for said in [said for said in self._frozen if said == name or said.startswith(f"{name}.")]:
            del self._frozen[said]

    def train(self, mode: bool = True) -> MultimodalModel:
        """Switch to training or evaluation; frozen modules stay in evaluation."""
        super().train(mode)
        keep_frozen(self, self._frozen)
        return self

    def set_checkpointing(self, mode: Checkpointing) -> None:
        """What each layer keeps for backward: "none" of it is computed again, "full": all, "selective": what is cheap.

        See `interlace.model.checkpointing`. Raises ValueError for another mode.
        """
        check_checkpointing(mode)
        self._checkpointing = mode
        for name in self.modules_order():
            set_checkpointing(self.layer_list(name), mode)

    _checkpointing: Checkpointing = "none"

    # ------------------------------------------------------------------ data

    def collate(self, samples: Sequence[Sample], only: Collection[str] | None = None) -> dict[str, Any]:
        """The batch of `forward`: input_ids, labels, position_ids, mask and plan, and inputs per encoder with items.

        only: names of the modules to collate for ("language_model" for the ids). Media without data become meta
        tensors, which is all that later stages of their encoder need. Raises ValueError naming the sample at fault.
        """
        names = self.modules_order() if only is None else list(only)
        for name in names:
            self._check_module(name)
        batch = self.collate_module(LANGUAGE_MODEL, samples) if LANGUAGE_MODEL in names else {}
        for name in self.encoders:
            if name in names and any(sample.media.get(name) for sample in samples):
                batch[name] = self.collate_module(name, samples)
        return batch

    def collate_module(self, name: str, samples: Sequence[Sample], *, decode: bool = True) -> dict[str, Any]:
        """Inputs of one module for these samples, as its stages take them.

        decode=False: meta tensors in place of all media, for stages that need shapes only; nothing is loaded.
        """
        self._check_module(name)
        check_samples("collate", samples)
        if name == LANGUAGE_MODEL:
            encoders = {name: self.encoders[name] for name in self.encoders}
            rows = self.language_settings.packing == ROWS
            return collate_language(
                samples,
                encoders,
                self.placeholders,
                self.max_length,
                self.vocab_size,
                rows=rows,
                bidirectional=self.language_settings.bidirectional,
                positions_of=self.language_settings.positions,
            )
        return collate_media(samples, name, self.encoders[name], decode=decode)

    # ------------------------------------------------------------------ forward

    def encode(self, inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        """Features [n, D_llm] of each encoder from its collated inputs. Raises ValueError for an unknown encoder."""
        unknown = [name for name in inputs if name not in self.encoders]
        if unknown:
            near = difflib.get_close_matches(unknown[0], self.encoders, n=1)
            raise ValueError(
                f"the batch has inputs for {unknown[0]!r}, but the encoders are {', '.join(self.encoders) or 'none'}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        return {name: self.encoders[name](**given) for name, given in inputs.items()}

    def generate(self, prompt: Sample, **options: Any) -> list[int]:
        """Token ids that continue `prompt` (its labels do not matter); options: see interlace.model.generate."""
        return generate(self, [prompt], **options)[0]

    def caches_right(self) -> bool:
        """Whether the language model generates with its cache what it would by reading everything for each token."""
        if self._caches is None:
            self._caches = caches_right(self.language_model, self.language_settings, self.max_length)
        return self._caches

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        mask: BitfieldMask | None = None,
        plan: Any = None,
        **encoder_inputs: dict[str, Any],
    ) -> MultimodalOutput:
        """Run the whole model on a collated batch: mllm(**mllm.collate(samples)).

        input_ids, labels (already shifted), position_ids int64 [B, T]; mask or plan: who attends whom, by default
        causal; encoder_inputs: keyword per encoder, its collated inputs. Raises ValueError for unknown encoders, for
        features that do not match the placeholders, for several samples in a row of a model that does not pack, and for
        labels that were not shifted (on a CPU: a GPU would have to be waited for).
        """
        if not isinstance(input_ids, Tensor):
            raise TypeError(f"the model takes a batch, not a {type(input_ids).__name__}: mllm(**mllm.collate(samples))")
        if labels is not None and labels.device.type == input_ids.device.type == "cpu":
            refuse_copies("labels", [(input_ids, labels)])
        if mask is None and plan is None:
            mask = BitfieldMask.causal(*input_ids.shape)
        inputs: dict[str, Any] = {"input_ids": input_ids, "labels": labels, "mask": mask, "plan": plan}
        inputs["position_ids"] = mask.pos.long() if position_ids is None and mask is not None else position_ids
        if inputs["position_ids"] is None:
            raise ValueError("a plan without a mask needs position_ids beside it")
        if self.language_settings.positions is not None and position_ids is None and encoder_inputs:
            raise ValueError("tokens of media have several positions each in this model: pass collate's position_ids")
        inputs["features"] = self.encode(encoder_inputs)
        first_layer = self.layer_list(LANGUAGE_MODEL)[0]
        output = run_language(self.language_model, self.language_settings, first_layer, inputs, None)
        if labels is None:
            return MultimodalOutput(None, output.logits, 0)
        targets = int((labels != IGNORE).sum())
        loss = cross_entropy_sum(output.logits, labels) / max(targets, 1)
        return MultimodalOutput(loss, output.logits, targets)

    # ------------------------------------------------------------------ helpers

    def _check_module(self, name: str) -> None:
        if name != LANGUAGE_MODEL and name not in self.encoders:
            near = difflib.get_close_matches(name, self.modules_order(), n=1)
            raise ValueError(
                f"unknown module {name!r}: the model has {', '.join(self.modules_order())}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )

    def _check_cuts(self, name: str, cuts: Collection[int]) -> None:
        if not cuts:
            return
        module = self.language_model if name == LANGUAGE_MODEL else self.encoders[name].module
        if name not in self._cuts and name == LANGUAGE_MODEL:
            self._cuts[name] = allowed_cuts(
                self.language_model, self.language_settings, self.max_length, self._packing.returned
            )
        elif name not in self._cuts:
            self._cuts[name] = encoder_cuts(self.encoders[name])
        allowed = self._cuts[name]
        for cut in sorted(cuts):
            if not allowed[cut]:
                others = [str(i) for i in range(1, len(allowed)) if allowed[i]]
                raise ValueError(
                    f"{name}: {type(module).__name__} cannot be cut before layer {cut}: its later layers need more of "
                    "the earlier ones than the hidden state. "
                    + (f"Cut it before layer {', '.join(others)}" if others else "Keep this module on one stage")
                )
