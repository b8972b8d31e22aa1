"""The commands that train, answer and draw: `train`, `generate`, `mask`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from interlace.train import launch, lock, runfolder
from interlace.train.config import ConfigError, dumps, load, loads
from interlace.train.schema import Config


def train(options: argparse.Namespace) -> int:
    """``interlace train``: a rank when torchrun's variables are set, else the launcher of the config's ranks."""
    if launch.under_launcher():
        return _as_rank(options)
    path = _config_path(options)
    config = load(path, options.set)
    if options.take_over and options.resume is None:
        raise ConfigError("--take-over is for going on in a run folder; name it with --resume")
    folder, at = _run_folder(config, options.resume)
    with launch.leaving_on_sigterm(), lock.take(folder, take_over=options.take_over, say=_say) as held:
        return _in_folder(options, config, path, folder, at, held)


def _in_folder(
    options: argparse.Namespace, config: Config, path: Path, folder: Path, at: Path | None, held: lock.RunLock
) -> int:
    """Prepares and runs the training of `config` in a run folder that is locked."""
    from interlace.train.feed import prepare

    config = prepare(config, _say, source=str(path))
    if options.resume is None:
        runfolder.write_config(folder, config)
    launch.say(f"run folder: {folder}")
    world = config.world_size()
    if world == 1:
        from interlace.train.rank import run

        return run(config, source=str(path), folder=folder, at=at, resume=options.resume, held=held)
    command = [sys.executable, "-m", "interlace", "train", str(path)]
    command += ["--debug"] if options.debug else []
    command += ["--resume", str(at or folder)] if options.resume is not None else []
    return launch.run(
        command,
        world,
        folder=folder,
        timeout=config.parallel.timeout,
        threads=config.parallel.threads,
        resume=lambda: (
            f"interlace train --resume {shlex.quote(str(folder))}" if runfolder.has_checkpoint(folder) else ""
        ),
        environment={
            launch.RUN_FOLDER: str(folder),
            launch.LOCK: held.nonce,
            launch.CONFIG: dumps(config),
            launch.SOURCE: str(path),
        },
    )


def _say(line: str) -> None:
    launch.say(f"interlace: {line}")


def _config_path(options: argparse.Namespace) -> Path:
    if options.config is not None:
        return Path(options.config)
    if not options.resume:
        raise ConfigError("train needs a config, such as: interlace train configs/stamps.toml")
    folder = Path(options.resume)
    for place in (folder, folder.parent, folder.parent.parent):
        if (place / "config.toml").exists():
            return place / "config.toml"
    raise ConfigError(f"--resume {options.resume}: no config.toml there; name the config as well")


def _run_folder(config: Config, resume: str | None) -> tuple[Path, Path | None]:
    if resume is None:
        return runfolder.create(config), None
    return runfolder.resolve(config, resume)


def _as_rank(options: argparse.Namespace) -> int:
    """A rank: of the launcher, which has chosen and locked the folder, or of torchrun."""
    from interlace.train.rank import run

    resume, folder = options.resume, os.environ.get(launch.RUN_FOLDER)
    if folder is None:
        path = _config_path(options)
        config = load(path, options.set)
        return run(config, source=str(path), resume=resume, take_over=options.take_over)
    source = os.environ[launch.SOURCE]
    config = loads(os.environ[launch.CONFIG], source=source)
    at = runfolder.resolve(config, resume)[1] if resume else None
    if int(os.environ["RANK"]) > 0:
        return run(config, source=source, folder=Path(folder), at=at, resume=resume)
    with lock.join(Path(folder), os.environ[launch.LOCK]) as held:
        return run(config, source=source, folder=Path(folder), at=at, resume=resume, held=held)


def generate(options: argparse.Namespace) -> int:
    """``interlace generate``: one answer from a checkpoint."""
    import torch

    from interlace import data
    from interlace.train import checkpoint, checkpointfolder
    from interlace.train.build import architecture, build, materialize
    from interlace.train.feed import media_specs
    from interlace.train.generate import answer

    folder, at = _checkpoint_of(options.run)
    source = str(folder / "config.toml")
    config = load(source)
    if options.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {options.max_new_tokens}: at least 1")
    known = languages(config)
    if options.language not in known:
        raise ConfigError(f"--language {options.language}: this run's answers are in {', '.join(known)}")
    tokenizer = data.ByteTokenizer()
    model: Any = build(config, tokenizer, source=source)
    specs = media_specs(config, model)
    items: list[tuple[str, Any]] = []
    for modality, paths, read in (
        ("vision", options.image, data.load_image),
        ("audio", options.speech, data.load_audio),
    ):
        for path in paths:
            if modality not in specs:
                raise ConfigError(f"{path}: the model of {folder} has no {modality} encoder")
            if not path.is_file():
                raise ConfigError(f"{path}: a folder, not a file" if path.is_dir() else f"{path}: no such file")
            try:
                items.append((modality, read(path, specs[modality])))
            except ImportError as error:
                raise ConfigError(f"{path}: {error}") from None
    if not items and not options.prompt:
        raise ConfigError("nothing to answer: give --image, --speech or --prompt")
    materialize(model, seed=config.run.seed)
    path = at or checkpointfolder.newest(runfolder.checkpoints_of(folder))
    if path is None:
        raise ConfigError(f"no whole checkpoint in {runfolder.checkpoints_of(folder)}")
    checkpoint.load_parameters(path, model, checkpoint.fingerprint(model, architecture(config)))
    media: dict[str, list[Any]] = {}
    runs = []
    for modality, tensor in items:
        count = model.encoders[modality].tokens(tuple(tensor.shape))
        media.setdefault(modality, []).append(data.Media(tuple(tensor.shape), count, tensor))
        runs.append((modality, count))
    ids = torch.tensor(tokenizer.prompt(runs, options.language, options.prompt))
    longest, room = options.max_new_tokens, model.max_length
    if room is not None:
        if len(ids) > room:
            raise ConfigError(
                f"the prompt is {len(ids)} tokens long (each byte of text is one, media take more), but the model of "
                f"{folder} reads max_position_embeddings = {room}; give less"
            )
        longest = min(longest, room - len(ids) + 1)  # the last token is not read again
    prompt = data.Sample(ids, torch.full_like(ids, data.IGNORE), media, "prompt")
    (tokens,) = answer(model, [prompt], end=tokenizer.EOS, max_new_tokens=longest)
    print(tokenizer.decode(tokens))
    return 0


def languages(config: Config) -> tuple[str, ...]:
    """The languages that a run of `config` learns to answer in."""
    from interlace.data.stamps import LANGUAGES

    if config.data.dataset == "digits":
        return ("en",)
    return tuple(config.data.languages or LANGUAGES)


def _checkpoint_of(path: Path) -> tuple[Path, Path | None]:
    """(run folder, checkpoint or None for the newest) of what the user named."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run folder")
    at = path if path.name.startswith("step-") else None
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "config.toml").exists():
            return folder, at
    raise ConfigError(f"{path}: not a run folder (no config.toml)")


def mask(options: argparse.Namespace) -> int:
    """``interlace mask``: the attention mask of the first training samples of a config, packed into one row."""
    from interlace.data import ByteTokenizer
    from interlace.train.build import build
    from interlace.train.feed import datasets

    if options.samples < 1:
        raise ConfigError(f"--samples {options.samples}: at least 1")
    config = load(options.config, options.set)
    tokenizer = ByteTokenizer()
    model = build(config, tokenizer, source=str(options.config))
    train_data, _, note = datasets(config, model, tokenizer, source=str(options.config))
    if note:
        print(f"interlace: {note}")
    samples = [train_data.sample(i, 0) for i in range(min(options.samples, len(train_data)))]
    drawn = model.collate(samples, only=["language_model"])["mask"]
    try:
        drawn.plot(options.out, names=dict(enumerate(model.encoders, start=1)))
    except OSError as error:
        raise ConfigError(f"--out {options.out}: cannot write there: {error.strerror}") from None
    print(f"{options.out}: {len(samples)} samples, {drawn.length} tokens")
    return 0
