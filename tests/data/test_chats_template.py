"""Learnt spans: tokens of a chat that are learnt, with the template logic of well-known models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from interlace.data.chats.encoding.processor import ProcessorFormat
from interlace.data.chats.encoding.tokens import TokenizerFormat
from interlace.data.chats.examine import examine
from interlace.data.chats.files.shapes import parse
from interlace.data.chats.files.sources import Rules
from interlace.data.chats.page import Findings
from interlace.modalities.errors import BrokenSampleError
from tests.data.chat_families import llava, pictures, trained
from tests.data.chat_faults import said, user
from tests.data.templates import GLM4, LLAMA3, LLAVA15, MISTRAL, QWEN3, R1, THINKING, TOKENS

END = "<|im_end|>"
TOKENIZER = trained({}, TOKENS)


def learnt(template: str, *messages: Any, end: str = "") -> list[str]:
    """The runs of learnt tokens of a chat, as text."""
    made = TokenizerFormat(TOKENIZER, template, name="the template", tags={}, specs={}, tokens={}, end=end)
    encoded = made.encode(parse({"messages": list(messages)}, Path("/")), [])
    runs: list[list[int]] = []
    before = False
    for token, target in zip(encoded.ids, encoded.targets, strict=True):
        if target and not before:
            runs.append([])
        if target:
            runs[-1].append(token)
        before = target
    return [made.decode(run, skip_special=False) for run in runs]


ROUNDS = (user("One?"), said("Yes."), user("Two?"), said("No."))


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (QWEN3, [f"Yes.{END}", f"No.{END}"]),
        (LLAMA3, ["Yes.<|eot_id|>", "No.<|eot_id|>"]),
        (MISTRAL, [" Yes.</s>", " No.</s>"]),
        (R1, ["Yes.</s>", "No.</s>"]),
        (THINKING, [f"Yes.{END}", f"No.{END}"]),
        (GLM4, ["\nYes.", "\nNo."]),
    ],
    ids=["qwen3", "llama3", "mistral", "r1", "thinking", "glm4"],
)
def test_answers_of_both_rounds_and_what_ends_them(template: str, wanted: list[str]) -> None:
    assert learnt(template, *ROUNDS) == wanted


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, MISTRAL, R1, THINKING, GLM4])
def test_prompts_are_those_of_huggingface(template: str) -> None:
    """Rendered as for its generate; a truncated answer would end with the empty thought that Qwen3's template
    writes."""
    made = TokenizerFormat(TOKENIZER, template, name="the template", tags={}, specs={}, tokens={})
    prompt = parse({"messages": list(ROUNDS)}, Path("/")).prompt()
    wanted = TOKENIZER.apply_chat_template(
        [ROUNDS[0]], chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    _, encoded = made.encode_prompt(prompt, [])
    assert encoded.ids == wanted["input_ids"] and not any(encoded.targets)


def test_missing_generation_prompt_is_inferred_from_an_answer() -> None:
    plain = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }}</s>{% endfor %}"
    made = TokenizerFormat(TOKENIZER, plain, name="the template", tags={}, specs={}, tokens={})
    _, encoded = made.encode_prompt(parse({"messages": [user("a"), said("b")]}, Path("/")).prompt(), [])
    assert made.decode(encoded.ids, skip_special=False) == "user: a</s>assistant: "


def test_an_empty_thought_of_the_template_is_not_learnt() -> None:
    assert learnt(QWEN3, user("a"), said("b")) == [f"b{END}"]
    assert learnt(QWEN3, user("a"), said("<think>\n\n</think>\n\nb")) == [f"<think>\n\n</think>\n\nb{END}"]


def test_thoughts_are_learnt_where_the_template_keeps_them() -> None:
    thought = said("<think>2 + 3</think>Five.")
    assert learnt(QWEN3, user("a"), thought) == [f"<think>\n2 + 3\n</think>\n\nFive.{END}"]
    assert learnt(MISTRAL, user("a"), thought) == [" <think>2 + 3</think>Five.</s>"]
    # The generation prompt already has the tag.
    assert learnt(THINKING, user("a"), said("<think>\n2 + 3\n</think>\nFive.")) == [f"2 + 3\n</think>\nFive.{END}"]
    assert learnt(MISTRAL, user("a"), said("t <think>t</think>")) == [" t <think>t</think></s>"]


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (R1, (user("a"), said("<think>2 + 3</think>Five."))),
        (QWEN3, (user("a"), said("<think>2 + 3</think>Five."), user("b"), said("c"))),
    ],
    ids=["r1", "qwen3"],
)
def test_a_thought_that_the_template_cuts_refuses_its_record(template: str, messages: Any) -> None:
    with pytest.raises(BrokenSampleError, match=r"turn 2 .* the template .* left out is '2 \+ 3'") as refused:
        learnt(template, *messages)
    assert refused.value.kind == "template"


def test_thought_cut_from_turn_without_loss_is_accepted() -> None:
    before = said("<think>2 + 3</think>Five.", loss=False)
    assert learnt(QWEN3, user("a"), before, user("b"), said("c")) == [f"c{END}"]


def test_equal_answers_are_told_apart() -> None:
    rounds = (user("no"), said("no", loss=False), user("no"), said("no"), user("no"), said("no", weight=0))
    assert learnt(QWEN3, *rounds) == [f"no{END}"]


def test_white_space_around_an_answer_is_as_the_template_has_it() -> None:
    assert learnt(LLAMA3, user("a"), said("  b \n")) == ["b<|eot_id|>"]
    assert learnt(MISTRAL, user("a"), said(" b ")) == ["  b </s>"]


def test_generation_marks_do_not_allow_cut_thoughts() -> None:
    marked = R1.replace("content + '</s>'", "content").replace(
        "{{ '<|Assistant|>' + content }}", "<|Assistant|>{% generation %}{{ content + '</s>' }}{% endgeneration %}"
    )
    assert learnt(marked, *ROUNDS) == ["Yes.</s>", "No.</s>"]
    with pytest.raises(BrokenSampleError, match="left out is '2 "):
        learnt(marked, user("a"), said("<think>2 + 3</think>Five."))


def test_a_template_that_writes_answers_otherwise_is_refused() -> None:
    with pytest.raises(BrokenSampleError, match=r"left out is 'Yes\.'"):
        learnt(LLAMA3.replace("| trim", "| trim | upper"), *ROUNDS)


def test_the_characters_of_marks_are_refused_in_texts() -> None:
    with pytest.raises(BrokenSampleError, match=r"U\+FDD0"):
        learnt(LLAMA3, user("\ufdd00\ufdd1"), said("b"))


def test_an_end_is_added_behind_each_answer() -> None:
    assert learnt(GLM4, *ROUNDS, end="</s>") == ["\nYes.</s>", "\nNo.</s>"]
    with pytest.raises(BrokenSampleError, match="behind data"):  # it also begins the next turn
        learnt(GLM4, *ROUNDS, end="<|user|>")
    assert learnt(GLM4, user("a"), said("b", loss=False), user("c"), said("<think>t</think>"), end="</s>") == [
        "\n<think>t</think></s>"
    ]


@pytest.mark.parametrize("end", ["", "</s>"])
def test_llava_1_5_ends_no_answer_by_itself(end: str, tmp_path: Path) -> None:
    family = llava(tmp_path / "model")
    family.processor.chat_template = LLAVA15
    made = ProcessorFormat(family.processor, name="template", placeholders=family.placeholders, end=end)
    [picture] = pictures(tmp_path / "pictures", 1)
    shown = {"type": "image", "image": str(picture)}
    texts = [[{"type": "text", "text": text}] for text in ("What is it?", "A cat.", "Sure?", "No.")]
    messages = [user([shown, *texts[0]]), said(texts[1]), user(texts[2]), said(texts[3])]
    record = {"messages": messages}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    [one] = examine([tmp_path / "a.jsonl"], made, Rules(), tmp_path / "media")
    assert one.encoded is not None, one.broken
    learnt = [token for token, target in zip(one.encoded.ids, one.encoded.targets, strict=True) if target]
    if end:
        assert made.decode(learnt, skip_special=False) == " A cat.</s>No.</s>"  # " No" is two tokens here
    else:
        out = family.processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
        )
        marked = [token for token, mask in zip(out["input_ids"][0].tolist(), out["assistant_masks"][0]) if mask]
        assert learnt == marked and "cat" in made.decode(marked)
    assert made.ends_answer(one.encoded) == bool(end)
    findings = Findings(chats=made)
    findings.add(one)
    assert any('set data.end_of_turn, such as "</s>"' in line for line in findings.lines()) == (not end)


def test_special_tokens_as_words_are_listed() -> None:
    made = TokenizerFormat(TOKENIZER, LLAMA3, name="the template", tags={}, specs={}, tokens={})

    def typed(*texts: str) -> list[str]:
        return made.typed(parse({"messages": [user(texts[0]), said(texts[1])]}, Path("/")))

    assert typed("what is <b>bold</b>, 3 < 5 > 4 and [INST]?", "b") == []
    assert typed("a<<|eot_id|>b <|eot_id|>", "[gMASK] </s>") == ["<|eot_id|>", "[gMASK]", "</s>"]
