"""Encodes chats to token ids, targets and media items with the model's own tokenizer, chat template and processor.

`TokenizerFormat` is for models assembled from modules: the template renders a tag for each medium. The tag is replaced
by placeholders, as many as the encoder's tokens. `ProcessorFormat` (processor.py) is for whole HuggingFace
checkpoints: ids and tensors are those of the processor's own apply_chat_template.

Targets are the tokens that overlap an answer by at least one character, as in HuggingFace's assistant masks. Excluded
are placeholders, which a model must not generate.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from interlace.data.chats.encoding.media import refused_by
from interlace.data.chats.encoding.template import Messages, Spans, Writing
from interlace.data.chats.files.shapes import Chat, Part, Turn
from interlace.modalities import named
from interlace.modalities.base import Spec
from interlace.modalities.errors import BrokenSampleError, DecodeError

WORDS = "the text has them as words"
LIKE_TOKENS = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""Pattern of nearly all special tokens: searching for thousands of single tokens would be slow."""
NO_END = (
    "no answer ends with a special token, so nothing teaches the model where to stop: set data.end_of_turn, such as "
    '"{}"'
)
Tokens = Callable[..., int]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Item:
    """A media item of a sample.

    encoder: its name; medium: index of its medium in the chat (a picture cut into tiles is several items); start: of
    its placeholders in the ids, `tokens` of them; before: first token that its processor wrote for the medium: a cut
    there removes the item.
    """

    encoder: str
    medium: int
    start: int
    tokens: int
    before: int
    shape: tuple[int, ...]
    about: dict[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """A chat in tokens: ids, targets (True: has a loss), and its items in the order of their placeholders."""

    ids: list[int]
    targets: list[bool]
    items: list[Item]


def _tried(function: Callable[..., Made], *arguments: Any) -> Made | ValueError:
    """The result of `function`, or the ValueError that it raises."""
    try:
        return function(*arguments)
    except ValueError as error:
        return error


class ChatFormat(ABC):
    """Conversion of chats to tokens.

    tokenizer: a fast one of HuggingFace. template: text of the chat template; `name`: its name in messages. end: the
    added token appended to each answer, if the template has none; "": no token. placeholders: encoder ->
    its token ids. tokens: encoder -> function from an item's shape (and about) to its number of
    language-model tokens, used to check runs; encoders without one are not checked.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        *,
        name: str,
        placeholders: Mapping[str, int | Sequence[int]],
        tokens: Mapping[str, Tokens] | None = None,
        end: str = "",
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} is a slow tokenizer, which does not tell where its tokens stand in the "
                "text, so that answers cannot be found: give a folder with a tokenizer.json"
            )
        self.tokenizer, self.template, self.name = tokenizer, template, name
        self.placeholders = {
            encoder: (ids,) if isinstance(ids, int) else tuple(ids) for encoder, ids in placeholders.items()
        }
        self.tokens = dict(tokens or {})
        self.added = frozenset(int(token) for token in tokenizer.added_tokens_encoder.values())
        added = sorted({str(token) for token in tokenizer.added_tokens_encoder}, key=len, reverse=True)
        self.writing = Writing(template, name, dict(tokenizer.special_tokens_map), tuple(added), end)
        self._counts: dict[tuple[str, tuple[int, ...], tuple[Any, ...]], int | str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Other processes only read media: token counts are stored with the samples, and only this process counts.
        return {name: value for name, value in self.__dict__.items() if name != "_control"} | {"tokens": {}}

    @abstractmethod
    def encode(self, chat: Chat, sizes: Sequence[Any]) -> Encoded:
        """Tokens and items from the sizes of the media alone (`look`). Raises BrokenSampleError.

        A prompt has no targets. It ends with the template's generation prompt, as for HuggingFace's generate.
        """

    def encode_prompt(self, chat: Chat, sizes: Sequence[Any]) -> tuple[Chat, Encoded]:
        """The tokens of a prompt for the model, and the chat to `load` its media with.

        For a template without a generation prompt, the start of the model's turn is found by rendering an answer.
        """
        if "add_generation_prompt" in self.template:
            return chat, self.encode(chat, sizes)
        chat = Chat((*chat.turns, Turn("assistant", (Part("text", "x"),), True)))
        encoded = self.encode(chat, sizes)
        stop = encoded.targets.index(True)
        return chat, Encoded(encoded.ids[:stop], encoded.targets[:stop], encoded.items)

    def encode_many(self, chats: Sequence[tuple[Chat, Sequence[Any]]]) -> list[Encoded | ValueError]:
        """`encode` of each (chat, sizes of its media), or the error that it raised."""
        return [_tried(self.encode, chat, sizes) for chat, sizes in chats]

    @abstractmethod
    def load(self, chat: Chat, encoded: Encoded) -> list[Tensor]:
        """The data of the items of `encoded`: all, or the first ones for a chat that was cut. Raises DecodeError."""

    def takes_probe(self, kind: str) -> bool:
        """True if `look` gives the result of `Modality.probe`, so that an index can be used."""
        return True

    def look(self, kind: str, path: str, *, decode: bool) -> Any:
        """Size of a medium as input for `encode`; see `Modality.probe`."""
        return named(kind).probe(path, decode=decode)

    @abstractmethod
    def encoders_of(self, kind: str) -> list[str]:
        """The encoders for this kind of media. Raises BrokenSampleError if the model has none."""

    @abstractmethod
    def signature(self) -> str:
        """All settings that affect the tokens, except the encoders' counts (`counts`)."""

    def counted(self, encoder: str, shape: tuple[int, ...], about: Mapping[str, tuple[float, ...]]) -> int:
        """Number of tokens of an item in an encoder. Raises BrokenSampleError for a shape that the encoder refuses."""
        key = (encoder, shape, tuple((name, tuple(values)) for name, values in about.items()))
        known = self._counts.get(key)
        if known is None:
            count = self.tokens[encoder]
            try:
                with refused_by(f"the encoder {encoder!r}"):
                    known = int(count(shape, about) if about else count(shape))
            except BrokenSampleError as error:
                known = str(error)
            self._counts[key] = known
        if isinstance(known, str):
            raise BrokenSampleError("size", known)
        return known

    def counts(self) -> list[Any]:
        """The encoders' counts so far, for JSON: encoder, shape, extra arguments, tokens or the reason of refusal."""
        return [[*key, count] for key, count in self._counts.items()]

    def other_count(self, counts: Sequence[Any]) -> str:
        """Description of an entry of `counts` for which an encoder now gives another result; empty: none."""
        for encoder, shape, about, was in counts:
            if encoder not in self.tokens:
                return f"there is no encoder {encoder!r} any more that counts its tokens"
            try:
                now: int | str = self.counted(encoder, tuple(shape), {name: tuple(values) for name, values in about})
            except BrokenSampleError as error:
                now = str(error)
            if now != was:
                return f"the encoder {encoder!r} makes {now} tokens of shape {tuple(shape)}, and made {was}"
        return ""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def ends_answer(self, encoded: Encoded) -> bool:
        """True if the last target of a sample is a special token, which teaches the model to stop."""
        return next(token for token, learnt in zip(encoded.ids[::-1], encoded.targets[::-1]) if learnt) in self.added

    @cached_property
    def _control(self) -> tuple[re.Pattern[str], frozenset[str]]:
        """A pattern that finds special tokens in texts, and the set of these tokens."""
        tokens = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        other = sorted(
            (re.escape(token) for token in tokens if not LIKE_TOKENS.fullmatch(token)), key=len, reverse=True
        )
        return re.compile("|".join((LIKE_TOKENS.pattern, *other))), frozenset(tokens)

    def typed(self, chat: Chat) -> list[str]:
        """The special tokens that occur as text in a chat; they are tokenised as special tokens nevertheless."""
        pattern, tokens = self._control
        words = (word for turn in chat.turns for part in turn.parts for word in pattern.findall(part.text))
        return [word for word in dict.fromkeys(words) if word in tokens]

    def _targets(
        self, chat: Chat, spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]], ids: Sequence[int]
    ) -> list[bool]:
        """One flag per token: True if it is a target. spans: of the targets, offsets: of the tokens, in characters."""
        never = {token for ids in self.placeholders.values() for token in ids}
        marks = [False] * len(ids)
        place = 0
        for start, end in spans:
            while place < len(offsets) and offsets[place][1] <= start:
                place += 1
            at = place
            while at < len(offsets) and offsets[at][0] < end:
                first, last = offsets[at]
                marks[at] = first < last and ids[at] not in never
                at += 1
        if not any(marks) and not chat.is_prompt:
            raise BrokenSampleError("targets", "the answers have no tokens that could be learnt")
        return marks

    def _check_tokens(self, item: Item) -> Item:
        """`item`, after checking that its encoder makes as many tokens of it as it has placeholders.

        Raises BrokenSampleError for an item that the encoder refuses, ValueError for a different number of tokens.
        """
        if item.encoder in self.tokens:
            count = self.counted(item.encoder, item.shape, item.about)
            if count != item.tokens:
                raise ValueError(
                    f"{self.name}: an item of shape {item.shape} has {item.tokens} placeholders, but the encoder "
                    f"{item.encoder!r} makes {count} tokens of it: the processor is not this model's, or "
                    "is set differently (sizes of patches, merging, class token)"
                )
        return item


@dataclass(frozen=True)
class MediaSettings:
    """Settings of media files. by_modality: modality -> its `Modality.settings`. strict: True: pictures too large for
    their spec are broken; False: they are scaled down."""

    by_modality: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False


class TokenizerFormat(ChatFormat):
    """Format for models assembled from modules: tags, the encoders' own counts, and files read by `specs`.

    tags: encoder -> the text of its placeholder, one token. specs: encoder -> preprocessing of its files. An encoder
    takes the modality of its spec; encoders of pictures also take the frames of videos, one item per frame.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        *,
        name: str,
        tags: Mapping[str, str],
        specs: Mapping[str, Spec],
        tokens: Mapping[str, Tokens],
        media: MediaSettings = MediaSettings(),
        end: str = "",
    ) -> None:
        ids = {encoder: int(tokenizer.convert_tokens_to_ids(tag)) for encoder, tag in tags.items()}
        super().__init__(tokenizer, template, name=name, placeholders=ids, tokens=tokens, end=end)
        self.tags, self.specs, self.media = dict(tags), dict(specs), media

    def encoders_of(self, kind: str) -> list[str]:
        """The encoders for this kind of media; an item goes to each of them. Raises BrokenSampleError."""
        names = [name for name, spec in self.specs.items() if spec.modality == named(kind).encoded_by]
        if not names:
            raise BrokenSampleError("no encoder", f"the chat has a file of kind {kind}, the model no encoder for such")
        return names

    def messages(self, chat: Chat) -> Messages:
        """Input of the template: texts with a tag for each medium and encoder."""
        made = []
        for turn in chat.turns:
            text = "".join(map(self._text_of, turn.parts))
            made.append({"role": turn.role, "content": self.writing.ended(text) if turn.role == "assistant" else text})
        return made

    def _text_of(self, part: Part) -> str:
        if part.kind == "text":
            return part.text
        return "".join(self.tags[encoder] for encoder in self.encoders_of(part.kind))

    def encode(self, chat: Chat, sizes: Sequence[Any]) -> Encoded:
        text, spans = self._write(chat)
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return self._encoded(chat, sizes, spans, made["input_ids"], made["offset_mapping"])

    def encode_many(self, chats: Sequence[tuple[Chat, Sequence[Any]]]) -> list[Encoded | ValueError]:
        """Like `ChatFormat.encode_many`; the texts are tokenised in one batch, without the GIL. For short texts this is
        not faster than one by one: templates and Python take most of the time (bench/data_index.py)."""
        written = [_tried(self._write, chat) for chat, _ in chats]
        texts = [one[0] for one in written if not isinstance(one, ValueError)]
        if not texts:
            return [one for one in written if isinstance(one, ValueError)]
        made = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        tokens = iter(zip(made["input_ids"], made["offset_mapping"], strict=True))
        return [
            one if isinstance(one, ValueError) else _tried(self._encoded, chat, sizes, one[1], *next(tokens))
            for (chat, sizes), one in zip(chats, written, strict=True)
        ]

    def _write(self, chat: Chat) -> tuple[str, Spans]:
        """The text of a chat by its template, and the spans of its answers, in characters."""
        messages = self.messages(chat)
        text = self.writing.render(messages, prompt=chat.is_prompt)
        return text, [] if chat.is_prompt else self.writing.answers(chat, messages, text)

    def _encoded(
        self,
        chat: Chat,
        sizes: Sequence[Any],
        spans: Spans,
        text_ids: Sequence[int],
        text_offsets: Sequence[tuple[int, int]],
    ) -> Encoded:
        media = chat.media
        wanted = [(medium, name) for medium, part in enumerate(media) for name in self.encoders_of(part.kind)]
        tag_ids = {ids[0] for ids in self.placeholders.values()}
        forged = [token for token in text_ids if token in tag_ids]
        if forged != [self.placeholders[encoder][0] for _, encoder in wanted]:
            raise BrokenSampleError(
                "placeholder",
                f"its text has {len(forged)} placeholder tokens ({', '.join(self.tags.values())}) for {len(wanted)} "
                f"items: {WORDS}, or the template leaves media out or moves them",
            )
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        items: list[Item] = []
        first: dict[int, int] = {}
        places = iter(wanted)
        for token, span in zip(text_ids, text_offsets, strict=True):
            count = 1
            if token in tag_ids:
                medium, encoder = next(places)
                size, before = sizes[medium], first.setdefault(medium, len(ids))
                part = media[medium]
                shape = self._shape(encoder, size, part)
                each = self.counted(encoder, shape, {})
                settings = self.media.by_modality.get(part.kind)
                count = each * named(part.kind).count(part.path, size, part.limits, each, settings)
                starts = range(len(ids), len(ids) + count, each)
                items += [Item(encoder, medium, start, each, before, shape) for start in starts]
            ids += [int(token)] * count
            offsets += [(int(span[0]), int(span[1]))] * count
        return Encoded(ids, self._targets(chat, spans, offsets, ids), items)

    def _shape(self, encoder: str, size: Any, part: Part) -> tuple[int, ...]:
        with refused_by(f"the encoder {encoder!r}"):
            return self.specs[encoder].item_shape(part.path, size, part.limits, strict=self.media.strict)

    def load(self, chat: Chat, encoded: Encoded) -> list[Tensor]:
        media = chat.media
        wanted: dict[tuple[int, str], list[Item]] = {}
        for item in encoded.items:
            wanted.setdefault((item.medium, item.encoder), []).append(item)
        loaded = {place: iter(self._load(media[place[0]], items)) for place, items in wanted.items()}
        return [next(loaded[item.medium, item.encoder]) for item in encoded.items]

    def _load(self, part: Part, items: Sequence[Item]) -> list[Tensor]:
        """The items of one medium for one encoder. Raises DecodeError, also for a file whose size has changed since it
        was prepared."""
        modality, first = named(part.kind), items[0]
        shape = self._shape(first.encoder, modality.probe(part.path, decode=False), part)
        if shape != first.shape:
            raise DecodeError(f"{part.path}: gives {list(shape)}, and gave {list(first.shape)} when it was prepared")
        spec = self.specs[first.encoder]
        arrays = modality.load(part.path, spec, [item.shape for item in items], part.limits)
        return [spec.tensor(array) for array in arrays]

    def signature(self) -> str:
        settings = (*self.media.by_modality.values(), self.media.strict)
        parts = (self.template, self.writing.end, self.tags, self.specs, *settings, self.placeholders)
        return repr((tokenizer_text(self.tokenizer), *parts))


def tokenizer_text(tokenizer: Any) -> str:
    """Everything in a tokenizer that affects its tokens."""
    return str(tokenizer.backend_tokenizer.to_str()) + repr(sorted(tokenizer.special_tokens_map.items()))


def template_text(path: str | Path) -> str:
    """The chat template in a file. Raises ValueError with its name, when it cannot be read or is not a template."""
    from jinja2 import TemplateError as JinjaError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text = Path(path).read_text(encoding="utf-8")
        _compile_jinja_template(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the chat template cannot be read: {error}") from None
    except JinjaError as error:
        raise ValueError(f"{path}: no chat template: {error}") from None
    return text


__all__ = ["ChatFormat", "Encoded", "Item", "MediaSettings", "TokenizerFormat", "template_text"]
