"""Writes the page of `bench.architectures`: docs/architectures.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

INTRODUCTION = """# Which models a MultimodalModel takes

Written by `python -m bench.architectures`; `bench/results/architectures.json` has a row per architecture. Tried are
all model types of transformers {transformers} with a causal or multimodal language model, all whose main input is
images or sound, and the encoders inside larger models, which are named by their class, as tiny random models whose
configs are shrunk by rule. Each is held against its own eager attention, run whole on one sample at a time: outputs and
the gradient of every parameter of three samples in one batch, two stages cut at every layer, greedy generation of three
prompts at once, and the drop-in attention under a plan. A hybrid is tried with its other kinds of layers too, and a
model with the windows that its default config leaves off.

How samples share a batch is not listed anywhere in the code: `MultimodalModel` finds it out when it is made, by trying
a stand-in of the model. So a model that is not below is treated by the same rule, and one that mixes tokens where
nobody looked does not leak. `mllm.packing` says what was found:

| `mllm.packing` | how samples share a batch | who |
|---|---|---|
| `packed` | side by side in one row; the attention mask keeps them apart | where attention alone mixes tokens |
| `rows` | one per row, padded on the right (of an encoder: items of one size) | linear attention, convolutions |
| `alone` | packed, with a call of the model for each | whatever else, and where a trial cannot be made |

*right*: all that is the model's own result. *refused*: a ValueError says why, and what to do instead. *raised*: another
error, of the model or of PyTorch, and no result. *not built*: no tiny config was found that runs, or the model wants
more than token ids or its main input. Names in parentheses are settings that the default config does not have.
"""

OUTCOMES = ("right", "refused", "raised", "not built", "WRONG")
KINDS = {"language": "Language models", "encoder": "Encoders"}
ASIDE = {"cut": "Stages", "generate": "Generation", "dropin": "The drop-in attention under a plan"}


def table(report: dict[str, Any]) -> str:
    """The page for a report of bench.architectures."""
    rows = report["rows"]
    lines = [INTRODUCTION.format(transformers=report["versions"]["transformers"])]
    lines += [f"| | tried | {' | '.join(OUTCOMES)} |", f"|---|{'---|' * (len(OUTCOMES) + 1)}"]
    for kind, result in report["counts"].items():
        counts = [sum(result.values()), *(result[outcome] for outcome in OUTCOMES)]
        lines.append(f"| {KINDS[kind]} | {' | '.join(map(str, counts))} |")
    for kind in report["counts"]:
        lines += section(kind, [row for row in rows if row["kind"] == kind])
    return "\n".join(lines) + "\n"


def section(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """Results of the language models, or of the encoders."""
    lines = ["", f"## {KINDS[kind]}", "", "| right | model types |", "|---|---|"]
    cases = [(row, name, one) for row in rows for name, one in row["variants"].items()]
    lines += grouped((row, name, one["layout"]) for row, name, one in cases if one["outcome"] == "right")
    for outcome in OUTCOMES[1:]:
        result = [(row, name, one["note"]) for row, name, one in cases if one["outcome"] == outcome]
        if result:
            lines += ["", f"| {outcome} | model types |", "|---|---|", *grouped(result)]
    for key, title in ASIDE.items():
        result = [(row, name, one[key]) for row, name, one in cases if not is_right(one.get(key, "right"))]
        if result:
            lines += ["", f"| {title}, of those that are right | model types |", "|---|---|", *grouped(result)]
    return lines


def is_right(said: str) -> bool:
    """True if a check of a row has nothing to add."""
    return said in ("right", "a single layer", "carrier right; use_plan right")


def grouped(found: Iterable[tuple[dict[str, Any], str, str]]) -> list[str]:
    """Table lines: a message without names and numbers, and its models; most frequent message first."""
    of: dict[str, list[str]] = {}
    for row, variant, said in found:
        name = row["model_type"] if variant == "default" else f"{row['model_type']} ({variant})"
        of.setdefault(general(said, row["class"]), []).append(name)
    order = sorted(of, key=lambda said: (-len(of[said]), said))
    return [f"| {said} | {', '.join(of[said])} |" for said in order]


def general(said: str, name: str) -> str:
    """A message without model-specific parts, as a table cell."""
    if name:
        said = said.replace(name, "the model")
    said = re.sub(r"\b[A-Z]\w+(Attention|Mixer)\b( \(in the model\))?", "a layer", said)
    said = re.sub(r"'\w+Config' object", "its config", said)
    said = re.sub(r" \((relative error|model\.|git\.|__getitem__|ne\)|[\w ]+ of size)[^)]*\)?", "", said)
    said = re.sub(r"^refused at \d+: (language_model: |encoder: )?", "refused: ", said)
    said = said.split(". ")[0]  # the remedy is in the message itself
    return said.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
