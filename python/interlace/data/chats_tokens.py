"""Chats -> token ids, targets and media items, as the model's own tokenizer, chat template and processor make them.

`ProcessorFormat` is for whole HuggingFace checkpoints: ids and tensors are those of the processor's own
apply_chat_template. `TokenizerFormat` is for models put together from modules: the template renders a tag for each
medium, which then becomes as many placeholders as the encoder makes tokens.

Targets are the tokens that overlap an answer by at least a character, as in HuggingFace's assistant masks, except
placeholders, which no model is to write.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from interlace.data import chats_media, chats_template
from interlace.data.chats_media import Remembered, Size, Watched, refused_by
from interlace.data.chats_shapes import BrokenSampleError, Chat, Part
from interlace.data.chats_video import VideoSpec, read_frames
from interlace.data.media import AudioSpec, DecodeError, ImageSpec, decode_audio, decode_image, fitted, to_tensor

WORDS = "the text has them as words"
DATED = re.compile(r"strftime_now\s*\(")
ENCODER_OF = {"image": "vision", "video": "vision", "audio": "audio"}
"""The encoders of a whole checkpoint by the kind of media that they take."""
Tokens = Callable[..., int]


@dataclass(frozen=True)
class Item:
    """A media item of a sample.

    encoder: its name; medium: which of the chat's media it is of (a picture cut into tiles is several items); start: of
    its placeholders in the ids, `tokens` of them; before: where a cut goes that leaves it out, at the first token that
    its processor wrote for the medium.
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
    """A chat in tokens: ids, whether each is to be learnt, and its items in the order of their placeholders."""

    ids: list[int]
    targets: list[bool]
    items: list[Item]


class ChatFormat(ABC):
    """How chats become tokens.

    tokenizer: a fast one of HuggingFace. template: the chat template's text, and `name`, how messages call it.
    placeholders: encoder -> its token ids. tokens: encoder -> function of an item's shape (and about) to its
    language-model tokens, against which runs are checked; missing ones are not.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        *,
        name: str,
        placeholders: Mapping[str, int | Sequence[int]],
        tokens: Mapping[str, Tokens] | None = None,
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
        self.special = dict(tokenizer.special_tokens_map)
        self.ends = sorted({str(token) for token in tokenizer.added_tokens_encoder}, key=len, reverse=True)
        self._counts: dict[tuple[str, tuple[int, ...], tuple[Any, ...]], int | str] = {}

    @abstractmethod
    def encode(self, chat: Chat, sizes: Sequence[Any]) -> Encoded:
        """Tokens and items from the sizes of the media alone (`chats_media.look_at`). Raises BrokenSampleError."""

    @abstractmethod
    def load(self, chat: Chat, encoded: Encoded) -> list[Tensor]:
        """The data of the items of `encoded`, all of them or the first of a chat that was cut. Raises DecodeError."""

    @abstractmethod
    def encoders_of(self, kind: str) -> list[str]:
        """The encoders that take this kind of media. Raises BrokenSampleError when there are none."""

    @abstractmethod
    def signature(self) -> str:
        """What the tokens depend on beside the encoders' counts (`counts`): other settings make other tokens."""

    def counted(self, encoder: str, shape: tuple[int, ...], about: Mapping[str, tuple[float, ...]]) -> int:
        """Tokens that an encoder makes of an item. Raises BrokenSampleError for a shape that it refuses."""
        key = (encoder, shape, tuple((name, tuple(values)) for name, values in about.items()))
        found = self._counts.get(key)
        if found is None:
            count = self.tokens[encoder]
            try:
                with refused_by(f"the encoder {encoder!r}"):
                    found = int(count(shape, about) if about else count(shape))
            except BrokenSampleError as error:
                found = str(error)
            self._counts[key] = found
        if isinstance(found, str):
            raise BrokenSampleError("size", found)
        return found

    def counts(self) -> list[Any]:
        """What the encoders have said so far, for JSON: encoder, shape, what it was told, tokens or why it refuses."""
        return [[*key, found] for key, found in self._counts.items()]

    def other_count(self, counts: Sequence[Any]) -> str:
        """Which of `counts` an encoder no longer says, in words; empty: it says all of them."""
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

    def _targets(
        self, chat: Chat, spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]], ids: Sequence[int]
    ) -> list[bool]:
        """Whether each token is to be learnt. spans: of the answers, offsets: of the tokens, in characters."""
        learnt = [turn.learn for turn in chat.turns if turn.role == "assistant"]
        never = {token for ids in self.placeholders.values() for token in ids}
        marks = [False] * len(ids)
        place = 0
        for (start, end), learn in zip(spans, learnt, strict=True):
            while place < len(offsets) and offsets[place][1] <= start:
                place += 1
            at = place
            while learn and at < len(offsets) and offsets[at][0] < end:
                first, last = offsets[at]
                marks[at] = first < last and ids[at] not in never
                at += 1
        if not any(marks):
            raise BrokenSampleError("targets", "the answers have no tokens that could be learnt")
        return marks

    def _check_tokens(self, item: Item) -> Item:
        """`item`, if its encoder makes as many tokens of it as it has placeholders.

        Raises BrokenSampleError for an item that the encoder refuses, ValueError for another number of tokens.
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


class TokenizerFormat(ChatFormat):
    """For models put together from modules: tags, encoders' own counts, and files read by `specs`.

    tags: encoder -> the text of its placeholder, one token. specs: encoder -> how its files become tensors; an encoder
    takes the kind of media that its spec is for, and encoders of pictures take the frames of videos, each an item.
    strict: whether pictures that are too large for their spec are broken, in place of scaled down.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str,
        *,
        name: str,
        tags: Mapping[str, str],
        specs: Mapping[str, ImageSpec | AudioSpec],
        tokens: Mapping[str, Tokens],
        video: VideoSpec | None = None,
        strict: bool = False,
    ) -> None:
        ids = {encoder: int(tokenizer.convert_tokens_to_ids(tag)) for encoder, tag in tags.items()}
        super().__init__(tokenizer, template, name=name, placeholders=ids, tokens=tokens)
        self.tags, self.specs, self.video = dict(tags), dict(specs), video or VideoSpec()
        self.strict = strict
        self._render = chats_template.render_with(template, self.special)

    def encoders_of(self, kind: str) -> list[str]:
        """The encoders that take this kind of media; an item goes to each of them. Raises BrokenSampleError."""
        wanted = AudioSpec if kind == "audio" else ImageSpec
        found = [name for name, spec in self.specs.items() if isinstance(spec, wanted)]
        if not found:
            raise BrokenSampleError("no encoder", f"the chat has a file of kind {kind}, the model no encoder for such")
        return found

    def messages(self, chat: Chat) -> chats_template.Messages:
        """What the template is given: texts with a tag for each medium and encoder."""
        return [{"role": turn.role, "content": "".join(map(self._text_of, turn.parts))} for turn in chat.turns]

    def _text_of(self, part: Part) -> str:
        if part.kind == "text":
            return part.text
        return "".join(self.tags[encoder] for encoder in self.encoders_of(part.kind))

    def encode(self, chat: Chat, sizes: Sequence[Any]) -> Encoded:
        media, messages = chat.media, self.messages(chat)
        wanted = [(medium, name) for medium, part in enumerate(media) for name in self.encoders_of(part.kind)]
        text = self._render(messages, False)
        spans = chats_template.answers(chat, messages, text, self.template, self.special, self.ends, self.name)
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tag_ids = {ids[0] for ids in self.placeholders.values()}
        found = [token for token in made["input_ids"] if token in tag_ids]
        if found != [self.placeholders[encoder][0] for _, encoder in wanted]:
            raise BrokenSampleError(
                "placeholder",
                f"its text has {len(found)} placeholder tokens ({', '.join(self.tags.values())}) for {len(wanted)} "
                f"items: {WORDS}, or the template leaves media out or moves them",
            )
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        items: list[Item] = []
        first: dict[int, int] = {}
        places = iter(wanted)
        for token, span in zip(made["input_ids"], made["offset_mapping"], strict=True):
            count = 1
            if token in tag_ids:
                medium, encoder = next(places)
                size, before = sizes[medium], first.setdefault(medium, len(ids))
                shape = self._shape(encoder, size, media[medium].path)
                each = self.counted(encoder, shape, {})
                count = self.video.frames(size[2], each) * each if media[medium].kind == "video" else each
                starts = range(len(ids), len(ids) + count, each)
                items += [Item(encoder, medium, start, each, before, shape) for start in starts]
            ids += [int(token)] * count
            offsets += [(int(span[0]), int(span[1]))] * count
        return Encoded(ids, self._targets(chat, spans, offsets, ids), items)

    def _shape(self, encoder: str, size: Any, path: str) -> tuple[int, ...]:
        spec = self.specs[encoder]
        if isinstance(spec, ImageSpec):
            with refused_by(f"the encoder {encoder!r}"):
                return spec.fit(size[0], size[1], path, strict=self.strict)
        frames, rate = size
        if frames > spec.max_seconds * rate:
            raise BrokenSampleError("size", f"{path}: {frames / rate:.1f} s, longer than max_audio_seconds")
        shape = spec.shape(frames, rate)
        if shape[1] < 2:
            raise BrokenSampleError("size", f"{path}: shorter than 20 ms")
        return shape

    def _check_shape(self, item: Item, part: Part) -> None:
        """Raises DecodeError for a picture or video of another size than when it was prepared."""
        size = chats_media.look_at(part.kind, part.path, decode=False)
        shape = self._shape(item.encoder, size, part.path)
        if shape != item.shape:
            raise DecodeError(f"{part.path}: gives {list(shape)}, and gave {list(item.shape)} when it was prepared")

    def load(self, chat: Chat, encoded: Encoded) -> list[Tensor]:
        media = chat.media
        frames: dict[tuple[int, str], Iterator[Any]] = {}
        made = []
        for item in encoded.items:
            spec, path, place = self.specs[item.encoder], media[item.medium].path, (item.medium, item.encoder)
            if media[item.medium].kind == "video":
                if place not in frames:
                    self._check_shape(item, media[item.medium])
                    count = sum((other.medium, other.encoder) == place for other in encoded.items)
                    frames[place] = iter(read_frames(path, count))
                array = fitted(next(frames[place]), (item.shape[0], item.shape[1], item.shape[2]))
            elif isinstance(spec, ImageSpec):
                self._check_shape(item, media[item.medium])
                array = decode_image(path, (item.shape[0], item.shape[1], item.shape[2]))
            else:
                array = decode_audio(path, spec)
            made.append(to_tensor(array, spec))
        return made

    def signature(self) -> str:
        said = (self.template, self.tags, self.specs, self.video, self.strict, self.placeholders)
        return repr((_tokenizer_text(self.tokenizer), *said))


class ProcessorFormat(ChatFormat):
    """For whole HuggingFace checkpoints: all is the processor's own; see `chats_media` for how it is asked.

    processor: with a tokenizer, and a part for each kind of media. Its template is used unless one is given.
    """

    def __init__(
        self,
        processor: Any,
        template: str | None = None,
        *,
        name: str,
        placeholders: Mapping[str, int | Sequence[int]],
        tokens: Mapping[str, Tokens] | None = None,
    ) -> None:
        template = processor._resolve_chat_template(template)
        if DATED.search(template):  # an item read tomorrow would be one of another text
            raise ValueError(
                f"{name} writes today's date (strftime_now), so samples would be others every day: give a template "
                "with a fixed date as data.chat_template"
            )
        super().__init__(processor.tokenizer, template, name=name, placeholders=placeholders, tokens=tokens)
        self.who = type(processor).__name__
        # The same processor twice: one that remembers what it made of blanks, one for the real files.
        self._blank, self._real = copy.copy(processor), copy.copy(processor)
        part = getattr(processor, "image_processor", None)
        if part is not None:
            self._blank.image_processor, self._real.image_processor = Remembered(part), Watched(part)
        self._text = processor
        self._loading = threading.Lock()

    def _messages(self, chat: Chat, media: Sequence[Any]) -> chats_template.Messages:
        """Typed content, each medium with what it is: a picture or its blank."""
        left = iter(media)
        return [
            {
                "role": turn.role,
                "content": [
                    {"type": "text", "text": part.text}
                    if part.kind == "text"
                    else {"type": part.kind, part.kind: next(left)}
                    for part in turn.parts
                ],
            }
            for turn in chat.turns
        ]

    def _call(self, processor: Any, messages: chats_template.Messages) -> Any:
        """HuggingFace's own inputs of the model for these messages, and where its texts came to stand."""
        from jinja2 import TemplateError as JinjaError

        try:
            return processor.apply_chat_template(
                messages,
                chat_template=self.template,
                tokenize=True,
                return_dict=True,
                processor_kwargs={
                    "return_offsets_mapping": True,
                    "return_text_replacement_offsets": True,
                    # Not for all of it: some would make tensors of the offsets, too.
                    "images_kwargs": {"return_tensors": "pt"},
                },
            )
        except JinjaError as error:
            raise BrokenSampleError("template", f"the chat template refuses it: {error}") from None

    def encode(self, chat: Chat, sizes: Sequence[Size]) -> Encoded:
        media = chat.media
        for part in media:
            self.encoders_of(part.kind)
            if part.path.lower().endswith(".svg"):
                raise BrokenSampleError(
                    "no encoder", f"{part.path}: a drawing (SVG), which {self.who} does not read: save it as a PNG"
                )
        messages = self._messages(chat, [chats_media.blank_picture(size) for size in sizes])
        render = chats_template.render_with(self.template, self.special)
        text = render(messages, False)
        spans = chats_template.answers(chat, messages, text, self.template, self.special, self.ends, self.name)
        try:
            out = self._call(self._blank, messages)
        except (TypeError, ZeroDivisionError, ValueError) as error:
            if isinstance(error, BrokenSampleError):
                raise
            raise BrokenSampleError(self._why(chat), f"{self.who} refuses it: {error}") from None
        ids = [int(token) for token in out["input_ids"][0]]
        offsets = [(int(first), int(last)) for first, last in out["offset_mapping"][0]]
        moved = (out.get("text_replacement_offsets") or [[]])[0]
        if len(moved) != len(media) or [one["type"] for one in moved] != [part.kind for part in media]:
            raise ValueError(
                f"{self.who} wrote {len(moved)} media into a text that has {len(media)}, or in another order: it does "
                "not say where they stand, or its template leaves some out"
            )
        spans = [(chats_media.shifted(start, moved), chats_media.shifted(end, moved)) for start, end in spans]
        items = self._items(chat, out, getattr(self._blank, "image_processor", None), ids, offsets, moved)
        wanted = {token for encoder in self.placeholders.values() for token in encoder}
        found, told = sum(token in wanted for token in ids), sum(item.tokens for item in items)
        if found != told:
            raise BrokenSampleError("placeholder", f"has {found} placeholder tokens for {told} of its media: {WORDS}")
        return Encoded(ids, self._targets(chat, spans, offsets, ids), items)

    def _why(self, chat: Chat) -> str:
        """Which kind of broken a chat is that the processor refuses."""
        words = "".join(part.text for turn in chat.turns for part in turn.parts)
        if any(token in words for token in self.ends):
            return "placeholder"
        return "size" if chat.media else "template"

    def encoders_of(self, kind: str) -> list[str]:
        if kind != "image" or getattr(self._text, "image_processor", None) is None:
            raise BrokenSampleError("no encoder", f"the chat has a file of kind {kind}, which {self.who} is not given")
        return [ENCODER_OF[kind]]

    def _items(
        self,
        chat: Chat,
        out: Mapping[str, Any],
        part: Any,
        ids: Sequence[int],
        offsets: Sequence[tuple[int, int]],
        moved: Sequence[Mapping[str, Any]],
    ) -> list[Item]:
        """The media items of what the processor returned for the whole chat."""
        found = []
        for medium, replaced in zip(chat.media, moved, strict=True):
            wanted = self.placeholders[ENCODER_OF[medium.kind]]
            found.append(chats_media.runs_in(ids, offsets, replaced["new_span"], wanted))
            if not found[-1][1]:
                raise ValueError(
                    f"{self.who} wrote no placeholder (id {wanted}) for a file of kind {medium.kind}: these are not "
                    "the placeholders of its model"
                )
        if not found:
            return []
        runs = chats_media.in_tiles([of_medium for _, of_medium in found], part.last, self.who)
        pieces = chats_media.cut("image", out, runs, self.who)
        places = [(medium, found[medium][0], run) for medium, of_medium in enumerate(runs) for run in of_medium]
        return [
            self._check_tokens(Item("vision", medium, start, count, before, piece.shape, piece.about))
            for (medium, before, (start, count)), piece in zip(places, pieces, strict=True)
        ]

    def load(self, chat: Chat, encoded: Encoded) -> list[Tensor]:
        media = [chats_media.read_picture(part.path) for part in chat.media]
        with self._loading:  # the processor keeps what it made last
            out = self._call(self._real, self._messages(chat, media))
            raw = self._real.image_processor.last
        ids = [int(token) for token in out["input_ids"][0]][: len(encoded.ids)]
        if ids != encoded.ids:
            raise DecodeError(
                f"{self.who} makes other tokens of this chat than when it was prepared: a file of it has changed, such "
                f"as {chat.media[0].path}; prepare the data again (remove its folder in the cache)"
            )
        moved = out["text_replacement_offsets"][0]
        offsets = [(int(first), int(last)) for first, last in out["offset_mapping"][0]]
        whole = [int(token) for token in out["input_ids"][0]]
        wanted = self.placeholders["vision"]
        runs = [chats_media.runs_in(whole, offsets, replaced["new_span"], wanted)[1] for replaced in moved]
        runs = chats_media.in_tiles(runs, raw, self.who)
        known = [item.shape for item in encoded.items]
        known += [(1,)] * (sum(map(len, runs)) - len(known))  # of what was cut off nothing is kept
        pieces = chats_media.cut("image", out, runs, self.who, known)[: len(encoded.items)]
        return [piece.data.float() for piece in pieces if piece.data is not None]

    def signature(self) -> str:
        parts = {name: getattr(self._text, name, None) for name in ("image_processor", "feature_extractor")}
        said = {name: part.to_dict() for name, part in parts.items() if part is not None}
        return json.dumps(
            [_tokenizer_text(self.tokenizer), self.template, self._text.to_dict(), said, self.placeholders, self.who],
            default=str,
            sort_keys=True,
        )


def _tokenizer_text(tokenizer: Any) -> str:
    return str(tokenizer.backend_tokenizer.to_str()) + repr(sorted(tokenizer.special_tokens_map.items()))


def template_text(path: str | Path) -> str:
    """The chat template in a file. Raises ValueError, naming it, when it cannot be read or is no template."""
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


__all__ = ["ChatFormat", "Encoded", "Item", "ProcessorFormat", "TokenizerFormat", "template_text"]
