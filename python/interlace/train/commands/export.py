"""``interlace export``: exports the model of a run's checkpoint for HuggingFace."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.train.commands.generate import checkpoint_of
from interlace.train.config.load import ConfigError, blaming, load
from interlace.train.config.sections import Config

if TYPE_CHECKING:
    from interlace.model import MultimodalModel

READING = ("max_audio_seconds", "on_too_large", "video_fps", "max_video_tokens", "end_of_turn")
"""Keys of [data] that answers of an exported folder depend on."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files with an encoder's preprocessing, the first preferred."""


def export(options: argparse.Namespace) -> int:
    """``interlace export RUN FOLDER``: a whole checkpoint with its original keys, other models as one folder per
    module.

    Adapters (``train.lora``) are merged into the weights; with ``--adapter`` only the adapters are written, for peft.
    ``--check``: exit code 1 if HuggingFace's own classes get another prompt or give another answer (`reloaded`).
    """
    from safetensors import SafetensorError

    from interlace.model.checkpoints.module_folder import PROJECTOR
    from interlace.model.lora import adapter_files, merge_adapters
    from interlace.model.naming import LANGUAGE_MODEL
    from interlace.model.whole.model import dtype_of, new_folder
    from interlace.train.commands.reloaded import ask, check
    from interlace.train.selection import choose, fill

    run, at = checkpoint_of(options.run)
    target: Path = options.folder
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty: name a new folder")  # checked before minutes of reading
    if options.step is not None and at is not None:
        raise ConfigError(f"--step {options.step}: {options.run} is one checkpoint already")
    source = str(run / "config.toml")
    config = load(source, options.set, open_replicas=True)
    base = config.model.path or config.model.modules()[LANGUAGE_MODEL].path or ""
    _check_options(options, config, run, base)
    chosen = choose(config, run, at=at, step=options.step, raw=options.raw)
    model = _model(config, source)
    step = fill(config, model, chosen, source=source)
    asked = None if options.check is None else ask(model, config, options.check, source)  # adapters not yet merged
    with blaming(f"export to {target}", (ValueError, OSError, SafetensorError)):
        if options.adapter:
            parts = model.modules_order() if config.model.path is not None else [LANGUAGE_MODEL]
            if beside := adapter_files(model, target, parts=parts, base=base):
                print(f"the adapter is the language model's; projector of {', '.join(beside)}: {PROJECTOR}")
        else:
            merge_adapters(model)
            if config.model.path is not None:
                model.to(dtype_of(Path(config.model.path)))  # trained in fp32
            with new_folder(target) as made:
                model.save_pretrained(made)
                if config.model.path is None:
                    _companions(config, model, made, source)
                elif config.data.chat_template is not None:  # otherwise the old template is exported
                    shutil.copyfile(config.data.chat_template, made / "chat_template.jinja")
    print(f"{target}: step {step} of {run}{chosen.words and f' ({chosen.words})'}")
    whole = config.model.path
    for line in [] if options.adapter else _for_transformers_5(target, None if whole is None else Path(whole)):
        print(line)
    if asked is None:
        return 0
    checked = check(asked, target)
    print(checked.words(target))
    return 0 if checked.good else 1


def _check_options(options: argparse.Namespace, config: Config, run: Path, base: str) -> None:
    """Raises ConfigError for options that do not fit the run. base: folder of its language model, or ""."""
    if options.check is not None and (options.check < 1 or options.adapter):
        raise ConfigError(
            f"--check {options.check}: " + ("an adapter alone answers nothing" if options.adapter else "1 or more")
        )
    if options.check is not None and config.model.path is not None and config.data.own:
        raise ConfigError(
            f"--check {options.check} asks a whole checkpoint by its processor, which reads chats, and the data are "
            f"{config.data.dataset}: leave --check out"
        )
    if options.adapter and config.train.lora is None:
        raise ConfigError(f"--adapter: {run} has trained none ([train.lora]): leave it out")
    if options.adapter and not base:
        raise ConfigError(
            "--adapter: the language model began with random weights, so what the adapter is for lies nowhere: leave "
            "out --adapter, which merges it"
        )


def _for_transformers_5(target: Path, source: Path | None) -> list[str]:
    """Warnings on parts of an exported model that transformers 4 would misread; source: the whole checkpoint."""
    from interlace.model.checkpoints.config_file import ROTATION, for_transformers_5
    from interlace.train.models.pretrained import shapes_of

    lines = [
        f"{file}: load it with transformers 5; transformers 4 ignores {ROTATION} and rotates by its defaults"
        for file in for_transformers_5(target)
    ]
    if source is not None:
        now, before = shapes_of(target), shapes_of(source)
        moved = sorted(key for key in now if before.get(key) != now[key])
        lines += [
            f"{target}: load it with transformers 5; {key} is {now[key]}, in {source} {before.get(key, 'absent')}"
            for key in moved[:1]
        ]
    return lines


def _companions(config: Config, model: MultimodalModel, folder: Path, source: str) -> None:
    """Writes the companion files of a model of modules to `folder`: tokenizer, chat template and pixel scaling.

    Each module that was read from a folder keeps that folder's config.json. The run's own tokenizer (with the
    placeholders) is written, unless it is bytes. Each encoder gets its folder's preprocessing files, with the config's
    mean and std if given.
    """
    from interlace.model.checkpoints.config_file import copy_config
    from interlace.model.checkpoints.module_folder import FACTS
    from interlace.model.naming import LANGUAGE_MODEL
    from interlace.train.data.texts import ModelTokenizer, reads_bytes, tokenizer_of
    from interlace.train.models.media_specs import pixels

    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    facts["data"] = {key: getattr(config.data, key) for key in config.data.set_of(READING)}  # for interlace generate
    if limit := config.data.image_tokens(0):
        facts["data"]["max_image_tokens"] = limit
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    for name, module in config.model.modules().items():
        if module.path is not None:
            copy_config(folder / name, Path(module.path))
    language_model = folder / LANGUAGE_MODEL
    if not reads_bytes(config):
        tokens = tokenizer_of(config, source=source)
        assert isinstance(tokens, ModelTokenizer)
        tokens.tokenizer.chat_template = tokens.template
        tokens.tokenizer.save_pretrained(language_model)
    for name, spec in config.model.encoders().items():
        files = [Path(spec.path) / each for each in PROCESSORS] if spec.path is not None else []
        for own in filter(Path.is_file, files):
            shutil.copyfile(own, folder / name / own.name)
        if spec.mean or spec.std:
            file = folder / name / PROCESSORS[0]
            settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            settings |= {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
            settings["image_mean"], settings["image_std"] = map(list, pixels(config, model, name, source))
            file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _model(config: Config, source: str) -> MultimodalModel:
    """The run's model on the CPU, with arbitrary weights."""
    import torch

    from interlace.model import MultimodalModel
    from interlace.train.data.texts import tokenizer_of
    from interlace.train.models.build import build, freeze, materialize

    if config.model.path is not None:  # loaded by HuggingFace's classes, so that it is saved under its original keys
        with blaming(f"{source}: [model] path"):
            model = MultimodalModel.from_pretrained(config.model.path).to(torch.float32)
        freeze(config, model, source)
        return model
    return materialize(build(config, tokenizer_of(config, source=source), source=source), seed=config.run.seed)
