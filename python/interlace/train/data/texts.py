"""Tokenizers of a run (`interlace.data.Tokenizer`): bytes, or the model's tokenizer and processor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.modalities import all_modalities
from interlace.train.config.data import NOT_WHOLE
from interlace.train.config.load import ConfigError, blaming
from interlace.train.config.sections import Config
from interlace.train.data.prepared import say_on_stderr, write_chats

if TYPE_CHECKING:
    from interlace.data import ByteTokenizer
    from interlace.data.chats.encoding.tokens import ChatFormat, Tokens
    from interlace.modalities.base import Spec


def reads_bytes(config: Config) -> bool:
    """True if the run's texts are bytes, False if they are tokens of a HuggingFace folder."""
    return config.data.own and _folder(config) is None


def _folder(config: Config) -> str | None:
    """Folder of the tokenizer and, for a whole checkpoint, the processor."""
    return config.data.tokenizer or config.model.path or config.model.language_model.path


def tokenizer_of(config: Config, *, source: str = "config") -> ByteTokenizer | ModelTokenizer:
    """A ByteTokenizer or a ModelTokenizer. Raises ConfigError for folders and templates that do not fit."""
    if reads_bytes(config):
        from interlace.data import ByteTokenizer

        return ByteTokenizer(config.model.encoders())
    if config.data.prepare == "digits":  # takes seconds, without network
        write_chats(config, say_on_stderr, source=source)
    elif config.data.prepare is not None and not Path(config.data.train[0]).exists():
        folder = Path(config.data.train[0]).parent
        cache = "" if config.data.cache is None else f" --cache {config.data.cache}"
        raise ConfigError(
            f"{source}: its data are not there yet; write them first: interlace data stamps {folder}{cache}"
        )
    ignored = config.data.set_of(NOT_WHOLE) if config.model.path is not None else []
    if ignored:
        raise ConfigError(
            f"{source}: data.{ignored[0]}: a whole checkpoint (model.path) reads media as its own processor does, "
            "which takes no such setting: remove it, or change the files of the processor"
        )
    with blaming(f"{source}: [data] tokenizer", (ValueError, ImportError)):
        return ModelTokenizer(config)


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer data needed to build a model, if the tokenizer itself is not available."""

    vocab_size: int
    placeholders: Mapping[str, int]


def vocabulary_of(config: Config, *, source: str = "config") -> ByteTokenizer | ModelTokenizer | Vocabulary:
    """The run's tokenizer. If its folder does not exist but the config has the vocabulary size, a `Vocabulary`.

    That is enough for costs. Raises ConfigError.
    """
    model = config.model
    size = None if model.path is not None else (model.language_model.config or {}).get("vocab_size")
    folder = _folder(config)
    if not reads_bytes(config) and isinstance(size, int) and folder is not None and not Path(folder).exists():
        return Vocabulary(size, {name: size - 1 - number for number, name in enumerate(model.encoders())})
    return tokenizer_of(config, source=source)


class ModelTokenizer:
    """The tokenizer of a HuggingFace folder, with its chat template; for a whole checkpoint its processor.

    Raises ValueError for a folder without a tokenizer, a template or an end of answers, and for placeholders that are
    not single tokens.
    """

    def __init__(self, config: Config) -> None:
        from interlace.data.chats.encoding import load as chats_load
        from interlace.data.chats.encoding.tokens import MediaSettings

        data, whole = config.data, config.model.path
        folder = _folder(config)
        if folder is None:
            raise ValueError("the model comes from no folder, so name one with a tokenizer as data.tokenizer")
        self.processor = chats_load.load_processor(folder) if whole is not None else None
        self.tokenizer = chats_load.load_tokenizer(folder) if self.processor is None else self.processor.tokenizer
        self.tags = {} if whole is not None else {name: self._tag(config, name) for name in config.model.encoders()}
        unknown = [name for name in data.placeholders if name not in self.tags]
        if unknown:
            raise ValueError(
                f"data.placeholders names {unknown[0]!r}; the encoders are {', '.join(self.tags) or 'none'}"
            )
        known, special = self.tokenizer.get_vocab(), self.tokenizer.added_tokens_encoder
        words = [tag for tag in self.tags.values() if tag in known and tag not in special]
        if words:
            raise ValueError(
                f"the placeholder {words[0]!r} is a piece of words for this tokenizer: name a special token"
            )
        new = [tag for tag in self.tags.values() if tag not in known]
        if new:
            from transformers import AddedToken

            self.tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in new], True)
        self.name, self.template = self._template(data.chat_template, folder)
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        ids = self.tokenizer.convert_tokens_to_ids
        self.placeholders = {name: int(ids(tag)) for name, tag in self.tags.items()}
        if len(set(self.placeholders.values())) < len(self.placeholders):
            raise ValueError(f"two encoders have one placeholder: {self.tags}; set data.placeholders")
        self.video_fps = data.video_fps
        made = {each.name: settings for each in all_modalities() if (settings := each.settings(data)) is not None}
        self.media = MediaSettings(made, strict=data.on_too_large == "error")
        self.end = ""
        last = self._last_learnt()
        self.ends_answers = last in self.tokenizer.added_tokens_decoder
        """True if the last learnt token of an answer is a special one, so that models learn to stop."""
        if data.end_of_turn is not None:
            last = self._ended_by(data.end_of_turn, last)
        self.EOS = self._end(last)

    def _tag(self, config: Config, name: str) -> str:
        usual = next((each.tag for each in all_modalities() if each.encoder == name), f"<{name}>")
        return config.data.placeholders.get(name, usual)

    def _template(self, path: str | None, folder: str) -> tuple[str, str]:
        """Name of the template in messages, and its text."""
        from interlace.data.chats.encoding.tokens import template_text

        if path is not None:
            return path, template_text(path)
        owner = self.tokenizer if self.processor is None or self.processor.chat_template is None else self.processor
        template = owner.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        if not isinstance(template, str):
            raise ValueError(f"{folder} has no chat template: give a file with one as data.chat_template")
        return f"the chat template of {Path(folder)}", template

    def format(
        self,
        placeholders: Mapping[str, int | Sequence[int]],
        tokens: Mapping[str, Tokens],
        specs: Mapping[str, Spec],
    ) -> ChatFormat:
        """The format of chats for encoders with these placeholders, token counts and specs."""
        from interlace.data.chats.encoding.processor import ProcessorFormat
        from interlace.data.chats.encoding.tokens import TokenizerFormat

        if self.processor is not None:
            return ProcessorFormat(
                self.processor,
                self.template,
                name=self.name,
                placeholders=placeholders,
                tokens=tokens,
                fps=self.video_fps,
                end=self.end,
            )
        tags = {name: self.tags[name] for name in placeholders}
        return TokenizerFormat(
            self.tokenizer,
            self.template,
            name=self.name,
            tags=tags,
            specs=specs,
            tokens=tokens,
            media=self.media,
            end=self.end,
        )

    def _last_learnt(self) -> int:
        """The last learnt token of an answer."""
        from interlace.data.chats.files.shapes import Chat, Part, Turn
        from interlace.modalities.errors import BrokenSampleError

        turns = (Turn("user", (Part("text", "a"),), False), Turn("assistant", (Part("text", "b"),), True))
        try:
            encoded = self.format({}, {}, {}).encode(Chat(turns), [])
        except BrokenSampleError as error:  # of a chat that any template accepts
            raise ValueError(
                f"{self.name} cannot be used: {error}; a template for questions and answers is wanted, in text alone"
            ) from None
        return [token for token, learnt in zip(encoded.ids, encoded.targets, strict=True) if learnt][-1]

    def _ended_by(self, end: str, last: int) -> int:
        """The token named by `data.end_of_turn`, which is appended to answers from now on."""
        if self.ends_answers:
            own = self.tokenizer.convert_ids_to_tokens(last)
            raise ValueError(f"{self.name} ends answers with {own} already: remove data.end_of_turn = {end!r}")
        known = self.tokenizer.added_tokens_encoder
        if end not in known:
            raise ValueError(
                f"data.end_of_turn = {end!r} is no special token of the tokenizer; its eos_token is "
                f"{self.tokenizer.eos_token!r}"
            )
        self.end, self.ends_answers = end, True
        return int(known[end])

    def _end(self, last: int) -> int:
        """The token that ends an answer: the last learnt token if it is not text, else the end of text."""
        if self.ends_answers:
            return last
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"{self.name} ends answers with no special token, and the tokenizer has no eos_token")
        return int(self.tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, without special ones."""
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))
