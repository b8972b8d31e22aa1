"""Answer spans: the characters of a chat, rendered by the model's template, that have a loss.

A template with {% generation %} marks the assistant's text itself. Otherwise each answer is located in one rendering of
the whole chat: the chat is rendered a second time with marks around its answers, which must give the same text apart
from the marks. So it does not matter how a template renders part of a chat. Text that it inserts before an answer
(an empty thought) has no loss. The loss covers the answer as in the record, the token with which the template ends
turns, and white space between the generation prompt and the answer.

A chat whose answer the template changes, cuts or leaves out is refused: otherwise a wrong span would be learnt
silently.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from interlace.data.chats.files.shapes import Chat, Turn
from interlace.modalities.errors import BrokenSampleError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARK = re.compile(f"{OPEN}(\\d+){CLOSE}")
"""Mark at either end of a piece of an answer: its number between two Unicode noncharacters."""
THOUGHT = re.compile(r"</?think>")
"""Tags around a thought. Templates cut answers there."""
REFUSALS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors, besides Jinja's own, that a template's expressions raise on a chat that it does not support."""
Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]


class TemplateError(ValueError):
    """A chat template in which answers cannot be located; the message names it."""


@dataclass(frozen=True)
class Writing:
    """Text format of a model's chats. name: of the template, for messages; special: the tokenizer's special tokens, as
    passed to templates; ends: the texts of all added tokens, longest first; end: token appended to each answer before
    rendering, "" none."""

    template: str
    name: str
    special: dict[str, Any]
    ends: tuple[str, ...]
    end: str = ""

    def ended(self, content: Any) -> Any:
        """The content of an answer with `end` appended."""
        if not self.end:
            return content
        if isinstance(content, str):
            return content + self.end
        if content[-1]["type"] != "text":
            return [*content, {"type": "text", "text": self.end}]
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + self.end}]

    def render(self, messages: Messages, *, prompt: bool) -> str:
        """The text of `messages`. prompt: add the generation prompt. Raises BrokenSampleError for a chat that the
        template refuses."""
        return self.rendered(messages, add_generation_prompt=prompt)[0]

    def rendered(self, messages: Messages, **more: bool) -> tuple[str, Spans]:
        """The library's own rendering, and the spans that it marks. Raises BrokenSampleError as `render`."""
        from jinja2 import TemplateError as JinjaError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[messages], chat_template=self.template, **more, **self.special
            )
        except (JinjaError, *REFUSALS) as error:
            raise BrokenSampleError("template", f"the chat template refuses it: {error}") from None
        return str(texts[0]), spans[0] if spans else []

    def answers(self, chat: Chat, messages: Messages, text: str) -> Spans:
        """[start, end) in characters of `text`, the rendered `messages`, for each answer of `chat` that has a loss.
        Raises BrokenSampleError, and TemplateError for a template that fits no chat."""
        spans = (_marked if GENERATION.search(self.template) else _located)(chat, messages, text, self)
        if self.end and any(text.startswith(self.end, end) for _, end in spans):
            raise BrokenSampleError("template", f"{self.name} writes {self.end} behind data.end_of_turn: name another")
        return spans

    def token_at(self, text: str, place: int) -> str:
        """The added token that begins at a position of a text; "": none."""
        if not text.startswith(self.ends, place):
            return ""
        return next(token for token in self.ends if text.startswith(token, place))


def _marked(chat: Chat, messages: Messages, text: str, writing: Writing) -> Spans:
    """Spans from the template's own marks."""
    name = writing.name
    again, spans = writing.rendered(messages, return_assistant_tokens_mask=True)
    if again != text:
        raise TemplateError(f"{name}: writes another text when it is asked which words are the assistant's")
    spoken = [place for place, turn in enumerate(chat.turns) if turn.role == "assistant"]
    if len(spans) != len(spoken):
        raise TemplateError(
            f"{name}: marks {len(spans)} answers with {{% generation %}} of a chat that has {len(spoken)}"
        )
    learnt = []
    for place, (start, end) in zip(spoken, spans, strict=True):
        if not chat.turns[place].learn:
            continue
        at = int(start)
        for piece in _pieces(chat.turns[place]):
            at = text.find(piece, at, end)
            if at < 0:
                raise _lost(name, place, piece)
            at += len(piece)
        kept = text[start:end].rstrip()
        learnt.append((int(start), int(start) + len(kept) if kept.endswith(writing.ends) else int(end)))
    return learnt


def _located(chat: Chat, messages: Messages, text: str, writing: Writing) -> Spans:
    """Spans from marks inserted into a second rendering."""
    name = writing.name
    if OPEN in text:
        raise BrokenSampleError("template", "its text has the character U+FDD0, by which answers are found here")
    spoken = [place for place, turn in enumerate(chat.turns) if turn.role == "assistant"]
    marked, count = list(messages), itertools.count()
    marks: dict[int, list[int]] = {}  # answer -> marks before its pieces; the mark after a piece is one higher
    for place in spoken:
        first = next(count) + 1
        marked[place] = {**messages[place], "content": _with_marks(messages[place]["content"], writing.end, count)}
        marks[place] = list(range(first, next(count), 2))
    places, plain = _places(writing.render(marked, prompt=False))
    if plain != text:
        raise BrokenSampleError(
            "template",
            f"{name} writes another text when answers have marks around them, so they cannot be told from the rest; "
            "mark them in the template with {% generation %} ... {% endgeneration %} and give it as data.chat_template",
        )
    learnt = [place for place in spoken if chat.turns[place].learn]
    for place in learnt:
        pieces = _pieces(chat.turns[place])
        if not pieces:
            raise BrokenSampleError("empty", f"turn {place + 1} has tags of thoughts and nothing in or behind them")
        for number, piece in zip(marks[place], pieces, strict=True):
            start, end = places.get(number, -1), places.get(number + 1, -1)
            if start < 0 or text[start:end] != piece:
                raise _lost(name, place, piece)
    last, ends = spoken[-1], writing.ends
    if marks[last] and (end := places.get(marks[last][-1] + 1, -1)) >= 0:
        # The token after the last turn is the end token. After earlier turns the next turn may also begin with a token.
        ends = (writing.token_at(text, _behind_space(text, _behind_tags(chat.turns[last], text, end))),)
    prompt, gap = writing.render(messages[:last], prompt=True), ""
    spans = []
    for place in reversed(learnt):
        turn, start, end = chat.turns[place], places[marks[place][0]], places[marks[place][-1] + 1]
        own = _before_tags(turn, text, start)
        if place == last and text.startswith(prompt):
            if own < len(prompt) <= start:  # the prompt includes the tag of a thought
                own = len(prompt)
            elif not text[len(prompt) : own].strip():
                gap = text[len(prompt) : own]
        if text.endswith(gap, 0, own):
            own -= len(gap)
        end = _behind_tags(turn, text, end)
        behind = _behind_space(text, end)
        if any(ends) and text.startswith(ends, behind):
            end = behind + len(writing.token_at(text, behind))
        spans.append((own, end))
    return spans[::-1]


def _pieces(turn: Turn) -> list[str]:
    """The pieces of an answer between the tags of thoughts, without surrounding white space."""
    return [piece.strip() for part in turn.parts for piece in THOUGHT.split(part.text) if piece.strip()]


def _with_marks(content: Any, ending: str, count: Iterator[int]) -> Any:
    """The content of a message with marks around its pieces. ending: text after the answer."""
    if not isinstance(content, str):
        return [
            {**item, "text": _with_marks(item["text"], ending, count)} if item["type"] == "text" else item
            for item in content
        ]
    words, made, at = content.removesuffix(ending), [], 0
    for tag in (*THOUGHT.finditer(words), None):
        piece = words[at : tag.start() if tag else len(words)]
        core = piece.strip()
        if core:
            lead, trail = piece.split(core, 1)
            piece = f"{lead}{OPEN}{next(count)}{CLOSE}{core}{OPEN}{next(count)}{CLOSE}{trail}"
        made += [piece, tag[0] if tag else ""]
        at = tag.end() if tag else at
    return "".join((*made, content[len(words) :]))


def _places(written: str) -> tuple[dict[int, int], str]:
    """Position of each mark in the text without marks (-1 if it occurs twice), and this text."""
    places: dict[int, int] = {}
    kept: list[str] = []
    at = length = 0
    for mark in MARK.finditer(written):
        kept.append(written[at : mark.start()])
        length += mark.start() - at
        at = mark.end()
        places[int(mark[1])] = -1 if int(mark[1]) in places else length
    return places, "".join((*kept, written[at:]))


def _lost(name: str, place: int, piece: str) -> BrokenSampleError:
    shown = textwrap.shorten(piece, 60, placeholder=" ...")
    return BrokenSampleError(
        "template",
        f"turn {place + 1} is an answer that {name} does not write as it is; changed or left out is {shown!r}. "
        'Give the turn "loss": false, or another template as data.chat_template',
    )


def _outer_tags(turn: Turn) -> tuple[list[str], list[str]]:
    """The tags of thoughts before the first piece of a turn, and those after the last."""
    content = "".join(part.text for part in turn.parts)
    tags = THOUGHT.findall(content)
    filled = [number for number, piece in enumerate(THOUGHT.split(content)) if piece.strip()]
    return (tags[: filled[0]], tags[filled[-1] :]) if filled else ([], [])


def _before_tags(turn: Turn, text: str, start: int) -> int:
    """Start of an answer whose first piece is at `start`: includes the answer's own tags of thoughts before it."""
    tags, _ = _outer_tags(turn)
    match = re.search(r"\s*".join(map(re.escape, tags)) + r"\s*\Z", text[:start]) if tags else None
    return match.start() if match else start


def _behind_tags(turn: Turn, text: str, end: int) -> int:
    """End of an answer whose last piece ends at `end`, including the answer's own tags of thoughts after it."""
    _, tags = _outer_tags(turn)
    match = re.compile(r"\s*" + r"\s*".join(map(re.escape, tags))).match(text, end) if tags else None
    return match.end() if match else end


def _behind_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place
