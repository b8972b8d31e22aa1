"""A chat as the model's template writes it, and which characters of that are answers to learn.

A template that marks the assistant's words ({% generation %}) says it itself. Else the answers are found by rendering
prefixes: what turns 1..k and the generation prompt give, and what turns 1..k+1 give, are the two ends of answer k + 1,
provided that each is how the whole text begins. Templates that write earlier turns differently once later ones follow
(that drop thoughts, for example) fail this and are refused by name: a wrong place would be learnt silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from interlace.data.chats_shapes import BrokenSampleError, Chat

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
REFUSALS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template's expressions raise on a chat that it was not written for, beside Jinja's own errors."""
Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""(messages, whether a generation prompt ends the text) -> text."""


class TemplateError(ValueError):
    """A chat template with which answers cannot be told from the rest; the message names it."""


def render_with(template: str, special: dict[str, Any]) -> Render:
    """The library's own rendering of `template`. Raises BrokenSampleError for a chat that the template refuses."""
    from jinja2 import TemplateError as JinjaError
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Messages, prompt: bool) -> str:
        try:
            texts, _ = render_jinja_template(
                conversations=[messages], chat_template=template, add_generation_prompt=prompt, **special
            )
        except (JinjaError, *REFUSALS) as error:
            raise BrokenSampleError("template", f"the chat template refuses it: {error}") from None
        return str(texts[0])

    return render


def answers(
    chat: Chat, messages: Messages, text: str, template: str, special: dict[str, Any], ends: Sequence[str], name: str
) -> list[tuple[int, int]]:
    """[start, end) in characters of `text` of each assistant's turn of `chat`, learnt or not, in order.

    text: `messages` rendered with `template`. special: the tokenizer's special tokens, as templates are given them.
    ends: the special tokens' texts; white space that a template writes after one is not the answer's. name: of the
    template, for messages. Raises TemplateError.
    """
    spoken = [place for place, turn in enumerate(chat.turns) if turn.role == "assistant"]
    if MARKS.search(template):
        marked = _marked(messages, text, template, special, len(spoken), name)
        return [(start, _end_of(text, start, end, ends)) for start, end in marked]
    render = render_with(template, special)
    found = []
    for place in spoken:
        before, upto = render(messages[:place], True), render(messages[: place + 1], False)
        if not (upto.startswith(before) and text.startswith(upto)):
            raise TemplateError(
                f"{name}: the text of a chat's first {place + 1} turns is not how the text of the whole chat begins, "
                "so answers cannot be told from the rest; mark them in the template with {% generation %} ... "
                "{% endgeneration %} and give it as data.chat_template"
            )
        found.append((len(before), _end_of(upto, len(before), len(upto), ends)))
    return found


def _end_of(text: str, start: int, end: int, ends: Sequence[str]) -> int:
    """Where the answer in text[start:end] ends, without white space that follows the token which ends it."""
    kept = text[start:end].rstrip()
    return start + len(kept) if any(kept.endswith(token) for token in ends) else end


def _marked(
    messages: Messages, text: str, template: str, special: dict[str, Any], count: int, name: str
) -> list[tuple[int, int]]:
    from jinja2 import TemplateError as JinjaError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            conversations=[messages], chat_template=template, return_assistant_tokens_mask=True, **special
        )
    except (JinjaError, *REFUSALS) as error:
        raise BrokenSampleError("template", f"the chat template refuses it: {error}") from None
    if texts[0] != text:
        raise TemplateError(f"{name}: writes another text when it is asked which words are the assistant's")
    found = [(int(start), int(end)) for start, end in spans[0]]
    if len(found) != count:
        raise TemplateError(f"{name}: marks {len(found)} answers with {{% generation %}} of a chat that has {count}")
    return found
