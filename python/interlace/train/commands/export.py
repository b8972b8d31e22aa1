"""``interlace export``: the model of a run's checkpoint, as HuggingFace loads it again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from interlace.train.commands.generate import checkpoint_of
from interlace.train.config import ConfigError, load
from interlace.train.schema import Config


def export(options: argparse.Namespace) -> int:
    """``interlace export RUN FOLDER``: a whole checkpoint key for key, other models as one folder per module.

    Adapters (``train.lora``) are added to the weights; with ``--adapter`` they are all that is written, for peft.
    """
    from interlace.model.lora import adapter_files, merge_adapters
    from interlace.model.whole import dtype_of
    from interlace.train.build import architecture
    from interlace.train.checkpoint import checkpoints
    from interlace.train.checkpoint.identity import identity_of
    from interlace.train.chosen import choose

    run, at = checkpoint_of(options.run)
    target: Path = options.folder
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty: name a new folder")  # before minutes of reading
    if options.step is not None and at is not None:
        raise ConfigError(f"--step {options.step}: {options.run} is one checkpoint already")
    source = str(run / "config.toml")
    config = load(source)
    if options.adapter and config.train.lora is None:
        raise ConfigError(f"--adapter: {run} has trained none ([train.lora]): leave it out")
    chosen = choose(config, run, at=at, step=options.step, raw=options.raw)
    model = _model(config, source)
    identity = identity_of(model, architecture(config))
    step = checkpoints.load_parameters(chosen.path, model, identity, averaged=chosen.averaged)
    try:
        if options.adapter:
            whole, llm = config.model.path, config.model.modules()["language_model"]
            parts = model.modules_order() if whole is not None else ["language_model"]
            left = adapter_files(model, target, parts=parts, base=whole or llm.path or "")
            if left:
                print(f"{left[0]} and {len(left) - 1} more that were trained are of other modules, and not in there")
        else:
            merge_adapters(model)
            if config.model.path is not None:
                model.to(dtype_of(Path(config.model.path)))  # trained in fp32
            model.save_pretrained(target)
    except (ValueError, OSError) as error:
        raise ConfigError(f"export to {target}: {error}") from None
    print(f"{target}: step {step} of {run}{chosen.words and f' ({chosen.words})'}")
    return 0


def _model(config: Config, source: str) -> Any:
    """The run's model on the CPU, with any weights."""
    import torch

    from interlace.model import MultimodalModel
    from interlace.train.build import build, freeze, materialize
    from interlace.train.texts import tokenizer_of

    if config.model.path is not None:  # as HuggingFace read it: only then it is saved under the keys that it had
        try:
            model = MultimodalModel.from_pretrained(config.model.path).to(torch.float32)
        except ValueError as error:
            raise ConfigError(f"{source}: [model] path: {error}") from None
        freeze(config, model, source)
        return model
    return materialize(build(config, tokenizer_of(config, source=source), source=source), seed=config.run.seed)
