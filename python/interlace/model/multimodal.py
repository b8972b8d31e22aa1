"""MultimodalModel: encoders and a language model joined into one trainable module that can be cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interlace.attention import AttentionPlan
from interlace.masks import BitfieldMask
from interlace.model.checkpointing import Checkpointing, check_checkpointing, set_checkpointing
from interlace.model.checkpoints.module_folder import FACTS, load_projectors, read_modules, save_modules
from interlace.model.collate import check_bidirectional, collate_language
from interlace.model.counting.layers import LayerInfo, describe_layers
from interlace.model.generate import generate
from interlace.model.inputs.placeholders import Ids, check_placeholders, configured
from interlace.model.language import LanguageSettings, MediaOptions, merge_tokens, run_language
from interlace.model.loss import cross_entropy_sum
from interlace.model.modality import Encoders, ModalityModule
from interlace.model.naming import LANGUAGE_MODEL, did_you_mean, inside, resolve
from interlace.model.probe.encoder import encoder_cuts
from interlace.model.probe.language import allowed_cuts, caches_right, language_packing
from interlace.model.probe.separation import check_cuts
from interlace.model.rows import ROWS
from interlace.model.sample import IGNORE, Sample, check_samples, refuse_copies
from interlace.model.stages.attention_switch import use_bitfield_attention
from interlace.model.stages.deepstack import check_deepstack
from interlace.model.stages.shared import check_cut
from interlace.model.stages.slice import carve, find_layers
from interlace.model.stages.stage import StageModule, frozen_modules, keep_frozen
from interlace.model.whole.model import copy_original, new_folder, read_whole, take_apart
from interlace.model.whole.parts import check_fed, decoder_layers
from interlace.model.whole.tower import WholeEncoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from typing_extensions import Unpack


@dataclass
class MultimodalOutput:
    """Output of `MultimodalModel.forward`.

    loss: mean cross entropy over valid targets [nats]; None without labels.
    logits: [B, T, V].
    targets: number of valid targets.
    """

    loss: Tensor | None
    logits: Tensor
    targets: int


class MultimodalModel(nn.Module):
    """Encoders that feed one language model (Cornstarch 2025-03 section 3): a plain single-device module.

    encoders: name -> ModalityModule.
    language_model: a HuggingFace causal LM, or a ModalityModule(llm, projector=None) with callbacks.
    generators: must be empty. This version trains models that produce text.
    preprocess: (features, inputs) -> inputs; merges features into inputs["inputs_embeds"], see merge_tokens.
    placeholders: encoder name -> the token id of its features, or several ids (image and video). Default: the ids in
    the language model's config (image_token_id or image_token_index, likewise for audio).
    backend: attention backend; None = the fastest.
    bidirectional: True = the tokens of a media item attend to each other in both directions. False = they are causal,
    like text (LLaVA, Qwen-VL). JOINED of collate.py = bidirectional also across adjacent items (Gemma 3).
    positions: sample -> int64 [L, k], for a model whose tokens have k positions each.
    deepstack: number of first layers that add features (deepstack.py).

    Parameters are named "encoders.<name>.module...", "encoders.<name>.projector..." and "language_model...". `packing`
    is the packing kind of each module. Raises ValueError for parts that do not fit each other, and for a language model
    whose results in a MultimodalModel differ from its own (see probe/language.py).
    """

    def __init__(
        self,
        encoders: Mapping[str, ModalityModule] | None = None,
        language_model: nn.Module | None = None,
        generators: Mapping[str, nn.Module] | None = None,
        preprocess: Callable[[Mapping[str, Tensor], dict[str, Any]], dict[str, Any]] = merge_tokens,
        placeholders: Mapping[str, Ids] | None = None,
        backend: str | None = None,
        **media: Unpack[MediaOptions],
    ):
        super().__init__()
        if unknown := media.keys() - MediaOptions.__annotations__.keys():
            raise TypeError(f"MultimodalModel.__init__() got an unexpected keyword argument {min(unknown)!r}")
        check_bidirectional(media.get("bidirectional", True))
        if language_model is None:
            raise ValueError("a MultimodalModel needs a language_model")
        if generators:
            raise ValueError(f"generators ({', '.join(generators)}) are not supported in this version: pass none")
        encoders, placeholders = dict(encoders or {}), dict(placeholders or {})
        before = after = None
        path = None
        if isinstance(language_model, ModalityModule):
            before, after = language_model.preprocess, language_model.postprocess
            path, language_model = language_model.layer_path, language_model.module
        use_bitfield_attention(language_model)
        self.encoders = Encoders(encoders)
        self.language_model: PreTrainedModel = language_model
        whole: PretrainedConfig = language_model.config
        config: PretrainedConfig = whole.get_text_config()
        self.vocab_size = int(config.vocab_size)
        if getattr(config, "output_router_logits", False):
            raise ValueError(
                f"{type(language_model).__name__} has output_router_logits=True, but a MultimodalModel does not "
                "support an auxiliary router loss: set config.output_router_logits to False to train without it"
            )
        for name, encoder in encoders.items():
            token = configured(getattr(encoder, "kind", ""), whole, config)
            if name not in placeholders and token is not None:
                placeholders[name] = token
        check_placeholders(encoders, placeholders, self.vocab_size)
        for name, encoder in encoders.items():
            if not isinstance(encoder, ModalityModule) or name == LANGUAGE_MODEL or "." in name:
                raise ValueError(
                    f"encoder {name!r} must be a ModalityModule, with a name without '.' other than {LANGUAGE_MODEL!r}"
                )
            encoder.connect(int(config.hidden_size))
            encoder.backend = backend
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.language_settings = LanguageSettings(
            layer_path=find_layers(language_model, path or decoder_layers(language_model)),
            placeholders={name: placeholders[name] for name in encoders},
            max_length=self.max_length,
            merge=preprocess,
            preprocess=before,
            postprocess=after,
            backend=backend,
            **media,
        )
        self._packing = language_packing(language_model, self.language_settings)
        if encoders:
            check_fed(language_model, self.language_settings.layer_path, self._packing.unread)
        self.language_settings.packing, self.language_settings.limit = self._packing.name, self._packing.limit
        self.language_settings.ends_with_head = self._packing.ends_with_head
        self._cuts: dict[str, list[bool | str]] = {}  # see slice
        self._counted: dict[str, Any] = {}  # see counting/layers.py
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
        """Load a whole HuggingFace checkpoint, split into an encoder ("vision" or "audio") and "language_model".

        The folder may also hold a model of modules that `save_pretrained` wrote.
        dtype: of the weights; default: that of the checkpoint.
        Raises ValueError for a folder without such a model or with an incomplete one, and for a model whose modules
        would not compute the same as HuggingFace's class.
        """
        folder = Path(folder)
        if (folder / FACTS).exists():
            made = cls(**read_modules(folder, dtype), backend=backend)
            load_projectors(dict(made.encoders), folder)
        else:
            made = cls.of_whole(read_whole(folder, dtype), backend=backend)
        made.source = folder
        return made.to(device)

    @classmethod
    def of_whole(cls, whole: PreTrainedModel, *, backend: str | None = None) -> MultimodalModel:
        """Build a model from HuggingFace's; the modules share its weights. Raises ValueError as `from_pretrained`."""
        return cls(**take_apart(whole)._asdict(), backend=backend)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder that HuggingFace's from_pretrained loads, with the original tokenizer and processor.

        A model that was built from modules becomes one folder per module: see module_folder.py. Raises ValueError for
        an existing folder that is not empty, and for settings that cannot be saved.
        """
        with new_folder(Path(folder)) as made:
            if any(isinstance(encoder, WholeEncoder) for encoder in self.encoders.values()):
                self.whole().save_pretrained(made)
                copy_original(self.source, made)
            else:
                save_modules(dict(self.encoders), self.language_model, self.language_settings, made, self.source)

    def whole(self) -> PreTrainedModel:
        """HuggingFace's whole model; it shares the weights. Raises ValueError if this model was built from modules."""
        encoder = next(iter(self.encoders.values()), None)
        if not isinstance(encoder, WholeEncoder):
            raise ValueError("this model was built from modules: HuggingFace has no class for it")
        return encoder.parts.joined(self.language_model, encoder.module.base)

    def name_in_whole(self, name: str) -> str:
        """Name of a parameter in HuggingFace's whole model."""
        path = name.split(".")
        return ".".join(path[1:] if path[0] == LANGUAGE_MODEL else path[3:])

    source: Path | None = None
    """The folder of `from_pretrained`."""

    # ------------------------------------------------------------------ structure

    def modules_order(self) -> list[str]:
        """Names of the modules in data-flow order: encoders, then "language_model"."""
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
        """Module -> packing kind of its batch: "packed", "rows" or "alone"; see interlace.model.rows."""
        return {name: each.packing for name, each in dict(self.encoders).items()} | {LANGUAGE_MODEL: self._packing.name}

    def layer_list(self, name: str) -> nn.ModuleList:
        """The repeated layers of module `name`. Stages are slices of this list."""
        root, path = self.root(name)
        layers = root.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def root(self, name: str) -> tuple[nn.Module, str]:
        """Module `name` and the path of its layers inside it."""
        self._check_module(name)
        if name == LANGUAGE_MODEL:
            return self.language_model, self.language_settings.layer_path
        return self.encoders[name], f"module.{self.encoders[name].layer_path}"

    def nominal_length(self, name: str) -> int:
        """Typical tokens of module `name`, for estimates without known data lengths.

        For an encoder: tokens of an item of its configured size. For the language model: its maximum positions, at most
        1,024.
        """
        self._check_module(name)
        if name == LANGUAGE_MODEL:
            return min(self.max_length or 1024, 1024)
        return self.encoders[name].nominal_length

    def layers(self, name: str, *, context: float | None = None) -> list[LayerInfo]:
        """The layers of module `name` with parameters and counted forward FLOPs per token of that module.

        context: average number of keys that a query sees. Default: all of an item of `nominal_length`; half of that for
        the causal language model.
        """
        if context is None:
            context = self.nominal_length(name) / (2 if name == LANGUAGE_MODEL else 1)
        return describe_layers(self, name, context)

    def tied_parameters(self) -> list[tuple[str, ...]]:
        """Groups of parameter names that share one weight (tied embeddings). Each group has at least two names."""
        groups: dict[int, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        return [tuple(names) for names in groups.values() if len(names) > 1]

    def check_stage(self, name: str, start: int, stop: int) -> None:
        """Raise ValueError for the same stages as `slice`, without creating the stage."""
        total = len(self.layer_list(name))
        if not 0 <= start < stop <= total:
            raise ValueError(
                f"{name}: layers {start} to {stop} are not a valid stage of its {total} layers; need 0 <= start < stop "
                f"<= {total} (at most one stage per layer)"
            )
        if name == LANGUAGE_MODEL:
            check_cut(self.language_model, total, start, stop)
            check_deepstack(type(self.language_model).__name__, self.language_settings.deepstack, start, stop, total)
        self._check_cuts(name, {start, stop} - {0, total})

    def slice(
        self,
        name: str,
        start: int,
        stop: int,
        *,
        copy: bool | dict[int, Any] = False,
        checkpointing: Checkpointing | None = None,
    ) -> StageModule:
        """Layers [start, stop) of module `name` as a pipeline stage.

        copy: False = the stage shares this model's parameters and the modules inside its layers. True = it gets copies.
        A `copy.deepcopy` memo = copies, except for objects that the memo lists.
        checkpointing: activation checkpointing of its layers, as in `set_checkpointing`; None: as in this model.
        Raises ValueError for an unknown module, for a range outside its layers, and for a cut across which later layers
        need more from earlier ones than the hidden state.
        """
        self.check_stage(name, start, stop)
        recompute = self._checkpointing if checkpointing is None else checkpointing
        memo = copy if isinstance(copy, dict) else None
        cut = partial(carve, share=copy is False, checkpointing=recompute, memo=memo)
        if name == LANGUAGE_MODEL:
            path, returned = self.language_settings.layer_path, self._packing.returned
            part = cut(self.language_model, path, start, stop, returned=returned)
        else:
            part = self.encoders[name].stage(start, stop, cut)
        stage = StageModule(name, part, start, stop, len(self.layer_list(name)), self.language_settings, self._frozen)
        return stage.train(self.training)

    # ------------------------------------------------------------------ freezing and modes

    def freeze(self, path: str) -> None:
        """Stop training part of the model and keep it in evaluation mode.

        path: "vision" (an encoder without its projector), "vision.projector", "language_model", or the full name of
        any module inside. Raises ValueError with the nearest valid name.
        """
        self._train_part(path, False)
        keep_frozen(self, self._frozen)

    def unfreeze(self, path: str) -> None:
        """Train this part again, also inside a frozen part. Weights that are constants by design stay frozen."""
        self._train_part(path, True)
        self.train(self.training)

    def _train_part(self, path: str, trained: bool) -> None:
        for name in resolve(self, path):
            for key, parameter in self.named_parameters(remove_duplicate=False):
                if inside(key, name) and not (trained and key in self._constant):
                    parameter.requires_grad_(trained)
            # In place, because stages share the dictionary.
            for pattern in [pattern for pattern in self._frozen if inside(pattern, name)]:
                del self._frozen[pattern]
            self._frozen[name] = not trained

    def train_only(self, names: Collection[str]) -> None:
        """Train the parameters `names` and no others. For tied parameters, use the first name.

        A module with only frozen parameters stays in evaluation mode, as with `freeze`. A module with both kinds is in
        training mode, so its dropout is active. Weights that are constants by design stay frozen.
        """
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in names and name not in self._constant)
        self._frozen.clear()
        self._frozen.update(dict.fromkeys(frozen_modules(self), True))
        self.train(self.training)

    def train(self, mode: bool = True) -> MultimodalModel:
        """Switch to training or evaluation mode; frozen modules stay in evaluation mode."""
        super().train(mode)
        keep_frozen(self, self._frozen)
        return self

    def set_checkpointing(self, mode: Checkpointing) -> None:
        """Set the activation checkpointing of all layers.

        mode: "none" recomputes nothing in backward, "full" everything, "selective" cheap operations only.
        See `interlace.model.checkpointing`. Raises ValueError for another mode.
        """
        check_checkpointing(mode)
        self._checkpointing = mode
        for name in self.modules_order():
            set_checkpointing(self.layer_list(name), mode)

    _checkpointing: Checkpointing = "none"

    # ------------------------------------------------------------------ data

    def collate(self, samples: Sequence[Sample], only: Collection[str] | None = None) -> dict[str, Any]:
        """The batch of `forward`: input_ids, labels, position_ids, mask, plan, and inputs of encoders with items.

        only: names of the modules to collate for ("language_model" for the ids).
        Media without data become meta tensors, which are enough for later stages of their encoder. Raises ValueError
        with the name of the invalid sample.
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
        """Inputs of one module for these samples, in the form that its stages take.

        decode: False = meta tensors instead of all media, for stages that need only shapes; nothing is loaded.
        """
        self._check_module(name)
        check_samples("collate", samples)
        if name == LANGUAGE_MODEL:
            settings = self.language_settings
            return collate_language(
                samples,
                dict(self.encoders),
                settings.placeholders,
                self.max_length,
                self.vocab_size,
                rows=settings.packing == ROWS,
                bidirectional=settings.bidirectional,
                positions_of=settings.positions,
            )
        items = [item for sample in samples for item in sample.media.get(name, [])]
        return self.encoders[name].collate(items if decode else [item.without_data() for item in items])

    # ------------------------------------------------------------------ forward

    def encode(self, inputs: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
        """Features [n, D_llm] of each encoder from its collated inputs. Raises ValueError for an unknown encoder."""
        for name in inputs:
            if name not in self.encoders:
                raise ValueError(
                    f"the batch has inputs for {name!r}, but the encoders are {', '.join(self.encoders) or 'none'}"
                    + did_you_mean(name, self.encoders)
                )
        return {name: self.encoders[name](**given) for name, given in inputs.items()}

    def generate(self, prompt: Sample, **options: Any) -> list[int]:
        """Token ids that continue `prompt`; its labels are ignored. For the options, see interlace.model.generate."""
        return generate(self, [prompt], **options)[0]

    def caches_right(self) -> bool:
        """True if cached generation gives the same as generation that reads all tokens again for each token."""
        if self._caches is None:
            self._caches = caches_right(self.language_model, self.language_settings)
        return self._caches

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        mask: BitfieldMask | None = None,
        plan: AttentionPlan | None = None,
        **encoder_inputs: dict[str, Any],
    ) -> MultimodalOutput:
        """Run the whole model on a collated batch: mllm(**mllm.collate(samples)).

        input_ids, labels, position_ids: int64 [B, T]; labels are already shifted.
        mask, plan: visibility between tokens; default: causal.
        encoder_inputs: keyword per encoder, with its collated inputs.
        Raises ValueError for unknown encoders, for features that do not match the placeholders, for several samples in
        a row of a model that does not pack, and for unshifted labels (checked on CPU only, because a GPU check would
        synchronize).
        """
        if not isinstance(input_ids, Tensor):
            raise TypeError(
                f"the model takes a batch, not a {type(input_ids).__name__}: call mllm(**mllm.collate(samples))"
            )
        if labels is not None and labels.device.type == input_ids.device.type == "cpu":
            refuse_copies("labels", [(input_ids, labels)])
        if mask is None and plan is None:
            mask = BitfieldMask.causal(*input_ids.shape)
        inputs: dict[str, Any] = {"input_ids": input_ids, "labels": labels, "mask": mask, "plan": plan}
        inputs["position_ids"] = mask.pos.long() if position_ids is None and mask is not None else position_ids
        if inputs["position_ids"] is None:
            raise ValueError("a plan without a mask needs position_ids: pass them, too")
        if self.language_settings.positions is not None and position_ids is None and encoder_inputs:
            raise ValueError("media tokens have several positions each in this model: pass collate's position_ids")
        inputs["features"] = self.encode(encoder_inputs)
        output = run_language(self.language_model, self.language_settings, inputs, None)
        if labels is None:
            return MultimodalOutput(None, output.logits, 0)
        targets = int((labels != IGNORE).sum())
        loss = cross_entropy_sum(output.logits, labels) / max(targets, 1)
        return MultimodalOutput(loss, output.logits, targets)

    # ------------------------------------------------------------------ helpers

    def _check_module(self, name: str) -> None:
        if name != LANGUAGE_MODEL and name not in self.encoders:
            names = self.modules_order()
            raise ValueError(f"unknown module {name!r}: the model has {', '.join(names)}{did_you_mean(name, names)}")

    def _check_cuts(self, name: str, cuts: Collection[int]) -> None:
        if not cuts:
            return
        is_language = name == LANGUAGE_MODEL
        module = self.language_model if is_language else self.encoders[name].module
        if name not in self._cuts:
            self._cuts[name] = (
                allowed_cuts(self.language_model, self.language_settings, self._packing.returned)
                if is_language
                else encoder_cuts(self.encoders[name])
            )
        check_cuts(f"{name}: {type(module).__name__}", self._cuts[name], cuts)
