"""``interlace export --check N``: compares answers of the exported model outside Interlace with Interlace's own.

HuggingFace's own classes load the folder and run their own forward and ``generate``, item by item and prompt by prompt,
without packing. A whole checkpoint is used as its model card shows: the processor of the folder renders the chat with a
generation prompt and prepares its media. For a folder of modules only the projector classes come from Interlace; no
other library has them. The steps to serve such a folder are the same: encode, project, put the features at the
placeholders, and call ``generate``.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interlace.modalities import Sampled, named
from interlace.model.checkpoints.module_folder import FACTS
from interlace.model.collate import JOINED, check_bidirectional
from interlace.model.projector import PROJECTORS, ItemProjector
from interlace.train.config.load import ConfigError, blaming
from interlace.train.config.sections import Config
from interlace.train.report import answers
from interlace.train.report import closing as report

if TYPE_CHECKING:
    from interlace.data.chats.files.shapes import Chat, Part
    from interlace.model import MultimodalModel, Sample

KINDS = "mm_token_type_ids"
TIE = 1e-4
"""Logits within this relative distance may swap their order: another summation order changes the last bits."""


@dataclass(frozen=True)
class Checked:
    """Result of a check.

    compared: answers. equal: answers equal token by token. ties: further answers that first differ where two tokens
    were equally likely. other_prompts: answers to another prompt.
    """

    compared: int
    equal: int
    ties: int
    other_prompts: int = 0

    @property
    def good(self) -> bool:
        return self.equal + self.ties == self.compared

    def words(self, folder: Path) -> str:
        """Summary in one line."""
        ties = f", {self.ties} up to a tie of two tokens" if self.ties else ""
        who = f"held-out questions answered by HuggingFace's own classes from {folder}"
        other = f", {self.other_prompts} were asked with another prompt" if self.other_prompts else ""
        return f"{self.compared} {who}: {self.equal} equal to Interlace's answers{ties}{other}"


@dataclass(frozen=True)
class Prompt:
    """A sample that ends where the answer begins. chat: its source, for a whole checkpoint's processor."""

    sample: Sample
    chat: Chat | None = None


@dataclass(frozen=True)
class Asked:
    """Prompts and Interlace's own answers. end: token that ends an answer. most: maximum answer length. max_length:
    maximum length of prompt and answer."""

    prompts: list[Prompt]
    own: list[list[int]]
    end: int
    most: int
    max_length: int | None


def ask(model: MultimodalModel, config: Config, count: int, source: str) -> Asked:
    """Interlace's answers to `count` held-out samples, round-robin over the kinds. Raises ConfigError."""
    from interlace.train.data.feed import datasets
    from interlace.train.data.texts import tokenizer_of

    tokenizer = tokenizer_of(config, source=source)
    _, held_out = datasets(config, model, tokenizer, source=source)
    chosen = report.spread_by_kind(held_out, count)
    if config.model.path is None:
        samples = (held_out.sample(index, 0) for index in chosen)
        prompts = [Prompt(answers.prompt_of(sample, model.placeholders)) for sample in samples]
    else:
        every = [Prompt(*held_out.prompt(index)) for index in chosen]
        prompts = [each for each in every if each.chat is not None and all(map(_is_plain, each.chat.media))]
        if not prompts:
            raise ConfigError(
                f"--check {count}: all held-out questions have videos, which transformers reads by a library of its "
                "own, or limits on single files: leave --check out"
            )
    most = config.log.max_new_tokens
    own = answers.answer(model, [each.sample for each in prompts], end=tokenizer.EOS, max_new_tokens=most)
    return Asked(prompts, own, tokenizer.EOS, most, model.max_length)


def _is_plain(part: Part) -> bool:
    return not isinstance(named(part.kind), Sampled) and not part.limits.text()


def check(asked: Asked, folder: Path) -> Checked:
    """Compares the folder's answers to the same prompts. Raises ConfigError if it cannot be loaded."""
    end, most, equal, ties, others = asked.end, asked.most, 0, 0, 0
    with blaming("--check", (ValueError, OSError)):
        other = Reloaded(folder) if (folder / FACTS).is_file() else ReloadedWhole(folder)
        for prompt, mine in zip(asked.prompts, asked.own, strict=True):
            ids = prompt.sample.input_ids
            if other.ids(prompt) != ids.tolist():
                others += 1
                continue
            room = most if asked.max_length is None else min(most, asked.max_length - len(ids))
            theirs = other.answer(prompt, end=end, max_new_tokens=room) if room > 0 else []
            equal += theirs == mine
            ties += theirs != mine and other.tied(prompt, mine, theirs, end)
    return Checked(len(asked.prompts), equal, ties, others)


class Outside(ABC):
    """An exported model, run without Interlace."""

    @abstractmethod
    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt."""

    @abstractmethod
    def generated(self, prompt: Prompt, **options: object) -> list[int]:
        """Tokens that ``generate`` writes after the prompt."""

    @abstractmethod
    def logits(self, prompt: Prompt, after: Sequence[int]) -> Tensor:
        """Logits [V] of the token after the prompt and the tokens `after` it."""

    @torch.no_grad()
    def answer(self, prompt: Prompt, *, end: int, max_new_tokens: int) -> list[int]:
        """Greedy answer to the prompt, without `end`."""
        options = {"do_sample": False, "max_new_tokens": max_new_tokens, "eos_token_id": end, "pad_token_id": end}
        made = self.generated(prompt, **options)
        return made[:-1] if made and made[-1] == end else made

    @torch.no_grad()
    def tied(self, prompt: Prompt, first: list[int], second: list[int], end: int) -> bool:
        """True if the answers first differ at two tokens that are equally likely, up to TIE."""
        first, second = [*first, end], [*second, end]
        place = next((i for i, pair in enumerate(zip(first, second)) if pair[0] != pair[1]), None)
        if place is None:
            return False
        logits = self.logits(prompt, first[:place])
        return bool((logits[first[place]] - logits[second[place]]).abs() <= TIE * logits.abs().max())


class ReloadedWhole(Outside):
    """An exported whole checkpoint. Raises ValueError for a folder that cannot be loaded."""

    def __init__(self, folder: Path) -> None:
        from interlace.data.chats.encoding.load import load_processor
        from interlace.model.whole.model import whole_class

        kind = whole_class(folder)[0]
        self.model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        self.processor = load_processor(folder)
        self.hearing = getattr(self.processor, "feature_extractor", None)

    def _inputs(self, prompt: Prompt) -> dict[str, Any]:
        def given(part: Part) -> object:  # also members of tar files, which transformers cannot open
            if part.kind == "text":
                return part.text
            return named(part.kind).read(part.path, part.limits, self.hearing)

        assert prompt.chat is not None
        messages = []
        for turn in prompt.chat.turns:
            content = [{"type": part.kind, part.kind: given(part)} for part in turn.parts]
            messages.append({"role": turn.role, "content": content})
        made = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return dict(made)

    def ids(self, prompt: Prompt) -> list[int]:
        return list(self._inputs(prompt)["input_ids"][0].tolist())

    def generated(self, prompt: Prompt, **options: object) -> list[int]:
        given = self._inputs(prompt)
        return list(self.model.generate(**given, **options)[0, given["input_ids"].shape[1] :].tolist())

    def logits(self, prompt: Prompt, after: Sequence[int]) -> Tensor:
        given = self._inputs(prompt)
        more = torch.tensor([list(after)], dtype=torch.int64)
        for key, value in (("input_ids", more), ("attention_mask", torch.ones_like(more)), (KINDS, more * 0)):
            if key in given:
                given[key] = torch.cat([given[key], value.to(given[key].dtype)], dim=1)
        logits: Tensor = self.model(**given).logits[0, -1]
        return logits


class Reloaded(Outside):
    """An exported folder of modules. Raises ValueError for unsupported modules.

    Encoders take pictures [3, H, W], or mel frames [bins, frames] as Whisper does.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file

        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        self.bidirectional = check_bidirectional(facts["bidirectional"])
        self.modules = {name: _load(folder / name, facts_of["class"]) for name, facts_of in facts["modules"].items()}
        self.language_model = self.modules.pop("language_model")
        self.facts = facts["modules"]
        self.placeholders = {n: [i] if isinstance(i, int) else list(i) for n, i in facts["placeholders"].items()}
        self.weights = load_file(folder / "projector.safetensors")
        if self.bidirectional and getattr(self.language_model.config, "sliding_window", None):
            raise ValueError("the language model has sliding windows, which one mask for all layers cannot say")

    def ids(self, prompt: Prompt) -> list[int]:
        return list(prompt.sample.input_ids.tolist())

    def generated(self, prompt: Prompt, **options: object) -> list[int]:
        embeds, mask = self._inputs(prompt.sample.input_ids, _data(prompt.sample))

        def look_both_ways(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            reads = kwargs.get("inputs_embeds")  # the prompt; later calls get ids
            return args, kwargs if reads is None else kwargs | {"attention_mask": mask}

        with self.language_model.register_forward_pre_hook(look_both_ways, with_kwargs=True):
            made = self.language_model.generate(
                inputs_embeds=embeds,
                attention_mask=torch.ones(embeds.shape[:2], dtype=torch.int64),
                suppress_tokens=sorted(token for ids in self.placeholders.values() for token in ids) or None,
                **options,
            )
        return list(made[0].tolist())

    def logits(self, prompt: Prompt, after: Sequence[int]) -> Tensor:
        ids = prompt.sample.input_ids
        embeds, mask = self._inputs(torch.cat([ids, torch.tensor(after, dtype=ids.dtype)]), _data(prompt.sample))
        logits: Tensor = self.language_model(inputs_embeds=embeds, attention_mask=mask).logits[0, -1]
        return logits

    def _inputs(self, ids: Tensor, media: Mapping[str, Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """Embeddings [1, n, D] with the media in their places, and the additive attention mask [1, 1, n, n]."""
        embeds = self.language_model.get_input_embeddings()(ids)
        sees = torch.ones(len(ids), len(ids)).tril().bool()
        for name, items in media.items():
            places = torch.isin(ids, torch.tensor(self.placeholders[name])).nonzero().squeeze(1)
            rows = [self.features(name, item) for item in items]
            embeds[places] = torch.cat(rows).to(embeds.dtype)
            if self.bidirectional == JOINED:
                spans = places.tensor_split(((places.diff() > 1).nonzero().squeeze(1) + 1).tolist())
            else:
                spans = places.split([len(each) for each in rows])
            for span in spans:
                sees[span[:, None], span] |= bool(self.bidirectional)
        mask = torch.zeros(sees.shape, dtype=embeds.dtype).masked_fill(~sees, torch.finfo(embeds.dtype).min)
        return embeds[None], mask[None, None]

    def features(self, name: str, item: Tensor) -> Tensor:
        """Input of the language model for an item: [tokens, D]."""
        encoder, facts = self.modules[name], self.facts[name]
        made, grid = _clip(encoder, item) if item.dim() == 2 else _picture(encoder, item)
        joined = facts["downsample"]
        if short := -len(made) % joined:
            made = torch.cat([made, made.new_zeros(short, made.shape[1])])
        made = made.reshape(len(made) // joined, -1)
        if facts["projector"] is None:
            return made
        width = self.language_model.get_input_embeddings().weight.shape[1]
        projector = PROJECTORS[facts["projector"]](made.shape[1], width, **facts["projector_config"])
        start = f"{name}."
        projector.load_state_dict({k.removeprefix(start): v for k, v in self.weights.items() if k.startswith(start)})
        more = ([len(made)], [grid]) if isinstance(projector, ItemProjector) else ()
        projected: Tensor = projector.eval()(made, *more)
        return projected


def _data(sample: Sample) -> dict[str, list[Tensor]]:
    return {name: [item.data for item in items if item.data is not None] for name, items in sample.media.items()}


def _load(folder: Path, path: str) -> Any:
    """Loads a module with HuggingFace's own class."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # a line reports the result
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    return kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def _picture(encoder: Any, pixels: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Features [patches, D] of a picture [3, H, W], and its rows and columns of patches."""
    patch = getattr(encoder.config, "patch_size", None)
    if pixels.dim() != 3 or not isinstance(patch, int):
        raise ValueError(f"{type(encoder).__name__} takes other inputs than one picture (3, height, width)")
    grid = pixels.shape[1] // patch, pixels.shape[2] // patch
    own = getattr(encoder.config, "image_size", None)
    more = {} if list(pixels.shape[1:]) == [own, own] else {"interpolate_pos_encoding": True}
    features = encoder(pixel_values=pixels[None], **more).last_hidden_state[0]
    return features[len(features) - grid[0] * grid[1] :], grid  # class tokens come first


def _clip(encoder: Any, mel: Tensor) -> tuple[Tensor, None]:
    """Features [n, D] of a single clip [bins, frames].

    HuggingFace's Whisper expects all clips padded to one length, and attends to the padding. Cutting its positions to
    the clip avoids that.
    """
    config, positions = encoder.config, getattr(encoder, "embed_positions", None)
    if not isinstance(positions, torch.nn.Embedding) or not hasattr(config, "max_source_positions"):
        raise ValueError(f"{type(encoder).__name__} takes other inputs than mel frames (bins, frames)")
    whole, weight = config.max_source_positions, positions.weight
    stride = encoder.conv1.stride[0] * encoder.conv2.stride[0]
    count = -(-mel.shape[1] // stride)
    mel = torch.nn.functional.pad(mel, (0, count * stride - mel.shape[1]))
    try:
        positions.num_embeddings = config.max_source_positions = count
        positions.weight = torch.nn.Parameter(weight[:count], requires_grad=False)
        return encoder(input_features=mel[None]).last_hidden_state[0], None
    finally:
        positions.num_embeddings = config.max_source_positions = whole
        positions.weight = weight
