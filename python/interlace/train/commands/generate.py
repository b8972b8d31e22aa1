"""``interlace generate``: one answer from a checkpoint of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from interlace.train.config.load import ConfigError, load
from interlace.train.config.sections import Config


def generate(options: argparse.Namespace) -> int:
    """``interlace generate``: one answer from a checkpoint."""
    import torch

    from interlace.data import IGNORE, Sample
    from interlace.train.data.texts import tokenizer_of
    from interlace.train.models.build import build, materialize
    from interlace.train.report.answers import answer
    from interlace.train.selection import choose, fill

    folder, at = checkpoint_of(options.run)
    source = str(folder / "config.toml")
    config = load(source, options.set, open_replicas=True)
    if options.step is not None and at is not None:
        raise ConfigError(f"--step {options.step}: {options.run} is one checkpoint already")
    if options.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {options.max_new_tokens}: at least 1")
    if not (options.image or options.speech or options.prompt):
        raise ConfigError("nothing to answer: give --image, --speech or --prompt")
    tokenizer = tokenizer_of(config, source=source)
    model: Any = build(config, tokenizer, source=source)
    for path in (*options.image, *options.speech):
        if not path.is_file():
            raise ConfigError(f"{path}: a folder, not a file" if path.is_dir() else f"{path}: no such file")
    read = _chat if config.data.dataset == "chats" else _caption
    chosen = choose(config, folder, at=at, step=options.step, raw=options.raw)
    ids, media = read(config, model, tokenizer, options, folder)
    materialize(model, seed=config.run.seed)
    step = fill(config, model, chosen, source=source)
    if chosen.words:  # on stderr: stdout has only the answer
        print(f"interlace: step {step} of {folder} ({chosen.words})", file=sys.stderr)
    longest, room = options.max_new_tokens, model.max_length
    if room is not None:
        if len(ids) > room:
            raise ConfigError(
                f"the prompt is {len(ids)} tokens long (text in bytes or words, media take more), but the model of "
                f"{folder} reads max_position_embeddings = {room}; give less"
            )
        longest = min(longest, room - len(ids) + 1)  # the last token is not read again
    prompt = Sample(ids, torch.full_like(ids, IGNORE), media, "prompt")
    (tokens,) = answer(model, [prompt], end=tokenizer.EOS, max_new_tokens=longest)
    print(tokenizer.decode(tokens))
    return 0


def _caption(config: Config, model: Any, tokenizer: Any, options: argparse.Namespace, folder: Path) -> tuple[Any, Any]:
    """Ids and media of a prompt for the digits data: media and a text."""
    import torch

    from interlace import data
    from interlace.data.builtin.digits import ASKED_IN
    from interlace.train.models.media_specs import kinds, media_specs

    specs = media_specs(config, model, source=str(folder / "config.toml"))
    items: list[tuple[str, Any]] = []
    for kind, paths, read in (("image", options.image, data.load_image), ("audio", options.speech, data.load_audio)):
        encoders = [name for name, its in kinds(model).items() if its == kind]
        for path in paths:
            if not encoders:
                raise ConfigError(f"{path}: the model of {folder} has no encoder of {kind}")
            try:
                items += [(name, read(path, specs[name])) for name in encoders]
            except ImportError as error:
                raise ConfigError(f"{path}: {error}") from None
    media: dict[str, list[Any]] = {}
    runs = []
    for modality, tensor in items:
        count = model.encoders[modality].tokens(tuple(tensor.shape))
        media.setdefault(modality, []).append(data.Media(tuple(tensor.shape), count, tensor))
        runs.append((modality, count))
    return torch.tensor(tokenizer.prompt(runs, ASKED_IN, options.prompt)), media


def _chat(config: Config, model: Any, tokenizer: Any, options: argparse.Namespace, folder: Path) -> tuple[Any, Any]:
    """Ids and media of a chat that ends where the model answers."""
    import torch

    from interlace.data import Media
    from interlace.data.chats.files.shapes import BrokenSampleError, Chat, Part, Turn
    from interlace.train.data.feed import chat_format

    files = [("image", path) for path in options.image] + [("audio", path) for path in options.speech]
    parts = [Part(kind, path=str(path)) for kind, path in files]
    parts += [Part("text", options.prompt)] * bool(options.prompt)
    chat = Chat((Turn("user", tuple(parts), False),))
    chats = chat_format(config, model, tokenizer, str(folder / "config.toml"))
    try:
        sizes = [chats.look(part.kind, part.path, decode=False) for part in chat.media]
        chat, encoded = chats.encode_prompt(chat, sizes)
        loaded = chats.load(chat, encoded)
    except (BrokenSampleError, ImportError) as error:
        raise ConfigError(str(error)) from None
    media: dict[str, list[Any]] = {}
    for item, data in zip(encoded.items, loaded, strict=True):
        media.setdefault(item.encoder, []).append(Media(item.shape, item.tokens, data, about=item.about))
    return torch.tensor(encoded.ids), media


def checkpoint_of(path: Path) -> tuple[Path, Path | None]:
    """(run folder, checkpoint or None if none is named) from the user's path."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run folder")
    at = path if path.name.startswith("step-") else None
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "config.toml").exists():
            return folder, at
    raise ConfigError(f"{path}: not a run folder (no config.toml)")
