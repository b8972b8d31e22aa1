"""``interlace generate``: answers from a checkpoint of a run, or from an exported or downloaded folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.train.blame import check_at_least
from interlace.train.config.load import ConfigError, blaming, from_table, load
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.model import MultimodalModel

TEXT = "text"
Part = tuple[str, str]
"""(name of a modality, path) or ("text", text)."""


@dataclass(frozen=True)
class Answering:
    """A model with its weights, its tokenizer and the config that says how it reads chats. folder: for messages."""

    config: Config
    model: MultimodalModel
    tokenizer: Any
    folder: Path

    @property
    def source(self) -> str:
        """Name of the config in messages."""
        return str(self.folder / "config.toml")


def generate(options: argparse.Namespace) -> int:
    """``interlace generate``: one answer per turn, each with all turns before it."""
    turns = turns_of(options.given or [])
    folder, at = model_folder(options.model)
    if options.step is not None and (at is not None or not is_run(folder)):
        raise ConfigError(f"--step {options.step}: {options.model} is one checkpoint already")
    check_at_least(1, options, "max_new_tokens")
    if not turns:
        from interlace.modalities import names

        raise ConfigError(f"nothing to answer: give {', '.join(f'--{name}' for name in names())} or --text")
    answering = _of_run(folder, at, options, turns) if is_run(folder) else _of_export(folder, options, turns)
    answers: list[str] = []
    for number in range(len(turns)):
        answers.append(_answer(answering, turns[: number + 1], answers, options.max_new_tokens))
        print(answers[-1], flush=True)
    return 0


def turns_of(given: Sequence[Part]) -> list[list[Part]]:
    """The user's turns: each ends with a text; media after the last text are a turn of their own."""
    turns: list[list[Part]] = [[]]
    for part in given:
        turns[-1].append(part)
        if part[0] == TEXT:
            turns.append([])
    return [turn for turn in turns if any(value for _, value in turn)]


def model_folder(path: Path) -> tuple[Path, Path | None]:
    """(folder, checkpoint or None if none is named) of a run, or (exported folder, None). Raises ConfigError."""
    from interlace.model.checkpoints.module_folder import FACTS

    if (path / FACTS).is_file() or ((path / "config.json").is_file() and not is_run(path)):
        return path, None
    return checkpoint_of(path)


def is_run(folder: Path) -> bool:
    """True for the folder of a run."""
    return (folder / "config.toml").exists()


def checkpoint_of(path: Path) -> tuple[Path, Path | None]:
    """(run folder, checkpoint or None if none is named) from the user's path."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run folder")
    at = path if path.name.startswith("step-") else None
    for folder in (path, path.parent, path.parent.parent):
        if is_run(folder):
            return folder, at
    raise ConfigError(f"{path}: not a run folder (no config.toml)")


def _of_run(folder: Path, at: Path | None, options: argparse.Namespace, turns: Sequence[Sequence[Part]]) -> Answering:
    from interlace.train.data.texts import reads_bytes, tokenizer_of
    from interlace.train.models.build import build, materialize
    from interlace.train.selection import choose, fill

    source = str(folder / "config.toml")
    config = load(source, options.set, open_replicas=True)
    tokenizer = tokenizer_of(config, source=source)
    model = build(config, tokenizer, source=source)
    _check_files(turns)
    if reads_bytes(config):
        raise ConfigError(
            f"{folder}: the prompts of data.dataset = {config.data.dataset!r} are not known here: train with a "
            "tokenizer that has a chat template (data.tokenizer), or answer with your own code"
        )
    chosen = choose(config, folder, at=at, step=options.step, raw=options.raw)
    answering = Answering(config, model, tokenizer, folder)
    _prompt(answering, turns[:1], [])  # refuses unreadable media before minutes of reading weights
    materialize(model, seed=config.run.seed)
    step = fill(config, model, chosen, source=source)
    if chosen.words:  # on stderr: stdout has only the answers
        print(f"interlace: step {step} of {folder} ({chosen.words})", file=sys.stderr)
    return answering


def _of_export(folder: Path, options: argparse.Namespace, turns: Sequence[Sequence[Part]]) -> Answering:
    """The model of an exported folder, or of a whole HuggingFace checkpoint. Raises ConfigError."""
    import torch

    from interlace.model import MultimodalModel
    from interlace.train.data.texts import tokenizer_of

    if options.raw:
        raise ConfigError(f"--raw: {folder} has one set of weights: leave it out")
    _check_files(turns)
    try:
        config = from_table(_table(folder), options.set, source=str(folder))
        tokenizer = tokenizer_of(config, source=str(folder))
        model = MultimodalModel.from_pretrained(folder).to(torch.float32).eval()
    except ConfigError:
        raise
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}: {type(error).__name__}: {error}") from None
    return Answering(config, model, tokenizer, folder)


def _table(folder: Path) -> dict[str, Any]:
    """A config that reads chats as the model of an exported folder does."""
    from interlace.data.chats.encoding.load import load_tokenizer
    from interlace.model.checkpoints.module_folder import FACTS
    from interlace.model.naming import LANGUAGE_MODEL

    table: dict[str, Any] = {
        "run": {"name": "generate"},
        "model": {"path": str(folder)},
        "data": {"dataset": "chats", "train": ["none.jsonl"]},
        "train": {"steps": 1, "batch_size": 1, "warmup_steps": 0},
    }
    if not (folder / FACTS).is_file():
        return table
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    table["model"] = {name: {"path": str(folder / name)} for name in facts["modules"]}
    known = load_tokenizer(folder / LANGUAGE_MODEL)
    ids = {name: given if isinstance(given, int) else given[0] for name, given in facts["placeholders"].items()}
    table["data"] |= facts.get("data", {})
    table["data"]["placeholders"] = {name: known.convert_ids_to_tokens(token) for name, token in ids.items()}
    return table


def _check_files(turns: Sequence[Sequence[Part]]) -> None:
    for path in (Path(value) for turn in turns for kind, value in turn if kind != TEXT):
        if not path.is_file():
            raise ConfigError(f"{path}: a folder, not a file" if path.is_dir() else f"{path}: no such file")


def _answer(answering: Answering, turns: Sequence[Sequence[Part]], answers: Sequence[str], most: int) -> str:
    """The answer to the last turn. answers: to those before it."""
    import torch

    from interlace.data import IGNORE, Sample
    from interlace.train.report.answers import answer

    ids, media = _prompt(answering, turns, answers)
    model, room = answering.model, answering.model.max_length
    if room is not None:
        if len(ids) > room:
            raise ConfigError(
                f"the prompt is {len(ids)} tokens long (text in bytes or words, media take more), but the model of "
                f"{answering.folder} reads max_position_embeddings = {room}; give less"
            )
        most = min(most, room - len(ids) + 1)  # the last token is not read again
    prompt = Sample(ids, torch.full_like(ids, IGNORE), media, "prompt")
    (tokens,) = answer(model, [prompt], end=answering.tokenizer.EOS, max_new_tokens=most)
    text = str(answering.tokenizer.decode(tokens))
    if not text.strip():  # on stderr: stdout has only the answers
        why = f"its {len(tokens)} tokens have no text" if tokens else "the model ended it at once"
        print(f"interlace: the answer is empty: {why}", file=sys.stderr)
    return text


def _prompt(answering: Answering, turns: Sequence[Sequence[Part]], answers: Sequence[str]) -> tuple[Any, Any]:
    """(ids int64 [n], encoder -> media) of the turns, up to where the model answers. Raises ConfigError."""
    from interlace.modalities.errors import BrokenSampleError

    with blaming("", (BrokenSampleError, ImportError)):
        return _chat(answering, turns, answers)


def _chat(answering: Answering, turns: Sequence[Sequence[Part]], answers: Sequence[str]) -> tuple[Any, Any]:
    """Prompt for chats. Raises BrokenSampleError, and ImportError."""
    import torch

    from interlace.data import Media
    from interlace.data.chats.files.shapes import Chat, Turn
    from interlace.data.chats.files.shapes import Part as ChatPart
    from interlace.train.data.feed import chat_format

    messages = []
    for number, turn in enumerate(turns):
        parts = [ChatPart(kind, value) if kind == TEXT else ChatPart(kind, path=value) for kind, value in turn]
        messages.append(Turn("user", tuple(parts), False))
        messages += [Turn("assistant", (ChatPart(TEXT, text),), False) for text in answers[number : number + 1]]
    chats = chat_format(answering.config, answering.model, answering.tokenizer, answering.source)
    chat = Chat(tuple(messages))
    sizes = [chats.look(part.kind, part.path, decode=False) for part in chat.media]
    chat, encoded = chats.encode_prompt(chat, sizes)
    media: dict[str, list[Any]] = {}
    for item, data in zip(encoded.items, chats.load(chat, encoded), strict=True):
        media.setdefault(item.encoder, []).append(Media(item.shape, item.tokens, data, about=item.about))
    return torch.tensor(encoded.ids), media
