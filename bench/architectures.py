"""Sweep over every architecture of transformers inside MultimodalModel: right, refused, or not built this small.

The sweep covers all model types with a causal or multimodal language model, all whose main input is images or sound,
and the encoders inside larger models. They are built from configs that are shrunk by rule (architectures_tiny.py). Each
hybrid is also built with its other kinds of layers, and with windows switched on. Every model is compared with its own
eager attention, one sample at a time (architectures_check.py). Outcomes:

    right      outputs, gradients, cuts, generation and the drop-in equal those of the model itself
    refused    interlace raised ValueError with the cause and the remedy
    raised     another exception: no wrong result, but no clear message either
    not built  no tiny config was found that runs, or the model cannot run on its main input alone
    WRONG      the results differ

    python -m bench.architectures [NAME ...] [--out bench/results/architectures.json] [--table docs/architectures.md]

Each architecture runs in its own process, bounded in time and memory. All of them take about an hour on one core. A
stopped sweep resumes: rows in the file are kept. Architectures that are named run again.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import inspect
import json
import os
import pkgutil
import re
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from bench.architectures_check import (
    Wrong,
    check_encoder,
    check_language,
    first_line,
    is_refusal,
    spread_encoder,
    spread_language,
)
from bench.architectures_table import table
from bench.architectures_tiny import STRATEGIES, tiny_config, variants
from bench.measure import command, machine, versions, write_json
from interlace.model import ModalityModule
from interlace.model.inputs.patches import GRID

ROOT = Path(__file__).parents[1]
LARGEST = 40_000_000  # number of parameters that still counts as tiny
MEMORY = 6 << 30
MEDIA = {"pixel_values", "input_features", "input_values", "pixel_values_videos", "audio_mel"}
LANGUAGE, ENCODER = KINDS = "language", "encoder"
# The outcome of a type is the first of these that any of its variants has.
OUTCOMES = ("WRONG", "raised", "right", "refused", "not built")
WARM = ((LANGUAGE, "llama"), (ENCODER, "siglip_vision_model"))  # imported once, before processes fork


def population() -> list[tuple[str, str]]:
    """(kind, model type) of every candidate for a language model or an encoder of a MultimodalModel."""
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    multimodal = set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    multimodal |= set(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    result = [(LANGUAGE, name) for name in sorted(causal | multimodal)]
    configs = set()
    for name in sorted(set(modeling_auto.MODEL_MAPPING_NAMES) - causal):
        try:
            made = model_class(ENCODER, name)
            inputs = made.main_input_name
        except (ImportError, AttributeError):
            continue  # needs a library that is not installed
        if MEDIA & {*([inputs] if isinstance(inputs, str) else inputs or [])}:
            result.append((ENCODER, name))
            configs.add(made.config_class)
    return result + [(ENCODER, name) for name, made in sorted(towers().items()) if made.config_class not in configs]


@cache
def towers() -> dict[str, Any]:
    """Class name -> encoder that no table of transformers names: parts of larger models, with their own forwards."""
    result = {}
    folders = [folder.name for folder in pkgutil.iter_modules(transformers.models.__path__) if folder.ispkg]
    for folder in folders:
        try:
            module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        except ImportError:
            continue  # a folder without models, or one that needs a library that is not installed
        for name, made in vars(module).items():
            if (
                isinstance(made, type)
                and issubclass(made, transformers.PreTrainedModel)
                and made.__module__ == module.__name__
                and made.config_class is not None
                and not re.search(r"For[A-Z]|Backbone|PreTrainedModel$|With[A-Z]|Decoder", name)
            ):
                arguments = list(inspect.signature(made.forward).parameters)[1:]
                if _takes_media(arguments):
                    result[name] = made
    return result


def is_tower(kind: str, model_type: str) -> bool:
    """True if model_type is a class name, one of `towers`."""
    return kind == ENCODER and model_type not in modeling_auto.MODEL_MAPPING_NAMES


def _takes_media(arguments: list[str]) -> bool:
    """True if a forward with these arguments takes media, and neither ids nor decoder inputs."""
    if any(name == "input_ids" or "decoder" in name or name.startswith("inputs_embeds") for name in arguments):
        return False
    return GRID in arguments or (bool(arguments) and arguments[0] in MEDIA)


def model_class(kind: str, model_type: str) -> Any:
    """Class of a model type: its language model, its base model, or the class of that name (see `towers`)."""
    if is_tower(kind, model_type):
        return getattr(transformers, model_type, None) or towers()[model_type]
    tables = [modeling_auto.MODEL_MAPPING_NAMES]
    if kind == LANGUAGE:
        tables = [
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        ]
    name = next(table[model_type] for table in tables if model_type in table)
    name = name if isinstance(name, str) else name[0]
    result = getattr(transformers, name, None)
    if result is None:
        module = model_type_to_module_name(model_type)
        result = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    return result


class NotBuilt(Exception):
    """No strategy gave a tiny model that runs; the message has the error of the first strategy."""


def build(kind: str, model_type: str, variant: dict[str, Any] | None = None, seed: int = 0) -> nn.Module:
    """A tiny model in fp32 with random weights and eager attention, in evaluation mode. Raises NotBuilt."""
    reasons = []
    for strategy in STRATEGIES:
        try:
            torch.manual_seed(seed)
            made = model_class(kind, model_type)
            tower = made.config_class if is_tower(kind, model_type) else None
            config = _part_for(made, tiny_config(model_type, strategy, variant, tower))
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in made(config).parameters())
            if size > LARGEST:
                raise ValueError(f"{size:,} parameters")
            model: nn.Module = made(config).float().eval()
            if kind == ENCODER and tower is None and getattr(config, "is_encoder_decoder", False):
                model = model.get_encoder()  # type: ignore[operator]
            model.set_attn_implementation("eager")  # type: ignore[operator]
            if kind == LANGUAGE:
                spread_language(model)
            return model
        except Exception as error:  # any exception that a config or a model raises
            reasons.append(_where(error))
    raise NotBuilt(reasons[0])


def _part_for(made: Any, config: Any) -> Any:
    """The part of a composite config that a class expects."""
    parts = (part for part in [config, *vars(config).values()] if isinstance(part, made.config_class))
    return next(parts, config)


def examine(kind: str, model_type: str) -> dict[str, Any]:
    """Result of a model type in all variants of its config."""
    try:
        settings = variants(model_type) if kind == LANGUAGE else {"default": {}}
    except Exception:  # its default config cannot be created: build reports the cause
        settings = {"default": {}}
    result = {name: examine_variant(kind, model_type, variant) for name, variant in settings.items()}
    outcomes = {one["outcome"] for one in result.values()}
    built = next((one["class"] for one in result.values() if "class" in one), "")
    outcome = next(outcome for outcome in OUTCOMES if outcome in outcomes)
    return {"kind": kind, "model_type": model_type, "class": built, "outcome": outcome, "variants": result}


def examine_variant(kind: str, model_type: str, variant: dict[str, Any], *, thorough: bool = True) -> dict[str, Any]:
    """Result of one variant. thorough: also check cuts, generation and the drop-in."""
    result: dict[str, Any] = {}
    try:
        model = build(kind, model_type, variant)
        result["class"] = type(model).__name__
        if kind == LANGUAGE:
            check_language(model, result, thorough=thorough)
        else:
            shapes = ModalityModule(copy.deepcopy(model), projector=nn.Identity())
            try:
                items = spread_encoder(model, shapes)
            except Exception as error:  # the model rejects its own sizes
                raise NotBuilt(_where(error)) from error
            check_encoder(model, items, result, thorough=thorough)
        result["outcome"] = "WRONG" if any("WRONG" in str(value) for value in result.values()) else "right"
    except NotBuilt as error:
        result |= {"outcome": "not built", "note": str(error)}
    except Wrong as error:
        result |= {"outcome": "WRONG", "note": str(error)}
    except Exception as error:  # any exception is recorded in the table
        if is_refusal(error):
            result |= {"outcome": "refused", "note": first_line(error)}
        else:
            result |= {"outcome": "raised", "note": _where(error)}
    return result


def _where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({Path(last.filename).name}:{last.lineno})"


def apart(kind: str, model_type: str, seconds: int) -> dict[str, Any]:
    """`examine` in a separate process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(seconds)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        with os.fdopen(write, "w") as out:
            json.dump(examine(kind, model_type), out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if text:
        return json.loads(text)  # type: ignore[no-any-return]
    note = f"took more than {seconds} s or {MEMORY >> 30} GiB"
    lost = {"default": {"outcome": "not built", "note": note}}
    return {"kind": kind, "model_type": model_type, "class": "", "outcome": "not built", "variants": lost}


def sweep(todo: list[tuple[str, str]], seconds: int) -> Iterator[dict[str, Any]]:
    """A row for each of these (kind, model type)."""
    for kind, name in WARM:
        examine_variant(kind, name, {})
    for kind, name in todo:
        start = time.perf_counter()
        row = apart(kind, name, seconds)
        row["seconds"] = round(time.perf_counter() - start, 1)
        yield row


def report_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Content of the report: counts of outcomes, and the rows by kind and name."""
    rows = sorted(rows, key=lambda row: (row["kind"] != LANGUAGE, row["model_type"]))
    counts = {kind: collections.Counter(row["outcome"] for row in rows if row["kind"] == kind) for kind in KINDS}
    return {
        "benchmark": "architectures",
        "command": command("architectures", ()),  # the file holds all architectures, whichever ran last
        "machine": machine(),
        "versions": versions("torch", "transformers", "interlace"),
        "counts": {kind: {name: result[name] for name in OUTCOMES} for kind, result in counts.items()},
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types to run (again); default: all that lack")
    parser.add_argument("--seconds", type=int, default=300, help="of one architecture")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "architectures.json")
    parser.add_argument("--table", type=Path, default=ROOT / "docs" / "architectures.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    old = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = {(row["kind"], row["model_type"]): row for row in old}
    todo = [key for key in population() if (key[1] in options.names if options.names else key not in rows)]
    for row in sweep(todo, options.seconds):
        rows[row["kind"], row["model_type"]] = row
        print(f"{row['kind']:8} {row['model_type']:36} {row['outcome']:9} {row['seconds']:5.1f} s", flush=True)
        write_json(options.out, report_of(list(rows.values())))  # after each row: a stopped sweep resumes from here
    report = report_of(list(rows.values()))
    options.table.write_text(table(report))
    print(json.dumps(report["counts"]))


if __name__ == "__main__":
    main()
