"""Encodes chats for a whole HuggingFace checkpoint: ids, targets and media items as its own processor makes them.

A processor is called twice, each time through its own apply_chat_template. For lengths it gets blank media of the right
sizes: blank pictures, silent clips, and videos on the meta device. Its own rules choose their frames. Results are
cached by size. For data it gets the real media, on first access to an item. `media.cut` splits its output into
items.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from interlace.data.chats.encoding import media as chats_media
from interlace.data.chats.encoding.load import NoVideos
from interlace.data.chats.encoding.processor_parts import Part as ProcessorPart
from interlace.data.chats.encoding.processor_parts import Remembered, RememberedApart, Videos, settings_of
from interlace.data.chats.encoding.template import Messages, Spans
from interlace.data.chats.encoding.tokens import WORDS, ChatFormat, Encoded, Item, Tokens, tokenizer_text
from interlace.data.chats.files.shapes import Chat, Part
from interlace.modalities import Modality, Sampled, all_modalities, named
from interlace.modalities.errors import BrokenSampleError, DecodeError

DATED = re.compile(r"strftime_now\s*\(")
MADE = ("_blank", "_real", "_parts", "_asking")
"""Attributes that another process creates again from its copy of the processor."""


class _Asked(NamedTuple):
    """Output of a processor for a chat. frames: the frames taken of each of its videos."""

    out: Any
    moved: list[Mapping[str, Any]]
    ids: list[int]
    offsets: list[tuple[int, int]]
    frames: list[list[int]]


class ProcessorFormat(ChatFormat):
    """Format for whole HuggingFace checkpoints: everything comes from the processor.

    processor: with a tokenizer, and a part for each kind of media. Its template is used unless one is given. fps:
    frames per second of a video; overrides the processor's own rule.
    """

    def __init__(
        self,
        processor: Any,
        template: str | None = None,
        *,
        name: str,
        placeholders: Mapping[str, int | Sequence[int]],
        tokens: Mapping[str, Tokens] | None = None,
        fps: float | None = None,
        end: str = "",
    ) -> None:
        from transformers import ProcessorMixin

        template = processor._resolve_chat_template(template)
        if DATED.search(template):  # its text would change from day to day
            raise ValueError(
                f"{name} writes today's date (strftime_now), so samples would be others every day: give a template "
                "with a fixed date as data.chat_template"
            )
        super().__init__(processor.tokenizer, template, name=name, placeholders=placeholders, tokens=tokens, end=end)
        self.who, self.fps, self._text = type(processor).__name__, fps, processor
        # Some processors have another default, which they pass on as if the caller had set it.
        self._unasked = inspect.signature(ProcessorMixin.apply_chat_template).parameters["return_tensors"].default
        self._split()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in MADE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._split()

    def _split(self) -> None:
        """Creates the attributes in MADE from the processor."""
        # Two copies of the processor: one that caches results for blank media, one for the real files.
        self._blank, self._real = copy.copy(self._text), copy.copy(self._text)
        self._parts = {each.name: part for each in all_modalities() if (part := self._part_of(each))}
        for kind, (attribute, part) in self._parts.items():
            sampled, apart = isinstance(named(kind), Sampled), named(kind).cached_apart
            kept = Videos if sampled else RememberedApart if apart else Remembered
            setattr(self._blank, attribute, kept(part))
            setattr(self._real, attribute, ProcessorPart(part))
        self._asking = threading.Lock()

    def _part_of(self, modality: Modality) -> tuple[str, Any] | None:
        parts = ((name, getattr(self._text, name, None)) for name in modality.processor_parts)
        return next(((name, part) for name, part in parts if part is not None and not isinstance(part, NoVideos)), None)

    def encoders_of(self, kind: str) -> list[str]:
        if kind not in self._parts:
            why = f"the chat has a file of kind {kind}, which {self.who} is not given"
            needed = named(kind).processor_library
            if needed and set(named(kind).processor_parts) & set(type(self._text).get_attributes()):
                why = f"{self.who} reads {kind}s with {needed}, which is not installed: pip install {needed}"
            raise BrokenSampleError("no encoder", why)
        encoder = named(kind).encoder
        if encoder not in self.placeholders:
            raise BrokenSampleError("no encoder", f"the chat has a file of kind {kind}, the model no encoder for such")
        return [encoder]

    def takes_probe(self, kind: str) -> bool:
        return not isinstance(named(kind), Sampled)  # frames are counted, too

    def look(self, kind: str, path: str, *, decode: bool) -> Any:
        modality = named(kind)
        return (modality.header if isinstance(modality, Sampled) else modality.probe)(path, decode=decode)

    # ------------------------------------------------------------------ calling the processor

    def _messages(self, chat: Chat, media: Sequence[object]) -> Messages:
        """Typed content with the media, real or blank."""
        left, made = iter(media), []
        for turn in chat.turns:
            content = [
                {"type": "text", "text": part.text} if part.kind == "text" else named(part.kind).item(next(left))
                for part in turn.parts
            ]
            ended = self.writing.ended(content) if turn.role == "assistant" else content
            made.append({"role": turn.role, "content": ended})
        return made

    def _ask(self, processor: Any, chat: Chat, media: Sequence[object], sampling: Mapping[str, object]) -> _Asked:
        """HuggingFace's own model inputs for a chat, and the positions of its texts. Not thread-safe: parts keep their
        last result. sampling: arguments for media of frames; {}: the chat has no such media."""
        from jinja2 import TemplateError as JinjaError

        for kind, (attribute, part) in self._parts.items():
            chooses = bool(sampling.get("do_sample_frames", True))
            getattr(processor, attribute).asked = [
                settings_of(one, part, self.who, sampling=chooses) for one in chat.media if one.kind == kind
            ]
        # Only for these parts: some processors would convert the offsets to tensors, too.
        own = {key: value for each in all_modalities() for key, value in each.processor_arguments.items()}
        wanted = {"return_offsets_mapping": True, "return_text_replacement_offsets": True, **own, **sampling}
        try:
            out = processor.apply_chat_template(
                self._messages(chat, media),
                chat_template=self.template,
                add_generation_prompt=chat.is_prompt,
                tokenize=True,
                return_dict=True,
                return_tensors=self._unasked,
                processor_kwargs=wanted,
            )
        except JinjaError as error:
            raise BrokenSampleError("template", f"the chat template refuses it: {error}") from None
        moved = (out.get("text_replacement_offsets") or [[]])[0]
        if [one["type"] for one in moved] != [part.kind for part in chat.media]:
            raise ValueError(
                f"{self.who} wrote {len(moved)} media into a text that has {len(chat.media)}, or in another order: it "
                "does not say where they stand, or its template leaves some out"
            )
        ids = [int(token) for token in out["input_ids"][0]]
        offsets = [(int(first), int(last)) for first, last in out["offset_mapping"][0]]
        metadata = self._metadata(processor) if sampling else []
        frames = [[int(number) for number in one.frames_indices] for one in metadata]
        return _Asked(out, moved, ids, offsets, frames)

    def _ask_blank(self, chat: Chat, sizes: Sequence[Any]) -> _Asked:
        """Output for blank media of these sizes. Raises BrokenSampleError for media that the processor refuses."""
        media = [
            named(part.kind).blank(part.path, size, part.limits, self._parts[part.kind][1], self.who)
            for part, size in zip(chat.media, sizes, strict=True)
        ]
        modality, clips = self._clips(chat, sizes)
        headers = [header for _, header in clips]
        sampling = {} if modality is None else modality.choosing(headers, self.fps)
        try:
            return self._ask(self._blank, chat, media, sampling)
        except (RuntimeError, TypeError, ZeroDivisionError, ValueError) as error:
            if isinstance(error, BrokenSampleError):
                raise
            for header in headers:
                if modality is not None:
                    modality.check(header, self._parts[modality.name][1], self.who)
            raise BrokenSampleError(self._why(chat), f"{self.who} refuses it: {error}") from None

    def _clips(self, chat: Chat, sizes: Sequence[Any]) -> tuple[Sampled | None, list[tuple[int, Any]]]:
        """The modality of a chat's media of frames, and for each of them the first frame shown, and the header of the
        part shown; (None, []): it has no such media."""
        modality: Sampled | None = None
        clips: list[tuple[int, Any]] = []
        for part, size in zip(chat.media, sizes, strict=True):
            if isinstance(own := named(part.kind), Sampled):
                modality = own
                clips.append(own.clip(part.path, size, part.limits))
        return modality, clips

    def _metadata(self, processor: Any) -> list[Any]:
        """Metadata of videos from the last call of the blank processor: the frames that its parts chose."""
        parts = [getattr(processor, attribute) for attribute, _ in self._parts.values()]
        return [one for part in parts if isinstance(part, Videos) for one in part.metadata]

    def _ask_real(self, chat: Chat) -> _Asked:
        """Output for the real files. Raises DecodeError."""
        sampling: dict[str, Any] = {}
        frames: list[Any] = []
        if any(isinstance(named(part.kind), Sampled) for part in chat.media):
            sizes = [self.look(part.kind, part.path, decode=False) for part in chat.media]
            taken = self._ask_blank(chat, sizes).frames
            modality, clips = self._clips(chat, sizes)
            assert modality is not None
            paths = [part.path for part in chat.media if part.kind == modality.name]
            frames = [
                modality.frames(path, [first + number for number in chosen])
                for path, (first, _), chosen in zip(paths, clips, taken, strict=True)
            ]
            sampling = modality.chosen([header for _, header in clips], taken)
        left = iter(frames)
        media = [next(left) if isinstance(named(part.kind), Sampled) else self._read(part) for part in chat.media]
        return self._ask(self._real, chat, media, sampling)

    def _read(self, part: Part) -> Any:
        return named(part.kind).read(part.path, part.limits, self._parts[part.kind][1])

    # ------------------------------------------------------------------ reading its output

    def encode(self, chat: Chat, sizes: Sequence[Any]) -> Encoded:
        for part in chat.media:
            self.encoders_of(part.kind)
            settings_of(part, self._parts[part.kind][1], self.who, sampling=True)  # raises for others
        spans: Spans = []
        if not chat.is_prompt:
            messages = self._messages(chat, [part.path for part in chat.media])
            text = self.writing.render(messages, prompt=False)
            spans = self.writing.answers(chat, messages, text)
        with self._asking:
            asked = self._ask_blank(chat, sizes)
            items = self._items(chat, asked)
        moved = asked.moved
        spans = [(chats_media.shifted(start, moved), chats_media.shifted(end, moved)) for start, end in spans]
        wanted = {token for encoder in self.placeholders.values() for token in encoder}
        placed, expected = sum(token in wanted for token in asked.ids), sum(item.tokens for item in items)
        if placed != expected:
            raise BrokenSampleError(
                "placeholder", f"has {placed} placeholder tokens for {expected} of its media: {WORDS}"
            )
        return Encoded(asked.ids, self._targets(chat, spans, asked.offsets, asked.ids), items)

    def _why(self, chat: Chat) -> str:
        """Error kind of a chat that the processor refuses."""
        words = "".join(part.text for turn in chat.turns for part in turn.parts)
        if any(token in words for token in self.writing.ends):
            return "placeholder"
        return "size" if chat.media else "template"

    def _runs(self, chat: Chat, asked: _Asked, processor: Any) -> tuple[list[int], list[chats_media.Runs]]:
        """For each medium: its first token, and its runs of placeholders, one run per item."""
        begins, runs = [], []
        for medium, replaced in zip(chat.media, asked.moved, strict=True):
            wanted = self.placeholders[named(medium.kind).encoder]
            begin, of_medium = chats_media.runs_in(asked.ids, asked.offsets, replaced["new_span"], wanted)
            begins.append(begin)
            runs.append(of_medium)
            if of_medium:
                continue
            if not replaced["replacement"]:
                raise BrokenSampleError("size", f"{medium.path}: too short, {self.who} makes no token of it")
            if isinstance(named(medium.kind), Sampled):
                raise BrokenSampleError(
                    "no encoder",
                    f"{self.who} writes {medium.kind}s with placeholders of their own, and their features are made by "
                    "code of the model that is not called here: save the frames as pictures",
                )
            raise ValueError(
                f"{self.who} wrote no placeholder (id {wanted}) for a file of kind {medium.kind}: these are not "
                "the placeholders of its model"
            )
        for kind, (attribute, _) in self._parts.items():
            places = [place for place, medium in enumerate(chat.media) if medium.kind == kind]
            if places and not isinstance(named(kind), Sampled):
                tiled = chats_media.in_tiles([runs[i] for i in places], getattr(processor, attribute).last, self.who)
                for place, of_medium in zip(places, tiled, strict=True):
                    runs[place] = of_medium
        return begins, runs

    def _pieces(
        self,
        chat: Chat,
        asked: _Asked,
        runs: Sequence[chats_media.Runs],
        known: Sequence[tuple[int, ...]] | None = None,
    ) -> list[chats_media.Cut]:
        """The processor's output, cut in the order of the runs. known: the shapes, if known from blank media."""
        sources = [chats_media.source_of(medium.kind, asked.out) for medium in chat.media]
        places = [medium for medium, of_medium in enumerate(runs) for _ in of_medium]
        made = {}
        for source in dict.fromkeys(sources):
            theirs = [of_medium for of_medium, its in zip(runs, sources) if its == source]
            shapes = None if known is None else [known[i] for i, at in enumerate(places) if sources[at] == source]
            try:
                made[source] = iter(chats_media.cut(source, asked.out, theirs, self.who, shapes))
            except ValueError as error:
                frames = [medium.kind for medium in chat.media if isinstance(named(medium.kind), Sampled)]
                if not frames:
                    raise
                # Some pad videos to one length, or return a chat's videos instead of its pictures.
                raise BrokenSampleError(
                    "no encoder", f"{self.who} does not tell this chat's {frames[0]}s from its other media: {error}"
                ) from None
        return [next(made[sources[medium]]) for medium in places]

    def _items(self, chat: Chat, asked: _Asked) -> list[Item]:
        """The media items of the processor's output for the whole chat."""
        begins, runs = self._runs(chat, asked, self._blank)
        pieces = self._pieces(chat, asked, runs)
        places = [(medium, run) for medium, of_medium in enumerate(runs) for run in of_medium]
        items = []
        for (medium, (start, count)), piece in zip(places, pieces, strict=True):
            encoder = named(chat.media[medium].kind).encoder
            item = Item(encoder, medium, start, count, begins[medium], piece.shape, piece.about)
            items.append(self._check_tokens(item))
        return items

    def load(self, chat: Chat, encoded: Encoded) -> list[Tensor]:
        with self._asking:
            asked = self._ask_real(chat)
            if asked.ids[: len(encoded.ids)] != encoded.ids:
                raise DecodeError(
                    f"{self.who} makes other tokens of this chat than when it was prepared: a file of it has changed, "
                    f"such as {chat.media[0].path}; prepare the data again (remove its folder in the cache)"
                )
            _, runs = self._runs(chat, asked, self._real)
        known = [item.shape for item in encoded.items]
        known += [(1,)] * (sum(map(len, runs)) - len(known))  # items that were cut off are dropped below
        pieces = self._pieces(chat, asked, runs, known)[: len(encoded.items)]
        return [piece.data.float() for piece in pieces if piece.data is not None]

    def signature(self) -> str:
        settings = {name: part.to_dict() for name, part in self._parts.values()}
        return json.dumps(
            [
                tokenizer_text(self.tokenizer),
                self.template,
                self.writing.end,
                self._text.to_dict(),
                settings,
                self.placeholders,
                self.who,
                self.fps,
            ],
            default=str,
            sort_keys=True,
        )
