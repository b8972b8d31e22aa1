"""User mistakes: a folder with all inputs of a run, into which one fault at a time is planted.

The tables of faults are in faults_config, faults_checkpoints and faults_runs. Faults of records and media are in
tests/data/chat_faults.py. test_faults_told runs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interlace.cli import main
from tests.data import chat_families
from tests.data.chat_faults import TEMPLATE
from tests.train.own_data import CONFIG
from tests.train.whole_families import MODELS

WHOLE = """
[run]
name = "whole"
folder = "{folder}/runs"

[model]
path = "{folder}/whole"

[data]
dataset = "chats"
train = ["{folder}/train.jsonl"]
validation = ["{folder}/validation.jsonl"]
cache = "{folder}/cache"
max_tokens = 256

[train]
steps = 2
batch_size = 2
warmup_steps = 1
validation_samples = 2

[parallel]
ranks = 1

[log]
trackers = []
trace_step = 0
samples = 0
"""
LEFT = re.compile(r"runs/[^/]+/[^/]+/(run\.json|config\.toml|checkpoints/step-\d+\.torn/[^/]+)")


@dataclass(frozen=True)
class Fault:
    """name: the mistake, in words. command: of the CLI, {at} is the folder. says: required text of its one-line error,
    the mistake and what to do. plant: creates the fault. code: exit code; with 0 `says` may be on stdout.
    """

    name: str
    command: str
    says: tuple[str, ...]
    plant: Callable[[Place], object] | None = None
    code: int = 2


class Place:
    """A user's folder: own.toml (random weights) with a finished run, parts.toml (folders of an encoder and of a
    language model in shards), whole.toml (a LLaVA), chats about images, a tokenizer.
    """

    def __init__(self, at: Path) -> None:
        self.at = at
        self.before: dict[str, bytes] = {}
        tokenizer = chat_families.trained({}, ("<|im_start|>", "<|im_end|>", "<image>"))
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(at / "tokenizer")
        paths = [path.relative_to(at) for path in chat_families.pictures(at / "pictures", 4)]
        lines = []
        for number in range(12):
            turns = [("human", f"<image>\nWhat is number {number}?"), ("gpt", f"It is a red cat, {number}.")]
            record = {"conversations": [{"from": role, "value": text} for role, text in turns]}
            lines.append(json.dumps({**record, "image": str(paths[number % 4])}))
        (at / "train.jsonl").write_text("\n".join(lines[:8]) + "\n")
        (at / "validation.jsonl").write_text("\n".join(lines[8:]) + "\n")
        own = CONFIG.format(folder=at).replace("samples = 3", "samples = 0").replace("steps = 1\n", "steps = 0\n")
        own = own.replace("[checkpoint]\n", "[checkpoint]\nevery = 1\n")
        (at / "own.toml").write_text(own)
        self._folders()
        parts = own.replace('name = "own"', 'name = "parts"')
        for name, folder in (("vision", "encoder"), ("language_model", "language")):
            begin = parts.index(f"[model.{name}.config]")
            parts = parts[:begin] + parts[parts.index("\n\n", begin) + 2 :]
            kind = "SiglipVisionModel" if name == "vision" else "LlamaForCausalLM"
            parts = parts.replace(f'architecture = "{kind}"', f'path = "{at}/{folder}"')
        (at / "parts.toml").write_text(parts)
        (at / "whole.toml").write_text(WHOLE.format(folder=at))
        assert main(["train", str(at / "own.toml")]) == 0
        [self.run] = [path for path in (at / "runs" / "own").iterdir() if path.name != "latest"]
        self.before = self.contents()

    def _folders(self) -> None:
        import transformers

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision = transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=8)
        transformers.SiglipVisionModel(vision).save_pretrained(self.at / "encoder")
        more = {"num_key_value_heads": 1, "max_position_embeddings": 512, "vocab_size": 420}
        language = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more))
        language.save_pretrained(self.at / "language", max_shard_size="16KB")
        family = chat_families.llava(self.at / "whole")
        MODELS["llava"](family.processor.tokenizer, family.placeholder).save_pretrained(self.at / "whole")

    def contents(self) -> dict[str, bytes]:
        """All user files, by path. The cache is not compared or restored: it is derived from the files."""
        files = (path for path in self.at.rglob("*") if path.is_file() and not path.is_symlink())
        names = {path: path.relative_to(self.at).as_posix() for path in files}
        return {name: path.read_bytes() for path, name in names.items() if not name.startswith("cache/")}

    def restore(self) -> None:
        """Restores all files except the cache to their state before a fault."""
        now = self.contents()
        for name in now.keys() - self.before.keys():
            (self.at / name).unlink()
        for name, data in self.before.items():
            if now.get(name) != data:
                (self.at / name).parent.mkdir(parents=True, exist_ok=True)
                (self.at / name).write_bytes(data)
        for path in sorted(self.at.rglob("*"), reverse=True):
            if path.is_symlink() and path.name != "latest":
                path.unlink()
            if path.is_dir() and not path.is_symlink() and "cache" not in path.parts:
                with contextlib.suppress(OSError):
                    path.rmdir()  # an empty folder

    # Planting of faults.

    def write(self, name: str, data: str | bytes) -> None:
        path = self.at / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.at / name).read_text()
        assert old in text, (name, old)
        self.write(name, text.replace(old, new, 1))

    def table(self, name: str, **values: Any) -> None:
        """Changes keys of a JSON file; None removes a key."""
        result = {**json.loads((self.at / name).read_text()), **values}
        self.write(name, json.dumps({key: value for key, value in result.items() if value is not None}))

    def cut(self, name: str, part: float = 0.5) -> None:
        """Truncates a file."""
        data = (self.at / name).read_bytes()
        self.write(name, data[: int(len(data) * part)])

    def remove(self, name: str) -> None:
        path = self.at / name
        for inner in sorted(path.rglob("*"), reverse=True) if path.is_dir() else ():
            inner.rmdir() if inner.is_dir() else inner.unlink()
        path.rmdir() if path.is_dir() else path.unlink()

    def record(self, *turns: Any, **more: Any) -> None:
        """Adds a chat to the training data."""
        said = [{"role": role, "content": content} for role, content in turns]
        self.write("train.jsonl", (self.at / "train.jsonl").read_text() + json.dumps({"messages": said, **more}) + "\n")

    def tensors(self, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Changes the tensors of a safetensors file."""
        from safetensors.torch import load_file, save_file

        result = load_file(self.at / name)
        change(result)
        save_file(result, self.at / name, metadata={"format": "pt"})

    def checkpoint(self, step: int) -> str:
        """The folder of a checkpoint of the run, in this folder."""
        return (self.run / "checkpoints" / f"step-{step:08d}").relative_to(self.at).as_posix()


@contextlib.contextmanager
def as_a_command() -> Iterator[None]:
    """Runs the program in the test process; its global settings are restored afterwards."""
    variables = {name: os.environ.pop(name, None) for name in ("RANK", "WORLD_SIZE", "INTERLACE_LAUNCHER")}
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        os.environ.update({name: value for name, value in variables.items() if value is not None})


def lost(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Files that have changed or are missing, except for checkpoints that were set aside unchanged."""
    return [name for name, data in before.items() if after.get(name) != data and data not in _aside(name, after)]


def _aside(name: str, files: dict[str, bytes]) -> list[bytes]:
    """Contents of a checkpoint file under the names of checkpoints that were set aside: step-00000002.torn and the
    like.
    """
    result = re.fullmatch(r"(.*/checkpoints/step-\d+)(/.*)", name)
    if result is None:
        return []
    there = re.compile(rf"{re.escape(result[1])}\.[a-z.]+{re.escape(result[2])}")
    return [data for other, data in files.items() if there.fullmatch(other)]


def left_behind(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """New files, except those that a refused run may leave: its numbered folder, its config, and checkpoints that were
    set aside.
    """
    return [name for name in after if name not in before and not LEFT.fullmatch(name)]
