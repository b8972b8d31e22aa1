"""Batches for simulating candidates: from the config's own data, or of equal samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from interlace.costs.step import Size
from interlace.data.workers.produced import ReadAhead
from interlace.modalities import named
from interlace.model import IGNORE, Media, Sample
from interlace.model.inputs.placeholders import token_ids
from interlace.model.naming import LANGUAGE_MODEL
from interlace.run.tables.batch import GlobalBatch
from interlace.run.tables.sizes import size_of
from interlace.train.config.load import ConfigError
from interlace.train.config.parallel import Parallel
from interlace.train.config.sections import Config
from interlace.train.data.feed import loader
from interlace.train.models.costs import budget_loads

if TYPE_CHECKING:
    from interlace.costs.step import Costs
    from interlace.data import SampleDataset
    from interlace.model import MultimodalModel

BATCHES = 2
"""Batches of data for the simulation of a candidate."""
_POOL = 256  # samples for measuring how uneven the data are
_LARGEST_NOMINAL = 4096  # samples


@dataclass(frozen=True)
class Work:
    """Input of the simulated steps. batches: samples, or rows of them. origin: description."""

    batches: tuple[list[Sample] | list[list[Sample]], ...]
    origin: str

    def samples(self) -> list[Sample]:
        """Samples of the first batch."""
        return [sample for each in self.batches[0] for sample in (each if isinstance(each, list) else [each])]

    def totals(self, model: MultimodalModel) -> dict[str, Size]:
        """Module -> mean size of a batch, with samples counted one by one."""
        sizes = {}
        for name in model.modules_order():
            each = [size_of(model, name, [s]) for batch in self.batches for s in GlobalBatch.of(batch).samples]
            sizes[name] = Size(*(sum(column) / len(self.batches) for column in zip(*each, strict=True)))
        return sizes


def has_data(config: Config) -> bool:
    """True if the files named in the config exist."""
    data = config.data
    if data.own:
        return True
    from interlace.data.chats.files import records as chats_files

    try:
        chats_files.find([name for each in data.each_source() for name in each.train])
    except ValueError:
        return False
    return True


def real_work(config: Config, data: SampleDataset, batch_size: int) -> Work:
    """The first batches of a run of the config from the training set `data`. Raises ConfigError.

    A stream's training samples are unknown, so its validation samples are used, repeated if there are too few.
    """
    if config.data.reading == "stream":
        order = np.random.default_rng([config.run.seed, 4]).permutation(len(data)).tolist()
        drawn = [data.sample(order[i % len(order)], 0) for i in range(BATCHES * batch_size)]
        batches = tuple(drawn[first : first + batch_size] for first in range(0, len(drawn), batch_size))
        return Work(batches, f"{BATCHES} batches of the validation samples of {data.name}, which are read as a stream")
    own, seed = config.data, config.run.seed
    ahead = ReadAhead(prefetch=0, wanted=lambda _: [])
    reader = loader(data, batch_size, own.row_tokens, seed=seed, drop_last=own.drop_last, ahead=ahead)
    try:
        batches = tuple(next(reader) for _ in range(BATCHES))
    finally:
        reader.close()
    return Work(batches, f"{BATCHES} batches of {data.name}")


def pool(data: SampleDataset) -> list[Sample]:
    """Samples spread over the training set, not decoded."""
    count = min(_POOL, len(data))
    return [data.sample(i * len(data) // count, 0) for i in range(count)]


def nominal_work(config: Config, model: MultimodalModel, batch_size: int) -> Work:
    """A batch of identical samples, for planning without data: an item of each encoder and a full row of text.

    Raises ConfigError if the text budget has no room for an item of each encoder.
    """
    if batch_size > _LARGEST_NOMINAL:
        raise ConfigError(
            f"train.batch_size = {batch_size} exceeds {_LARGEST_NOMINAL} samples, the limit of plan choose without "
            "data: make the data of the config available"
        )
    train = config.train.model_copy(update={"batch_size": 1, "microbatches": 1})
    alone = config.model_copy(update={"train": train, "parallel": Parallel()})
    rows = round(budget_loads(alone, model)[LANGUAGE_MODEL].tokens)
    media: dict[str, list[Media]] = {}
    ids: list[int] = []
    for name in model.encoders:
        encoder = model.encoders[name]
        shape = named(encoder.kind).nominal(encoder.default_shape, config.data)
        count = encoder.tokens(shape, encoder.default.about)
        media[name] = [Media(shape, count, about=encoder.default.about)]
        ids += [next(iter(token_ids(model.placeholders[name])))] * count
    if len(ids) >= rows:
        raise ConfigError(
            f"data.max_tokens = {rows} is too small for one item of each encoder, {len(ids)} tokens: raise it"
        )
    labels = torch.full((rows,), IGNORE)
    labels[len(ids) :] = 0
    one = Sample(torch.tensor(ids + [0] * (rows - len(ids))), labels, media, "nominal")
    origin = f"{batch_size} samples that fill the budgets of [data], because its files are missing"
    return Work(([one] * batch_size,), origin)


def workloads(samples: Sequence[Sample], model: MultimodalModel, costs: Costs) -> list[list[float]]:
    """Seconds of each sample in each module, forward and backward, on one rank: [samples][modules]."""

    def seconds(name: str, sample: Sample) -> float:
        size = size_of(model, name, [sample])
        return float(costs.of(name, size).per_layer().sum()) if size.rows else 0.0

    return [[seconds(name, sample) for name in model.modules_order()] for sample in samples]
