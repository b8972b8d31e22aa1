"""Datasets of the user: ``data.dataset = "package.module:Class"``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.train.config.load import ConfigError, imported
from interlace.train.config.sections import Config
from interlace.train.data.texts import ModelTokenizer
from interlace.train.models.media_specs import media_specs

if TYPE_CHECKING:
    from interlace.data import DatasetSetup, SampleDataset, Tokenizer
    from interlace.model import MultimodalModel


def dataset_class(path: str, source: str = "config") -> type[SampleDataset]:
    """The dataset class at "package.module:Class". Raises ConfigError if it is not one."""
    from interlace.data import SampleDataset

    where = f"{source}: [data] dataset"
    class_ = imported(path, where)
    if not isinstance(class_, type):
        raise ConfigError(f"{where} = {path!r} is no class, but the {type(class_).__name__} {class_!r}")
    if not issubclass(class_, SampleDataset):
        raise ConfigError(f"{where} = {path!r}: derive the class from interlace.data.SampleDataset")
    if missing := sorted(class_.__abstractmethods__):
        raise ConfigError(f"{where} = {path!r} lacks the method {missing[0]}, see interlace.data.SampleDataset")
    return class_


def opened(
    config: Config, model: MultimodalModel, tokenizer: Tokenizer, source: str, say: Callable[[str], None]
) -> tuple[SampleDataset, SampleDataset]:
    """The training and the held-out data of the user's class. Raises ConfigError."""
    path, options = config.data.dataset, config.data.options
    made = dataset_class(path, source)
    where, setup = f"{source}: [data] dataset = {path!r}", _setup(config, model, tokenizer, source)
    try:
        inspect.signature(made).bind("train", setup, **options)
    except TypeError as error:
        raise ConfigError(f"{where} with data.options = {options}: {error}") from None
    splits = []
    for split in ("train", "heldout"):
        try:
            splits.append(dataset := made(split, setup, **options))  # type: ignore[call-arg]
            problem = _problem(dataset, setup.max_tokens)
        except Exception as error:  # user code may raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())
        if problem:
            raise ConfigError(f"{where}, split {split!r}: {problem}")
    return splits[0], splits[1]


def _problem(dataset: SampleDataset, max_tokens: int | None) -> str:
    """Why a dataset cannot be trained on; "" if it can."""
    from interlace.data import Sample

    if not len(dataset):
        return "has no samples"
    if not isinstance(first := dataset.sample(0, 0), Sample):
        return f"sample(0, 0) gives a {type(first).__name__}, not an interlace.data.Sample"
    if max_tokens is None:
        return ""
    lengths = dataset.token_lengths
    if (most := int(lengths.max())) > max_tokens:
        return f"sample {int(lengths.argmax())} has {most:,} tokens, at most {max_tokens:,} fit"
    return ""


def _setup(config: Config, model: MultimodalModel, tokenizer: Tokenizer, source: str) -> DatasetSetup:
    from interlace.data import DatasetSetup, cache_folder
    from interlace.train.models.build import build

    data, whole = config.data, config.model.path is not None
    counting: Any = build(config, tokenizer, source=source)  # workers get its encoders, which have no weights
    return DatasetSetup(
        tokenizer=tokenizer,
        placeholders=dict(model.placeholders),
        tokens={name: encoder.tokens for name, encoder in counting.encoders.items()},
        specs={} if whole else media_specs(config, model, source=source),
        processor=tokenizer.processor if isinstance(tokenizer, ModelTokenizer) else None,
        max_tokens=data.max_tokens or model.max_length,
        seed=config.run.seed,
        held_out=data.held_out,
        train=tuple(data.train),
        validation=tuple(data.validation),
        cache=Path(cache_folder(data.cache)),
    )
