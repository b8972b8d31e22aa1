"""Runs on the rehearsal device: training with validation and checkpoints, resume, generation. Prints what was noticed.

python -m tests.rehearsal.steps NAME...: "modules" (a model put together from encoders and a language model) or a family
of tests/train/whole_families.py (a HuggingFace checkpoint). Each part has a table (`rehearsal.table`) for each time
that it ran: "step" for each training step. "device" says whether the device itself is right (`checks`).
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from interlace.model import generate
from interlace.train import rank
from interlace.train.config import load as configs
from interlace.train.data.feed import datasets
from interlace.train.data.texts import tokenizer_of
from interlace.train.models.build import build, materialize
from interlace.train.observers.saving import Saving
from interlace.train.observers.validation import Validation
from interlace.train.report.answers import prompt_of
from interlace.train.selection import choose, fill
from interlace.train.trainer import Trainer
from tests import rehearsal
from tests.data import chat_families
from tests.gpu.trainer import TABLE
from tests.rehearsal.checks import checks
from tests.train.whole_families import kind_of, prepare

STEPS = {"steps": 4, "schedule_steps": 6, "warmup_steps": 1, "validate_every": 2, "validation_samples": 2}
PARTS = {
    "step": (Trainer, "_train_step"),
    "validation": (Validation, "losses"),
    "checkpoint": (Saving, "save"),
    "resume": (Trainer, "resume"),
}
"""Part -> class and method."""


def main(names: list[str]) -> None:
    rehearsal.start()
    result: dict[str, Any] = {"device": checks()}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            result[name] = whole(name, Path(folder)) if name != "modules" else modules(Path(folder))
    print(json.dumps(result))


def modules(folder: Path) -> dict[str, list[dict[str, int]]]:
    table = copy.deepcopy(TABLE)
    table["run"]["folder"] = str(folder / "runs")
    table["train"] |= {**STEPS, "precision": "bf16"}
    return trained(table)


def whole(name: str, folder: Path) -> dict[str, list[dict[str, int]]]:
    family, records, table = prepare(name, folder, kind_of(name))
    table["train"] |= STEPS
    parts = trained(table)
    [kind] = json.loads((folder / "model" / "config.json").read_text())["architectures"]
    model: Any = getattr(transformers, kind).from_pretrained(folder / "model", attn_implementation="interlace")
    inputs = chat_families.own(family.processor, records[0])
    parts["HuggingFace's generate"] = [
        alike(model, lambda device: model.generate(**inputs.to(device), max_new_tokens=4, do_sample=False).tolist())
    ]
    return parts


def trained(table: dict[str, Any]) -> dict[str, list[dict[str, int]]]:
    """What a run notices that trains four steps, and two more after a resume; and an answer of its model."""
    table["run"]["device"] = "cuda"
    table["checkpoint"] = {"every": 2}
    table["log"] |= {"samples": 0, "accuracy_samples": 0, "trace_step": 1}
    parts: dict[str, list[dict[str, int]]] = defaultdict(list)
    methods = {part: getattr(owner, name) for part, (owner, name) in PARTS.items()}
    for part, (owner, name) in PARTS.items():
        setattr(owner, name, noted(methods[part], parts[part]))
    try:
        config = configs.from_table(table, [])
        assert rank.run(config, source="config") == 0
        [newest] = Path(table["run"]["folder"]).glob("*/latest")
        more = configs.from_table(table, ["train.steps=6"])
        assert rank.run(more, source="config", start=rank.Start(resume=str(newest))) == 0
    finally:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, methods[part])
    tokenizer = tokenizer_of(config, source="config")
    model: Any = build(config, tokenizer, source="config")
    _, held_out = datasets(config, model, tokenizer)
    materialize(model, seed=0)
    fill(config, model, choose(config, newest.resolve()))
    prompts = [prompt_of(held_out.sample(i), model.placeholders) for i in range(2)]
    parts["generation"] = [alike(model, lambda device: generate(model, prompts, max_new_tokens=4))]
    return dict(parts)


def noted(method: Callable[..., Any], tables: list[dict[str, int]]) -> Callable[..., Any]:
    """The method, with a table for each call of what it notices."""

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with rehearsal.record() as seen:
            result = method(*args, **kwargs)
        tables.append(rehearsal.table(seen))
        return result

    return watched


def alike(model: torch.nn.Module, answer: Callable[[str], Any]) -> dict[str, int]:
    """What is noticed when the model answers on the device as it does on the CPU."""
    model.eval()
    expected = answer("cpu")
    model.to(rehearsal.NAME)
    with rehearsal.record() as seen:
        got = answer(rehearsal.NAME)
    assert got == expected, (got, expected)
    return rehearsal.table(seen)


if __name__ == "__main__":
    main(sys.argv[1:])
